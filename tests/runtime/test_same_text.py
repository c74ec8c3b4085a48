"""The real model says the same with the cache and without it, however prompts are cut.

`RADIXCACHE_STRESS=1` runs it with long prompts and every combination; see docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from radixcache import CacheConfig, RadixCache
from radixcache.tokens import pack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.engine_stats import EngineStats
from runtime.executor.executor import ModelExecutor
from runtime.kv.store import KVStore
from runtime.llm import LLM
from runtime.request import Request, SamplingParams
from tests.support.histories import STRESS
from tests.support.workloads import WORKLOADS, Ask

NEW_TOKENS = 12 if STRESS else 6
POOL_TOKENS = 16384
COMBINATIONS = [(block, chunk) for block in (1, 16, 64) for chunk in (1, 7, 64, 0)]
# A prefill token by token costs a step each; one block size shows it in the quick run.
QUICK = [(1, 7), (1, 0), (16, 1), (16, 64), (16, 0), (64, 7), (64, 0)]
"""(block size, tokens of a chunk; 0 is unlimited)"""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=1, block_size=64, max_len=64)


def build_engine(llm: LLM, *, block_size: int, chunk: int, cached: bool) -> Engine:
    """An engine over the loaded model, with a pool of its own."""
    runtime, executor = llm.runtime, llm.runtime.executor
    assert isinstance(executor, ModelExecutor)
    num_blocks = POOL_TOKENS // block_size
    store = KVStore(
        runtime.model_config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=executor.model.dtype,
        device=torch.device("cpu"),
    )
    return Engine(
        RadixCache(
            CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_cache=cached)
        ),
        EngineConfig(max_len=8192, max_step_tokens=8192, max_chunk_tokens=chunk, max_running=32),
        ModelExecutor(executor.model, store),
        tokenizer=None,
        eos_ids=frozenset(),
        vocab_size=runtime.model_config.vocab_size,
        draw_seed=lambda: 0,
    )


def run(
    engine: Engine, rounds: list[list[Ask]], encode: Any
) -> tuple[dict[str, tuple[int, ...]], EngineStats]:
    """Run a workload; return each request's new tokens, and the counters."""
    outputs: dict[str, list[int]] = {}
    ends: dict[str, list[int]] = {}
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    for asks in rounds:
        for ask in asks:
            before = ends[ask.parent] if ask.parent else []
            outputs[ask.name] = []
            ends[ask.name] = prompt = before + encode(ask.text)
            engine.submit(
                Request(request_id=ask.name, prompt=pack_tokens(prompt), sampling=sampling)
            )
        while engine.has_work:
            for news in engine.step():
                assert news.finish_reason != "error", news.error
                outputs[news.request_id] += news.token_ids
        for ask in asks:
            ends[ask.name] = ends[ask.name] + outputs[ask.name]
    engine.check()
    return {name: tuple(ids) for name, ids in outputs.items()}, engine.stats()


@pytest.fixture(scope="module", params=WORKLOADS)
def workload(request: pytest.FixtureRequest, llm: LLM) -> Iterator[Any]:
    """A workload's rounds, and what the model says to it without a cache."""
    rounds = scaled(request.param)
    engine = build_engine(llm, block_size=16, chunk=0, cached=False)
    expected, stats = run(engine, rounds, llm.runtime.tokenizer.encode)
    assert stats.cached_tokens == 0
    return rounds, expected


def scaled(name: str) -> list[list[Ask]]:
    """The workload in its quick or its long form; each keeps its full number of requests."""
    sizes = {
        "chat": {"system_sentences": 30 if STRESS else 8},
        "agent tree": {"root_sentences": 40 if STRESS else 8},
        "few-shot": {"template_sentences": 40 if STRESS else 8},
    }
    return WORKLOADS[name](**sizes[name])


@pytest.mark.parametrize(("block_size", "chunk"), COMBINATIONS if STRESS else QUICK)
def test_cached_text_is_the_uncached_text(
    llm: LLM, workload: Any, block_size: int, chunk: int
) -> None:
    rounds, expected = workload
    engine = build_engine(llm, block_size=block_size, chunk=chunk, cached=True)
    said, stats = run(engine, rounds, llm.runtime.tokenizer.encode)
    assert said == expected
    assert stats.cached_tokens > stats.prompt_tokens // 2
