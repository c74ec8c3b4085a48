"""Any history of a tiny real model leaves the bits alone.

Hypothesis draws the schedule: requests that share prefixes, chunks, steps, aborts, preemptions,
forks that are held, eviction, rechecks in between.  Every row that is computed, every
token in the pool and every answer is held against the same request alone, without a cache.
"""

from __future__ import annotations

import functools
from itertools import chain

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from runtime.executor.executor import ModelExecutor
from runtime.models.llama import LlamaModel
from runtime.recheck import Recheck
from runtime.request import SamplingParams
from tests.support.histories import BOUNDED, LONG, STRESS
from tests.support.invisibility import CPU, Alone, WatchedEngine
from tests.support.tiny_models import random_weights, tiny_config

PIECES = (tuple(range(1, 4)), (5,), (7, 7), tuple(range(10, 21)), tuple(range(30, 50)), (9,) * 40)
HOW = (
    SamplingParams(max_tokens=5),
    SamplingParams(max_tokens=1, prompt_logprobs=2),
    SamplingParams(max_tokens=4, temperature=0.9, seed=3, logprobs=2),
    SamplingParams(max_tokens=6, temperature=1.0, top_k=20, seed=11, n=3, presence_penalty=0.5),
)
NUM_TOKENS = 320  # of the pool; requests of up to 200 press each other out


@functools.cache
def alone(dtype: torch.dtype) -> Alone:
    """The reference; what it has computed serves every history."""
    config = tiny_config(head_dim=64, max_len=NUM_TOKENS)
    return Alone(LlamaModel(config, random_weights(config).items(), dtype=dtype, device=CPU), dtype)


class InvisibleMachine(RuleBasedStateMachine):
    """Submits, steps, aborts, preempts, forks and evicts, in any order."""

    @initialize(
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        block_size=st.sampled_from((1, 4, 16, 64)),
        chunk=st.sampled_from((0, 0, 1, 7, 64)),
        max_running=st.sampled_from((3, 4, 16)),
        budget=st.sampled_from((20, 100, 4096)),
        cached=st.sampled_from((True,) * 7 + (False,)),
    )
    def build(
        self,
        dtype: torch.dtype,
        block_size: int,
        chunk: int,
        max_running: int,
        budget: int,
        cached: bool,
    ) -> None:
        self.count = 0
        self.watched = WatchedEngine(
            alone(dtype),
            num_blocks=NUM_TOKENS // block_size,
            block_size=block_size,
            cached=cached,
            chunk=chunk,
            max_running=max_running,
            max_step_tokens=budget,
        )
        executor = ModelExecutor(self.watched.alone.model, self.watched.executor.store)
        self.recheck = Recheck(self.watched.engine, executor, every=1)

    @rule(pieces=st.lists(st.sampled_from(PIECES), max_size=5), how=st.integers(0, len(HOW) - 1))
    def submit(self, pieces: list[tuple[int, ...]], how: int) -> None:
        self.count += 1
        self.watched.submit(f"r{self.count}", [2, *chain(*pieces)], HOW[how])

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.watched.step()

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 3))
    def abort(self, back: int) -> None:
        self.watched.abort(f"r{max(1, self.count - back)}")

    @rule()
    def preempt(self) -> None:
        self.watched.preempt()

    @rule(keep=st.integers(0, 2))
    def fork(self, keep: int) -> None:
        self.watched.release_forks(keep=keep)
        self.watched.fork()

    @rule(count=st.sampled_from((1, 3, 1000)))
    def evict(self, count: int) -> None:
        self.watched.cache.evict(count)

    @precondition(lambda self: not self.watched.engine.has_work)
    @rule(count=st.integers(1, 3))
    def rest(self, count: int) -> None:
        for _ in range(count):
            if self.recheck.has_work:
                self.recheck.advance()

    def teardown(self) -> None:
        if hasattr(self, "watched"):
            self.watched.release_forks()
            self.watched.run()
            while self.recheck.has_work:
                self.recheck.advance()
            assert self.recheck.stats.kv == self.recheck.stats.sampled == 0
            self.watched.engine.check()


TestInvisible = InvisibleMachine.TestCase
TestInvisible.settings = (
    settings(LONG, max_examples=1500)
    if STRESS
    else settings(BOUNDED, max_examples=40, stateful_step_count=25, phases=[Phase.generate])
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
