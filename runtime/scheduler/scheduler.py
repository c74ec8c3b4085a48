"""Which tokens are computed in the next step.

Owns: the queue, the running sequences, their leases, and the token budget.  Does not know: text,
devices, clocks.
Idea: there are no phases.  A sequence has tokens and a computed count, and every step lets some
counts catch up: a decode is one token behind, a prompt many, a prefix hit starts ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from radixcache.cache import RadixCache
from radixcache.errors import OutOfBlocks
from radixcache.lease import BlockCopy, PrefixKey
from radixcache.tokens import TOKEN_BYTES, pack_tokens
from runtime.config import EngineConfig
from runtime.plan import Draw, Slice, StepPlan, StepResult
from runtime.sequence import Sequence


class Scheduler:
    """First come, first served, under a budget of tokens a step.

    Oldest first: where blocks run out, the youngest running sequence gives way.  Its computed
    blocks stay in the cache, so that it resumes with a hit.  The oldest always gets on, since
    everything that others hold can be taken back: no set of requests can deadlock.
    """

    def __init__(self, cache: RadixCache, config: EngineConfig) -> None:
        self.cache = cache
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by admission, oldest first
        self.closing: list[Sequence] = []  # finished, but for the K/V of their last token
        self.num_preemptions = 0
        self._step = 0
        self._planned: list[tuple[Sequence, Slice]] = []

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self.waiting or self.running or self.closing)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens, make room for them, and admit whom the budget allows."""
        self._step += 1
        self._planned = []
        copies: list[BlockCopy] = []
        budget = self.config.max_step_tokens
        preemptions_before = self.num_preemptions
        for sequence in [*self.running, *self.closing]:
            if sequence.lease is not None and sequence.sampled is not None:
                copies += self._append_sampled(sequence)
        # Those one token behind come first, so that no long prompt holds up a decode.
        behind = [s for s in chain(self.running, self.closing) if s.lease is not None]
        behind.sort(key=lambda s: _num_behind(s) > 1)
        for sequence in behind:
            budget -= self._plan(sequence, budget)
        if budget > 0 and self.num_preemptions == preemptions_before:
            for sequence in self._admitted():
                if sequence.lease is not None and sequence.lease.copy_owed is not None:
                    copies.append(sequence.lease.copy_owed)
                budget -= self._plan(sequence, budget)
                if budget <= 0:
                    break
        slices = tuple(piece for _, piece in self._planned)
        return StepPlan(step=self._step, slices=slices, copies=tuple(copies))

    def apply(self, result: StepResult) -> list[tuple[Sequence, int | None]]:
        """Note a step's result: counts, published blocks, new tokens.

        returns  each planned sequence with its new token, None where its prompt is not done
        """
        token_ids = iter(result.token_ids)
        news: list[tuple[Sequence, int | None]] = []
        for sequence, piece in self._planned:
            assert sequence.lease is not None
            sequence.num_computed += len(piece.tokens) // TOKEN_BYTES
            self.cache.commit(sequence.lease, sequence.num_computed)
            if sequence in self.closing:
                self.drop(sequence)
                continue
            token = next(token_ids) if piece.draws else None
            if token is not None:
                sequence.output.append(token)
                sequence.sampled = token
            news.append((sequence, token))
        self._planned = []
        return news

    def finish(self, sequence: Sequence) -> None:
        """End a sequence that has all its tokens; what it computed stays cached.

        The last token's K/V is not computed yet.  Where it would fill a block, one more row in
        the next step completes it, so that the whole turn can be a hit of the next turn.
        """
        whole_blocks = sequence.num_tokens % self.cache.config.block_size == 0
        if whole_blocks and self.cache.config.enable_prefix_cache and sequence.sampled is not None:
            self.running.remove(sequence)
            self.closing.append(sequence)
        else:
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """End a sequence at once, wherever it is; its lease is released."""
        for group in (self.waiting, self.running, self.closing):
            if sequence in group:
                group.remove(sequence)
        if sequence.lease is not None:
            self.cache.release(sequence.lease)
            sequence.lease = None

    def planned(self) -> list[Sequence]:
        """Return the sequences of the step in progress."""
        return [sequence for sequence, _ in self._planned]

    def _append_sampled(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        """Put the newest token on the lease, and let others give way where there is no room.

        A finished sequence gives way first, as it misses no more than one block in the cache;
        then the youngest.
        """
        assert sequence.sampled is not None
        token = pack_tokens([sequence.sampled])
        while sequence.lease is not None:
            try:
                copies = self.cache.append(sequence.lease, token)
            except OutOfBlocks:
                if self.closing:
                    self.drop(self.closing[-1])
                else:
                    self._preempt(self.running[-1])
            else:
                sequence.sampled = None
                return copies
        return ()

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.cache.release(sequence.lease)
        sequence.lease, sequence.sampled, sequence.num_computed = None, None, 0
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admitted(self) -> Iterator[Sequence]:
        """Start waiting sequences in order, one at a time, until one does not fit."""
        while self.waiting and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            key = PrefixKey(sequence.request.namespace, sequence.all_tokens())
            try:
                sequence.lease = self.cache.acquire(key)
            except OutOfBlocks:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.num_computed = sequence.lease.num_cached
            if sequence.num_cached is None:
                sequence.num_cached = sequence.lease.num_cached
            yield sequence

    def _plan(self, sequence: Sequence, budget: int) -> int:
        """Plan as many tokens of a sequence as the budget and the chunk limit allow."""
        lease = sequence.lease
        assert lease is not None
        start = sequence.num_computed
        count = min(_num_behind(sequence), budget, self.config.max_chunk_tokens or budget)
        if count <= 0:
            return 0
        end = start + count
        draws = end == lease.num_tokens and sequence not in self.closing
        num_blocks = -(-end // self.cache.config.block_size)
        piece = Slice(
            request_id=sequence.request.request_id,
            start=start,
            tokens=bytes(lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]),
            block_table=lease.block_table[:num_blocks].tobytes(),
            draws=(_draw(sequence, end),) if draws else (),
        )
        self._planned.append((sequence, piece))
        return count


def _num_behind(sequence: Sequence) -> int:
    assert sequence.lease is not None
    return sequence.lease.num_tokens - sequence.num_computed


def _draw(sequence: Sequence, position: int) -> Draw:
    sampling = sequence.request.sampling
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sequence.seed,
        position=position,
    )
