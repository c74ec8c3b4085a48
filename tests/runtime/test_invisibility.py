"""The cache is invisible: the same bits whatever is cached, in any chunks, batch and blocks.

The quick run plays a selection of the matrix in which every two settings meet; with
`RADIXCACHE_STRESS=1` the whole of it is played.  See docs/testing.md.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch

from runtime.executor.executor import ModelExecutor
from runtime.llm import LLM
from runtime.models.llama import LlamaModel
from runtime.request import SamplingParams
from tests.support.covering import Row, all_rows, covering_rows, pairs_of
from tests.support.histories import STRESS, WHOLE
from tests.support.invisibility import CPU, Alone, WatchedEngine
from tests.support.tiny_models import random_weights, tiny_config

HOW = {
    "cached": (True, False),
    "block_size": (16, 1, 64),
    "chunk": (7, 0, 64, 512, 1),  # 0: all
    "companions": (7, 0, 1, 31),
    "preempted": (False, True),
    "forked": (False, True),
    "threads": (1, 2),
}
MODEL = {"gqa": (3, 1, 9), "head_dim": (64, 128), "dtype": ("float32", "bfloat16")}


def each_on_one_model() -> list[Row]:
    """The whole table of `HOW`, its rows on the models in turn."""
    models = all_rows(MODEL)
    return [
        how | models[(7 * place + place // len(models)) % len(models)]
        for place, how in enumerate(all_rows(HOW))
    ]


TINY = covering_rows(HOW | MODEL)
ROWS = all_rows(HOW | MODEL) if WHOLE else each_on_one_model() if STRESS else TINY
REAL = [  # with test_same_text.py, which plays longer texts; a step of this model takes long
    dict(zip((*HOW, "dtype"), row, strict=True))
    for row in (
        (True, 16, 7, 1, True, False, 2, "float32"),
        (True, 64, 0, 7, False, True, 1, "float32"),
        (True, 1, 64, 1, False, True, 2, "bfloat16"),
    )
]
if STRESS:
    columns = HOW | {"dtype": MODEL["dtype"]}
    REAL = all_rows(columns) if WHOLE else covering_rows(columns)
DRAWN = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.95, seed=7, logprobs=3)
PLAIN = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.95, seed=7)  # decodes in a row
TWICE = SamplingParams(max_tokens=3, temperature=1.0, seed=5, n=2, frequency_penalty=0.5)
GREEDY = SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=1)


@pytest.fixture
def threads(how: Row) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(how["threads"])
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def references() -> Iterator[None]:
    """Let them go with the module: the real model is among them."""
    yield
    tiny_alone.cache_clear()
    real_alone.cache_clear()
    real_model.cache_clear()


@functools.cache
def tiny_alone(gqa: int, head_dim: int, dtype: str, threads: int) -> Alone:
    """The reference of a tiny model; of each thread count its own."""
    config = tiny_config(
        num_heads=max(gqa, 2),
        num_kv_heads=2 if gqa == 1 else 1,
        head_dim=head_dim,
        max_len=1024,
        attention_bias=gqa == 9,
        tie_embeddings=gqa == 3,
    )
    number_type = getattr(torch, dtype)
    model = LlamaModel(config, random_weights(config).items(), dtype=number_type, device=CPU)
    return Alone(model, number_type)


@functools.cache
def real_alone(dtype: str, threads: int) -> Alone:
    """The reference of the real model; of each thread count its own."""
    return Alone(real_model(dtype), getattr(torch, dtype))


@functools.cache
def real_model(dtype: str) -> LlamaModel:
    """The real model, which remembers nothing of whom it computed for."""
    executor = LLM(num_blocks=1, dtype=dtype, max_len=16).runtime.executor
    assert isinstance(executor, ModelExecutor)
    return executor.model


def prompt(count: int, first: int = 0) -> list[int]:
    """Token ids that look like no pattern; the same begin for the same `first`."""
    return [(first * 13 + 7 * i * i + 3 * i) % 61 for i in range(count)]


def play(alone: Alone, how: Row, subject: list[int], *, pool_tokens: int = 6400) -> WatchedEngine:
    """Two rounds of requests that share prefixes, in the company and the manner that `how` says."""
    engine = WatchedEngine(
        alone,
        num_blocks=pool_tokens // how["block_size"],
        block_size=how["block_size"],
        cached=how["cached"],
        chunk=how["chunk"],
        max_running=40,
    )
    count = how["companions"]
    companions = [subject[: 5 * (i % 3)] + prompt(3 + i, first=i) for i in range(count)]
    branch = subject[: 2 * len(subject) // 3] + prompt(20, first=9)
    for turn in range(2):
        for i, tokens in enumerate(companions[: count // 2]):
            engine.submit(f"early {turn} {i}", tokens, TWICE if i == 1 else GREEDY)
        engine.submit(f"subject {turn}", subject, PLAIN if turn else DRAWN)
        if turn:
            engine.submit("branch", branch, TWICE)
        for i, tokens in enumerate(companions[count // 2 :]):
            engine.submit(f"late {turn} {i}", tokens, PLAIN if i == 1 else GREEDY)
        while engine.engine.has_work:
            engine.step()
            if how["forked"]:
                engine.release_forks(keep=40)
                engine.fork()
            if how["preempted"]:
                engine.preempt(only_who_got_on=True)
        engine.release_forks()
        subject = subject + engine.answers[f"subject {turn}"][0].tokens + prompt(5, first=8)
    engine.run()
    engine.engine.check()
    return engine


def real_text(count: int) -> list[int]:
    """The first tokens of a novel."""
    samples = json.loads((Path(__file__).parent / "samples" / "logits.json").read_text())
    ids: list[int] = samples[0]["ids"]
    assert len(ids) >= count
    return ids[:count]


def name_of(how: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in how.items())


@pytest.mark.parametrize("how", ROWS, ids=name_of)
@pytest.mark.usefixtures("threads")
def test_a_tiny_model_gives_the_same_bits(how: Row) -> None:
    alone = tiny_alone(*(how[name] for name in (*MODEL, "threads")))
    length = 530 if how["chunk"] not in (1, 7) else 270 if STRESS else 70 if how["cached"] else 20
    stats = play(alone, how, prompt(length)).engine.stats()
    assert (stats.cached_tokens > 0) == how["cached"]
    assert (stats.preemptions > 0) == how["preempted"]


@pytest.mark.parametrize("how", REAL, ids=name_of)
@pytest.mark.usefixtures("threads")
def test_the_real_model_gives_the_same_bits(how: Row) -> None:
    alone = real_alone(how["dtype"], how["threads"])
    stats = play(alone, how, real_text(70), pool_tokens=1600).engine.stats()
    assert (stats.cached_tokens > 0) == how["cached"]


def test_every_two_settings_of_the_matrix_meet_in_the_selection() -> None:
    columns = HOW | MODEL
    seen = set().union(*map(pairs_of, TINY))
    for (a, values), (b, others) in combinations(columns.items(), 2):
        assert {frozenset(((a, x), (b, y))) for x in values for y in others} <= seen
    assert len(TINY) < 40
