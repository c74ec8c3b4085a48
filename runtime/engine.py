"""The engine: requests in, steps run, news out.

Owns: the life of a request from submission to its last news, and the text of its output.  Does
not know: threads, HTTP, torch; one thread calls it.
Idea: the scheduler decides, the executor computes, and both see a step as a value; so the whole
engine runs in tests without a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from radixcache.cache import RadixCache
from radixcache.stats import CacheStats
from runtime.config import EngineConfig
from runtime.errors import EngineFailure, InvalidRequest, InvalidSetting, PromptTooLong, ServerBusy
from runtime.plan import StepPlan, StepResult
from runtime.request import FinishReason, Request, RequestOutput, Usage
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.tokenizer.detokenizer import Detokenizer, StopStrings
from runtime.tokenizer.load import Tokenizer


class Executor(Protocol):
    """Whoever computes steps: the model, or a stand-in in tests."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the copies, store K/V of every slice, and choose a token for each draw."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine in numbers, since it started.

    cached_tokens    prompt tokens found in the cache, counted once, at first admission
    finished         requests ended, by reason
    preemptions      times that a sequence gave its blocks back to let an older one get on
    """

    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    finished: dict[str, int]
    cache: CacheStats


class _Live:
    """A request in flight: its sequence, and its output on the way to text."""

    __slots__ = ("detokenizer", "sequence", "stops")

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.stops = StopStrings(sequence.request.sampling.stop)


class Engine:
    """Continuous batching over a prefix cache.

    cache       decides what is shared
    config      how much is taken on at once
    executor    computes steps
    tokenizer   turns output into text; None gives token ids only
    eos_ids     tokens that end a sequence
    vocab_size  token ids of prompts lie below
    draw_seed   gives a seed to each request that brings none
    """

    def __init__(
        self,
        cache: RadixCache,
        config: EngineConfig,
        executor: Executor,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        vocab_size: int,
        draw_seed: Callable[[], int],
    ) -> None:
        capacity = cache.config.num_blocks * cache.config.block_size
        if config.max_len > capacity:
            raise InvalidSetting(
                f"max_len {config.max_len} exceeds the pool's {capacity} tokens: use more K/V "
                "memory or a smaller max_len"
            )
        self.cache = cache
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.scheduler = Scheduler(cache, config)
        self._executor = executor
        self._eos_ids = eos_ids
        self._draw_seed = draw_seed
        self._live: dict[str, _Live] = {}
        self._finished: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return self.scheduler.has_work

    def validate(self, request: Request) -> None:
        """Raise what is wrong with a request; change nothing.

        InvalidRequest (empty prompt, unknown token ids, an id in use, stop strings without a
        tokenizer) or PromptTooLong.
        """
        prompt = np.frombuffer(request.prompt, np.int32)
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if not len(prompt):
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise InvalidRequest(
                f"token ids of this model lie from 0 to {self.vocab_size - 1}", param="prompt"
            )
        if len(prompt) >= self.config.max_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, and this server takes at most "
                f"{self.config.max_len - 1} (max_len {self.config.max_len}, one token of output "
                "included): shorten it, or start the server with more K/V memory or max_len",
                num_tokens=len(prompt),
                max_tokens=self.config.max_len - 1,
            )
        stop_ids = request.sampling.stop_token_ids
        if stop_ids and not (min(stop_ids) >= 0 and max(stop_ids) < self.vocab_size):
            raise InvalidRequest(
                f"token ids of this model lie from 0 to {self.vocab_size - 1}",
                param="stop_token_ids",
            )
        if request.sampling.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer", param="stop")

    @property
    def is_full(self) -> bool:
        """True where `max_waiting` requests wait, and one more would be refused."""
        return len(self.scheduler.waiting) >= self.config.max_waiting

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises what `validate` raises, or ServerBusy where the queue is full; nothing is queued
        then.
        """
        self.validate(request)
        if self.is_full:
            raise ServerBusy(
                f"{self.config.max_waiting} requests wait already: try again later",
                retry_after_s=1.0,
            )
        seed = request.sampling.seed
        sequence = Sequence(request, seed=self._draw_seed() if seed is None else seed)
        self._live[request.request_id] = _Live(sequence, self.tokenizer)
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks; return its last news, None if unknown."""
        live = self._live.get(request_id)
        return self._end(live, "abort", text="", tokens=()) if live else None

    def let_go(self) -> None:
        """Release finished sequences whose last token is still to be computed for the cache."""
        for sequence in list(self.scheduler.closing):
            self.scheduler.drop(sequence)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the news of every request that it moved.

        A step that fails ends its own requests with an error; all others go on.
        """
        plan = self.scheduler.schedule()
        if not plan.slices:
            return self._stuck()
        self._totals["steps"] += 1
        try:
            result = self._executor.execute(plan)
        except Exception as error:
            return self._fail(f"{type(error).__name__}: {error}")
        news = self.scheduler.apply(result)
        return [self._advance(sequence, token) for sequence, token in news]

    def stats(self) -> EngineStats:
        """Return the counters as one record; O(1)."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self._totals["steps"],
            prompt_tokens=self._totals["prompt_tokens"],
            cached_tokens=self._totals["cached_tokens"],
            completion_tokens=self._totals["completion_tokens"],
            preemptions=self.scheduler.num_preemptions,
            finished=dict(self._finished),
            cache=self.cache.stats(),
        )

    def check(self) -> None:
        """Check the cache's invariants, and that every lease belongs to a live sequence."""
        self.cache.check()
        held = {live.sequence.lease.lease_id for live in self._live.values() if live.sequence.lease}
        held |= {s.lease.lease_id for s in self.scheduler.closing if s.lease}
        orphans = held ^ self.cache.leases.keys()
        if orphans:
            raise EngineFailure(f"leases without a sequence, or the reverse: {sorted(orphans)}")

    def _advance(self, sequence: Sequence, token: int | None) -> RequestOutput:
        live = self._live[sequence.request.request_id]
        if token is None:
            return self._news(live, text="", tokens=())
        if len(sequence.output) == 1:
            self._totals["prompt_tokens"] += sequence.num_prompt_tokens
            self._totals["cached_tokens"] += sequence.num_cached or 0
        self._totals["completion_tokens"] += 1
        sampling = sequence.request.sampling
        stopped = token in sampling.stop_token_ids or (
            token in self._eos_ids and not sampling.ignore_eos
        )
        text, found = "", False
        if live.detokenizer and not stopped:
            text, found = live.stops.push(live.detokenizer.push([token]))
        if stopped or found:
            return self._end(live, "stop", text=text, tokens=(token,), found=found)
        limit = sampling.max_tokens or self.config.max_len
        if len(sequence.output) >= limit or sequence.num_tokens >= self.config.max_len:
            return self._end(live, "length", text=text, tokens=(token,))
        return self._news(live, text=text, tokens=(token,))

    def _end(
        self,
        live: _Live,
        reason: FinishReason,
        *,
        text: str,
        tokens: tuple[int, ...],
        found: bool = False,
        error: str | None = None,
    ) -> RequestOutput:
        if live.detokenizer and not found:
            rest, found = live.stops.push(live.detokenizer.flush())
            text += rest if found else rest + live.stops.flush()
        last = self._news(live, text=text, tokens=tokens, reason=reason, error=error)
        if reason in ("stop", "length"):
            self.scheduler.finish(live.sequence)
        else:
            self.scheduler.drop(live.sequence)
        del self._live[live.sequence.request.request_id]
        self._finished[reason] += 1
        return last

    def _news(
        self,
        live: _Live,
        *,
        text: str,
        tokens: tuple[int, ...],
        reason: FinishReason | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        sequence = live.sequence
        cached = sequence.num_cached or 0
        computed = min(sequence.num_computed, sequence.num_prompt_tokens) - cached
        return RequestOutput(
            request_id=sequence.request.request_id,
            text=text,
            token_ids=tokens,
            usage=Usage(
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=cached,
                computed_tokens=max(0, computed),
                completion_tokens=len(sequence.output),
            ),
            finish_reason=reason,
            error=error,
            is_last=reason is not None,
        )

    def _fail(self, reason: str) -> list[RequestOutput]:
        """End every request of the step in progress; what it wrote is not published."""
        ended = []
        for sequence in self.scheduler.planned():
            live = self._live.get(sequence.request.request_id)
            if live is None or live.sequence is not sequence:
                self.scheduler.drop(sequence)  # was closing: its caller has everything
            else:
                ended.append(self._end(live, "error", text="", tokens=(), error=reason))
        return ended

    def _stuck(self) -> list[RequestOutput]:
        """Nothing could be planned: whoever waits first can't be served with what is left."""
        if self.scheduler.running or self.scheduler.closing or not self.scheduler.waiting:
            return []
        sequence = self.scheduler.waiting[0]
        live = self._live[sequence.request.request_id]
        reason = "the pool has no room: its blocks are held by leases outside the engine"
        return [self._end(live, "error", text="", tokens=(), error=reason)]
