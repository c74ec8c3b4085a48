"""`LLM`: whatever a caller does, nothing stays behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from runtime.config import RuntimeConfig
from runtime.errors import InvalidRequest, InvalidSetting, ModelFileError, PromptTooLong
from runtime.llm import LLM
from runtime.loading import choose_dtype, measured
from runtime.request import RequestOutput, SamplingParams
from tests.support.smollm2 import open_smollm2

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)  # 11 + 5 tokens fill a block


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=16, block_size=16, max_waiting=2, max_running=2)


def assert_nothing_held(llm: LLM) -> None:
    engine = llm.runtime.engine
    engine.check()
    assert not engine.has_work
    stats = engine.stats().cache
    assert (stats.num_leases, stats.num_private, stats.num_pinned) == (0, 0, 0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_exception_in_the_listener_leaves_nothing_behind(
    llm: LLM, error: type[BaseException], at: int
) -> None:
    def listen(output: RequestOutput) -> None:
        if output.usage.completion_tokens == at:
            raise error

    with pytest.raises(error):
        llm.generate([PROMPT, PROMPT], FIVE, on_news=listen)
    assert_nothing_held(llm)
    (done,) = llm.generate([PROMPT], FIVE)
    assert len(done.token_ids) == 5
    assert_nothing_held(llm)


def test_more_prompts_than_the_queue_holds_are_all_answered(llm: LLM) -> None:
    prompts: list[Any] = [[i, i + 1] for i in range(20)]
    done = llm.generate(prompts, SamplingParams(max_tokens=1))
    assert len(done) == 20
    assert [len(completion.token_ids) for completion in done] == [1] * 20
    assert_nothing_held(llm)
    assert llm.generate([], FIVE) == []


WRONG: list[tuple[str, Any]] = [
    ("no prompt", lambda llm: llm.generate(None)),
    ("a number", lambda llm: llm.generate(5)),
    ("a mapping", lambda llm: llm.generate({"a": 1})),
    ("a prompt that is none", lambda llm: llm.generate(["ok", None])),
    ("negative ids", lambda llm: llm.generate([[-1]])),
    ("ids beyond the vocabulary", lambda llm: llm.generate([[49152]])),
    ("no token", lambda llm: llm.generate("")),
    ("too long a prompt", lambda llm: llm.generate([[5] * 256])),
    ("a text that can't fit", lambda llm: llm.generate("x" * 10_000_000)),
    ("sampling as a dict", lambda llm: llm.generate("hi", {"max_tokens": 1})),
    ("a chat that is a text", lambda llm: llm.chat("hi")),
    ("a chat of texts", lambda llm: llm.chat(["hi"])),
    ("no chat", lambda llm: llm.chat(None)),
    ("a message without a role", lambda llm: llm.chat([{"content": "x"}])),
    ("half a surrogate pair", lambda llm: llm.generate("\ud800")),
]


TOO_LONG = ("too long a prompt", "a text that can't fit")


@pytest.mark.parametrize("name", [name for name, _ in WRONG])
def test_a_mistake_is_an_error_of_ours_and_changes_nothing(llm: LLM, name: str) -> None:
    error = PromptTooLong if name in TOO_LONG else InvalidRequest
    with pytest.raises(error):
        dict(WRONG)[name](llm)
    assert_nothing_held(llm)


def test_a_call_within_a_call_is_refused(llm: LLM) -> None:
    seen = []

    def listen(output: RequestOutput) -> None:
        with pytest.raises(InvalidRequest, match="middle of another call"):
            llm.generate([PROMPT], FIVE)
        seen.append(output)

    (done,) = llm.generate([PROMPT], FIVE, on_news=listen)
    assert len(done.token_ids) == 5 == sum(len(output.token_ids) for output in seen)
    assert_nothing_held(llm)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"num_blocks": 10**11}, "num_blocks|blocks"),
    ({"kv_memory_bytes": 10**17}, "blocks"),
    ({"kv_memory_bytes": 10**40}, "blocks"),
    ({"num_threads": 10**6}, "num_threads"),
    ({"device": "mps"}, "mps"),
    ({"device": "meta"}, "meta"),
    ({"eviction_policy": "random"}, "lru"),
]


@pytest.mark.parametrize(("settings", "word"), SETTINGS, ids=[str(s[0]) for s in SETTINGS])
def test_settings_that_cant_be_had_are_named(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidSetting, match=word):
        LLM(**settings)


@pytest.mark.parametrize(("wish", "says"), [("fast", "choose one of"), ("triton", "on cpu")])
def test_kernels_that_cant_be_had_are_named(
    monkeypatch: pytest.MonkeyPatch, wish: str, says: str
) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", wish)
    with pytest.raises(InvalidSetting, match=says):
        LLM(device="cpu")


def test_without_native_kernels_auto_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "torch")
    config, device = RuntimeConfig(device="cpu"), torch.device("cpu")
    assert measured(open_smollm2().config, device) is None
    assert choose_dtype(config, device, None) is torch.float32


def test_a_pipe_is_no_model(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="neither a file nor a folder"):
        LLM(str(tmp_path / "pipe.gguf"))
