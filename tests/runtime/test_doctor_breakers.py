"""The doctor finds each planted prefix breaker, and nothing in logs in which nothing is amiss."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from runtime.doctor.diagnosis import Diagnosis, Doctor
from runtime.doctor.log import request_of
from runtime.doctor.rendering import ModelRenderer, Renderer, WordRenderer
from tests.support.clean_logs import CLEAN, clean_log
from tests.support.request_logs import BREAKERS, broken_log
from tests.support.smollm2 import open_smollm2


@functools.cache
def model_renderer() -> ModelRenderer:
    checkpoint = open_smollm2()
    return ModelRenderer(checkpoint.tokenizer(), checkpoint.chat_template())


def examine(lines: list[Any], renderer: Renderer | None = None, **options: Any) -> Diagnosis:
    log = [request_of(line, line=number) for number, line in enumerate(lines, 1)]
    return Doctor(renderer or WordRenderer(), **options).examine(log)


def reasons(diagnosis: Diagnosis) -> list[str]:
    return [one.reason.value for one in diagnosis.reasons]


def test_there_are_more_than_twenty_breakers_of_as_many_kinds() -> None:
    assert len(BREAKERS) > 20
    assert len({reason for _, reason in BREAKERS.values()}) > 20


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", BREAKERS)
def test_a_planted_breaker_is_found_and_nothing_else(name: str, seed: int) -> None:
    diagnosis = examine(broken_log(name, seed=seed))
    assert reasons(diagnosis) == [BREAKERS[name][1]]
    (found,) = diagnosis.reasons
    assert found.saved_tokens >= 64
    assert diagnosis.mended_hit_rate > diagnosis.hit_rate


@pytest.mark.parametrize("name", BREAKERS)
def test_a_planted_breaker_is_found_by_the_models_own_template_and_tokens(name: str) -> None:
    assert reasons(examine(broken_log(name, seed=3), model_renderer())) == [BREAKERS[name][1]]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_log_raises_no_alarm(name: str, seed: int) -> None:
    renderer = model_renderer() if seed == 3 else None
    diagnosis = examine(clean_log(name, seed), renderer)
    assert reasons(diagnosis) == []
    assert diagnosis.mended_hit_rate == diagnosis.hit_rate


def test_the_example_shows_what_differs_and_where() -> None:
    (found,) = examine(broken_log("clock", seed=1)).reasons
    assert found.example is not None
    assert found.example.place == "the system prompt"
    assert found.example.before.endswith("Current time: ")
    assert found.example.theirs != found.example.ours
    assert found.example.ours.count(":") == 2
    assert found.example.earlier_line < found.example.line
    (found,) = examine(broken_log("tool text", seed=1)).reasons
    assert found.example is not None
    assert found.example.place == "the tool search"


def test_breakers_hide_each_other_and_are_found_one_after_the_other() -> None:
    lines = broken_log("clock", seed=5)
    for number, line in enumerate(lines):
        tools = line["body"]["tools"]
        line["body"]["tools"] = tools[number % 3 :] + tools[: number % 3]
    for renderer in (WordRenderer(), model_renderer()):
        diagnosis = examine(lines, renderer)
        assert sorted(reasons(diagnosis)) == ["clock", "tool_order"]
        assert diagnosis.mended_hit_rate > 0.85


STACKED = [
    ("clock", "cwd"),
    ("uuid", "user's name"),
    ("cwd", "history trimmed"),
    ("clock", "white space"),
    ("git status", "image signed"),
    ("user's name", "json keys"),
    ("one word edited", "replies cleared"),
    ("one word edited", "tools come and go"),
    ("clock", "uuid", "cwd", "git status", "user's name", "tool order"),
]


@pytest.mark.parametrize("names", STACKED, ids=" + ".join)
def test_breakers_that_stand_together_are_all_found(names: tuple[str, ...]) -> None:
    """Mending one of them alone saves nothing, as the others break the prefix at the same place."""
    diagnosis = examine(broken_log(*names, seed=1))
    assert sorted(reasons(diagnosis)) == sorted(BREAKERS[name][1] for name in names)


def test_what_a_mend_saves_is_what_the_program_would_save_without_the_breaker() -> None:
    """The log written anew without the clock computes as little as the doctor foretells."""
    lines = broken_log("clock", seed=1)
    diagnosis = examine(lines)
    for line in lines:
        system = line["body"]["messages"][0]
        kept = [text for text in system["content"].split("\n") if "Current time" not in text]
        system["content"] = "\n".join(kept)
    without = examine(lines)
    before = diagnosis.prompt_tokens - diagnosis.cached_tokens
    after = without.prompt_tokens - without.cached_tokens
    (found,) = diagnosis.reasons
    clock = (diagnosis.prompt_tokens - without.prompt_tokens) / diagnosis.num_requests
    assert found.saved_tokens == pytest.approx(before - after, abs=clock * len(lines) + 16)


def test_a_pool_that_is_too_small_is_told_with_what_a_larger_one_saves() -> None:
    lines = clean_log("chats", 1)
    diagnosis = examine(lines, num_blocks=120)
    assert reasons(diagnosis) == ["evicted"]
    unbounded = examine(lines)
    assert diagnosis.mended_hit_rate == unbounded.hit_rate
    saved = unbounded.cached_tokens - diagnosis.cached_tokens
    assert diagnosis.reasons[0].saved_tokens == saved


def test_times_come_from_the_log_where_it_has_them() -> None:
    lines = broken_log("clock", seed=1)
    assert examine(lines).rate_is_assumed
    for line in lines:
        line |= {"ttft_s": 0.5, "computed": 200}
    diagnosis = examine(lines)
    assert (diagnosis.tokens_per_s, diagnosis.rate_is_assumed) == (400.0, False)
    assert diagnosis.reasons[0].lost_s == diagnosis.reasons[0].lost_tokens / 400
    assert examine(lines, tokens_per_s=100).tokens_per_s == 100
