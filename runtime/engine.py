"""The engine: requests in, steps run, news out.

Owns: the life of a request from submission to its last news, and the text of its output.  Does
not know: threads, HTTP, torch; one thread calls it.
Idea: the scheduler decides, the executor computes, and both see a step as a value; so the whole
engine runs in tests without a model.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from sortedcontainers import SortedList

from radixcache.cache import RadixCache
from radixcache.deadlines import Hold
from radixcache.lease import PrefixKey
from radixcache.namespace import Namespace
from runtime.accepting import check_request, longest_of
from runtime.config import EngineConfig
from runtime.engine_stats import EngineStats
from runtime.errors import (
    CopiesFailed,
    EngineFailure,
    InvalidRequest,
    InvalidSetting,
    RequestError,
    ServerBusy,
)
from runtime.live import LiveRequest, plain_news
from runtime.plan import Executor, StepPlan, StepResult, merge_results
from runtime.request import NO_ROOM, FinishReason, Request, RequestOutput, SamplingParams
from runtime.scheduler.public import PUBLIC, PublicPrefix
from runtime.scheduler.scheduler import Applied, Scheduler, Step
from runtime.sequence import Sequence
from runtime.tokenizer.load import Tokenizer

_log = logging.getLogger("radixcache")


class Engine:
    """Continuous batching over a prefix cache.

    cache       decides what is shared
    config      how much is taken on at once
    executor    computes steps
    tokenizer   turns output into text; None gives token ids only
    eos_ids     tokens that end a sequence
    vocab_size  token ids of prompts lie below
    draw_seed   gives a seed to each request that brings none
    clock       tells the time in seconds, never backwards; for deadlines and waiting times
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
        clock: Callable[[], float] = time.monotonic,
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
        # Lets go of what is held outside the engine, for want of room; True if that may help.
        self.give_way: Callable[[Namespace], bool] = lambda namespace: False
        self.on_end: Callable[[Sequence], None] = lambda sequence: None  # of itself, not aborted
        self._executor = executor
        self._eos_ids = eos_ids
        self._draw_seed = draw_seed
        self._clock = clock
        self._public_hold: Hold | None = None
        self._live: dict[str, LiveRequest] = {}
        self._deadlines: SortedList = SortedList()  # (time, arrival, request id)
        self._finished: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return self.scheduler.has_work

    def validate(self, request: Request) -> None:
        """Raise what is wrong with a request, as `check_request` has it; change nothing."""
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        check_request(
            request,
            self.config,
            max_len=self.longest_of(request.namespace),
            vocab_size=self.vocab_size,
            has_tokenizer=self.tokenizer is not None,
        )

    def longest_of(self, namespace: Namespace) -> int:
        """Return how many tokens a sequence of a namespace may have; O(1)."""
        held = self._public_hold.num_tokens if self._public_hold else 0
        return longest_of(namespace, self.cache, max_len=self.config.max_len, num_held=held)

    @property
    def is_full(self) -> bool:
        """True where `max_waiting` requests wait for the first time: one more would be refused."""
        new = sum(sequence.num_cached is None for sequence in self.scheduler.waiting)
        return new >= self.config.max_waiting

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises what `validate` raises, or ServerBusy where the queue is full; nothing is queued
        then.
        """
        self.validate(request)
        request = self._at_present_epoch(request)
        if self.is_full:
            raise ServerBusy(
                f"{self.config.max_waiting} requests wait already: try again later",
                retry_after_s=1.0,
            )
        seed = request.sampling.seed
        sequence = Sequence(request, seed=self._draw_seed() if seed is None else seed)
        if sequence.constraint is not None:
            sequence.allowed = sequence.constraint.allowed()
        now = self._clock()
        live = LiveRequest(
            request,
            self.tokenizer,
            self._eos_ids,
            max_len=self.longest_of(request.namespace),
            submitted=now,
        )
        live.begin(sequence)
        self._live[request.request_id] = live
        self.scheduler.add(sequence)
        if request.timeout_s is not None:
            live.deadline = now + request.timeout_s, sequence.arrival, request.request_id
            self._deadlines.add(live.deadline)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now and free its blocks; return the last news of each of its branches."""
        live = self._live.get(request_id)
        return self._end_all(live, "abort") if live else []

    def share_publicly(self, tokens: bytes) -> Request:
        """Let every namespace have a prefix by copy; return the request that computes it.

        tokens  packed ids of the prefix, such as a system prompt; replaces an earlier one
        Submit the request, and `hold_public` when it has ended.  Until then nothing is shared.
        """
        self.scheduler.admission.public = PublicPrefix(self.cache, tokens)
        sampling = SamplingParams(max_tokens=0)
        return Request(
            request_id="public prefix", prompt=tokens, sampling=sampling, namespace=PUBLIC
        )

    def hold_public(self) -> int:
        """Keep the public prefix from being evicted; return how many tokens are held."""
        self.release_public()
        public = self.scheduler.admission.public
        assert public is not None
        self._public_hold = self.cache.retain(PrefixKey(PUBLIC, public.tokens))
        return self._public_hold.num_tokens

    def release_public(self) -> None:
        """Let the public prefix be evicted like any other, if one is held."""
        if self._public_hold is not None:
            self.cache.end_hold(self._public_hold)
            self._public_hold = None

    def let_go(self) -> None:
        """Release finished sequences whose last token is still to be computed for the cache."""
        for sequence in list(self.scheduler.closing):
            self.scheduler.drop(sequence)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the news of every request that it moved.

        A step that fails is computed again, one sequence at a time: those that fail alone end with
        an error, all others go on.  So does every other request where one's own output fails.
        """
        outputs = self._time_out()
        plan = self.scheduler.schedule()
        if not plan.num_slices:
            return outputs + self._stuck()
        self._totals["steps"] += 1
        self._note_begun()
        try:
            result = self._executor.execute(plan)
        except Exception as error:
            result, failed = self._retry(plan, error)
            outputs += failed
        applied = self.scheduler.apply(result)
        outputs += self._begin(applied.steps)
        outputs += self._read_rows(applied)
        for step in applied.steps:
            outputs += self._advance(step)
        return outputs

    def stats(self) -> EngineStats:
        """Return the counters as one record; O(1)."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self._totals["steps"],
            failed_steps=self._totals["failed_steps"],
            prompt_tokens=self._totals["prompt_tokens"],
            cached_tokens=self._totals["cached_tokens"],
            completion_tokens=self._totals["completion_tokens"],
            preemptions=self.scheduler.num_preemptions,
            finished=dict(self._finished),
            cache=self.cache.stats(),
        )

    def check(self) -> None:
        """Check the cache's invariants, the rows, and that each lease has a live sequence."""
        self.cache.check()
        self.scheduler.check()
        branches = [branch for live in self._live.values() for branch in live.branches.values()]
        held = {branch.sequence.lease.lease_id for branch in branches if branch.sequence.lease}
        held |= {s.lease.lease_id for s in self.scheduler.closing if s.lease}
        orphans = held ^ self.cache.leases.keys()
        if orphans:
            raise EngineFailure(f"leases without a sequence, or the reverse: {sorted(orphans)}")

    def _at_present_epoch(self, request: Request) -> Request:
        """Take a request whose namespace's epoch was raised there; callers know of no epochs."""
        namespace = self.cache.epochs.current(request.namespace)
        if namespace is request.namespace:
            return request
        return msgspec.structs.replace(request, namespace=namespace)

    def _begin(self, steps: list[Step]) -> list[RequestOutput]:
        """Take up new branches, all before one advances, so that none is taken for the last.

        returns  the last news of requests one of whose branches can't begin
        """
        broken: dict[str, tuple[LiveRequest, Exception]] = {}
        for step in steps:
            live = self._live[step.sequence.request.request_id]
            try:
                live.begin(step.sequence)
            except Exception as error:
                broken[live.request.request_id] = live, error
        return [
            news
            for live, why in broken.values()
            for news in self._end_all(live, "error", error=why)
        ]

    def _read_rows(self, applied: Applied) -> list[RequestOutput]:
        """Turn the tokens of a decode batch into outputs: plain tokens first, then the others."""
        outputs, others = plain_news(applied.rows, applied.tokens)
        self._totals["completion_tokens"] += len(outputs)
        for step in others:
            outputs += self._advance(step)
        return outputs

    def _advance(self, step: Step) -> list[RequestOutput]:
        """Turn what a step brought one sequence into its news."""
        sequence = step.sequence
        live = self._live_of(sequence)
        if live is None:  # another branch has just ended all of the request
            return []
        if step.token is not None:
            self._totals["completion_tokens"] += 1
        try:
            news = live.advance(step)
        except Exception as error:  # a constraint or a tokenizer that breaks down is its own
            return self._end_all(live, "error", error=error)
        if news.finish_reason is not None:
            self._finish(live, sequence, news.finish_reason)
            news = msgspec.structs.replace(news, is_last=not live.branches)
        return [news]

    def _finish(self, live: LiveRequest, sequence: Sequence, reason: FinishReason) -> None:
        """End a branch; its sequence goes wherever the scheduler wants it."""
        if reason in ("stop", "length"):
            self.on_end(sequence)
            self.scheduler.finish(sequence)
        else:
            self.scheduler.drop(sequence)
        del live.branches[sequence.index]
        sequence.reader = None
        self._finished[reason] += 1
        if not live.branches:
            del self._live[live.request.request_id]
            if live.deadline is not None:
                self._deadlines.remove(live.deadline)

    def _end_all(
        self, live: LiveRequest, reason: FinishReason, *, error: str | Exception | None = None
    ) -> list[RequestOutput]:
        """End every branch of a request at once, and return their last news."""
        if isinstance(error, Exception):
            if not isinstance(error, RequestError):
                _log.error("request %s failed", live.request.request_id, exc_info=error)
            error = f"{type(error).__name__}: {error}"
        ended = []
        for branch in list(live.branches.values()):
            news = live.last_news(branch, reason, error=error)
            self._finish(live, branch.sequence, reason)
            ended.append(msgspec.structs.replace(news, is_last=not live.branches))
        return ended

    def _time_out(self) -> list[RequestOutput]:
        """End every request whose deadline has passed."""
        ended: list[RequestOutput] = []
        now = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now:
            live = self._live[self._deadlines[0][-1]]
            ended += self._end_all(live, "timeout", error="its time was over")
        return ended

    def _note_begun(self) -> None:
        """Note how long those waited that are computed for the first time, and their prompts."""
        for sequence in self.scheduler.planned_pieces():
            live = self._live_of(sequence)
            if live is not None and live.queue_s is None:
                live.queue_s = self._clock() - live.submitted
                self._totals["prompt_tokens"] += sequence.num_prompt_tokens
                self._totals["cached_tokens"] += sequence.num_cached or 0

    def _retry(self, plan: StepPlan, error: Exception) -> tuple[StepResult, list[RequestOutput]]:
        """Compute the slices of a failed step one by one, and end the requests of those that fail.

        Slices may be computed again, as each writes nothing but its own slots; copies may not, as
        what they copy from may be written in the same step.
        returns  the result of the slices that are left, and the last news of those that are not
        """
        self._totals["failed_steps"] += 1
        is_whole = plan.num_slices == 1 or isinstance(error, CopiesFailed)
        if not is_whole:
            _log.error("a step failed, and is computed again in parts", exc_info=error)
        results: list[tuple[Sequence, StepResult]] = []
        failed: list[tuple[Sequence, Exception]] = []
        for sequence, piece in zip(self.scheduler.planned(), plan.slices, strict=True):
            if is_whole:
                failed.append((sequence, error))
                continue
            try:
                alone = self._executor.execute(StepPlan(step=plan.step, pieces=(piece,)))
                results.append((sequence, alone))
            except Exception as caught:
                failed.append((sequence, caught))
        ended: list[RequestOutput] = []
        for sequence, why in failed:
            live = self._live_of(sequence)
            if live is None:
                self.scheduler.drop(sequence)  # was closing: its caller has everything
            else:
                ended += self._end_all(live, "error", error=why)
        self.scheduler.forget_released(plan)
        # A branch that was computed may have ended with another one of its request.
        left = [result for sequence, result in results if sequence.lease is not None]
        return merge_results(plan.step, left), ended

    def _live_of(self, sequence: Sequence) -> LiveRequest | None:
        """Return the request of a sequence; None where it has ended and is only closing."""
        live = self._live.get(sequence.request.request_id)
        branch = live.branches.get(sequence.index) if live else None
        return live if branch is not None and branch.sequence is sequence else None

    def _stuck(self) -> list[RequestOutput]:
        """Nothing could be planned: whoever found no room can't be served with what is left."""
        refused = self.scheduler.admission.refused
        at_work = self.scheduler.running or self.scheduler.closing
        if at_work or refused is None or self.give_way(refused.request.namespace):
            return []
        live = self._live[refused.request.request_id]
        reason = "what is left of it is kept for others, by their quotas or outside the engine"
        return self._end_all(live, "error", error=f"{NO_ROOM}: {reason}")
