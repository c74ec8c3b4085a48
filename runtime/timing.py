"""Plays prompts on an engine and tells how long they take.

Owns: what is played (cold, warm, decode), and what is timed.  Does not know: models, tables, flags.
Idea: one thread and the engine itself, so that a step is all that there is; medians of several.
"""

from __future__ import annotations

import cProfile
import random
import statistics
import time
from typing import Final

import msgspec

from radixcache.tokens import pack_tokens
from runtime.engine import Engine
from runtime.errors import InvalidSetting
from runtime.request import Request, SamplingParams

NEW_TOKENS: Final = 60
"""Tokens of a first token's own prompt, behind its context."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Time from submission to the first token; median, least and most of the runs.

    cached_tokens, computed_tokens  of the prompt
    """

    cached_tokens: int
    computed_tokens: int
    median_ms: float
    min_ms: float
    max_ms: float


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """A step in which each of `batch` sequences gets one token, behind `context` of their own."""

    batch: int
    context: int
    step_ms: float
    min_ms: float
    max_ms: float
    tokens_per_s: float


class Player:
    """Plays on an engine that has nothing else to do.

    num_new  tokens behind the prefix that a warm prompt shares
    runs     of each first token
    steps    of each decode
    profile  a profiler that runs with each timed step, None: none does
    seed     of the prompts; another one for each player of an engine, or it finds what was played
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_new: int = NEW_TOKENS,
        runs: int = 5,
        steps: int = 16,
        profile: cProfile.Profile | None = None,
        seed: int = 1,
    ) -> None:
        self._engine = engine
        self._num_new = num_new
        self._runs = runs
        self._steps = steps
        self._profile = profile
        self._rng = random.Random(seed)
        self._num_requests = 0

    def first_token(self, num_cached: int, num_prefix: int) -> FirstToken:
        """Time first tokens of prompts that share `num_cached` tokens with an earlier one.

        num_prefix  tokens of each prompt before its last `num_new`, shared or not
        """
        shared = self._ids(num_cached)
        self._play(shared + self._ids(num_prefix - num_cached + self._num_new), timed=False)
        times = [
            self._play(shared + self._ids(num_prefix - num_cached + self._num_new), timed=True)
            for _ in range(self._runs)
        ]
        return FirstToken(
            cached_tokens=num_cached,
            computed_tokens=num_prefix - num_cached + self._num_new,
            median_ms=statistics.median(times) * 1e3,
            min_ms=min(times) * 1e3,
            max_ms=max(times) * 1e3,
        )

    def decode(self, batch: int, context: int) -> Decode:
        """Time steps of sequences that decode together, each behind tokens of its own.

        Raises InvalidSetting where not all of them have room together.
        """
        engine = self._engine
        # Without a limit: those that are computed first decode while the others are.
        names = [self._submit(self._ids(context), max_tokens=None) for _ in range(batch)]
        while engine.scheduler.waiting or any(s.num_behind > 1 for s in engine.scheduler.running):
            engine.step()
        engine.step()
        times = [self._timed_step() for _ in range(self._steps)]
        num_left = len(engine.scheduler.running)
        for name in names:
            engine.abort(name)
        engine.let_go()
        if num_left < batch:
            raise InvalidSetting(
                f"{num_left} of {batch} sequences of {context} tokens decoded together: use more "
                "K/V memory, a larger max_len, or a shorter context"
            )
        step_s = statistics.median(times)
        return Decode(
            batch=batch,
            context=context,
            step_ms=step_s * 1e3,
            min_ms=min(times) * 1e3,
            max_ms=max(times) * 1e3,
            tokens_per_s=batch / step_s,
        )

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._engine.vocab_size) for _ in range(count)]

    def _submit(self, ids: list[int], *, max_tokens: int | None) -> str:
        self._num_requests += 1
        name = f"timed-{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._engine.submit(Request(request_id=name, prompt=pack_tokens(ids), sampling=sampling))
        return name

    def _play(self, ids: list[int], *, timed: bool) -> float:
        """Compute one prompt; return the seconds to its token."""
        self._submit(ids, max_tokens=1)
        seconds = 0.0
        while self._engine.has_work:
            if timed:
                seconds += self._timed_step()
            else:
                self._engine.step()
        return seconds

    def _timed_step(self) -> float:
        began = time.perf_counter()
        if self._profile is not None:
            self._profile.enable()
        self._engine.step()
        if self._profile is not None:
            self._profile.disable()
        return time.perf_counter() - began
