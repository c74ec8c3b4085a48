"""Which tokens are computed in the next step.

Owns: the running sequences, their leases, and the token budget.  Does not know: text, devices,
clocks, in which order those that wait are let in.
Idea: there are no phases.  A sequence has tokens and a computed count, and every step lets some
counts catch up: a decode is one token behind, a prompt many, a prefix hit starts ahead.  Those that
decode plainly stand in rows, where a step costs each of them next to nothing.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from radixcache.cache import RadixCache
from radixcache.errors import OutOfBlocks
from radixcache.lease import BlockCopy
from radixcache.tokens import TOKEN_BYTES
from runtime.config import EngineConfig
from runtime.plan import Slice, StepPlan, StepResult, TokenLogprobs
from runtime.scheduler.admission import Admission
from runtime.scheduler.rows import DecodeRows
from runtime.scheduler.slices import next_slice
from runtime.sequence import Sequence

TOUCH_EVERY = 8
"""Steps after which, in a full pool, what those that wait will find is made the last to go again:
what others let go of meanwhile was used later."""


class Step(msgspec.Struct, frozen=True):
    """What a step brought one sequence: a token, or log-probabilities of its prompt, or neither."""

    sequence: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Applied(msgspec.Struct, frozen=True):
    """What came of a step.

    rows, tokens  those that decode, and what each drew
    steps         what came of all others
    """

    rows: list[Sequence]
    tokens: tuple[int, ...]
    steps: list[Step]


class Scheduler:
    """Continuous batching under a budget of tokens a step.

    Where blocks run out, the weakest running sequence gives way: the youngest, unless the ordering
    says otherwise.  Its computed blocks stay in the cache, so that it resumes with a hit.  The
    strongest always gets on, since everything that others hold can be taken back: no set of
    requests can deadlock.
    """

    def __init__(self, cache: RadixCache, config: EngineConfig) -> None:
        self.cache = cache
        self.config = config
        self.admission = Admission(cache, config)
        self.running: list[Sequence] = []  # by admission, oldest first
        self.closing: list[Sequence] = []  # finished, but for the K/V of their last token
        self.num_preemptions = 0
        self._step = 0
        self._rows = DecodeRows(cache.config.block_size)
        self._planned_rows: list[Sequence] = []
        self._planned: list[tuple[Sequence, Slice]] = []  # of those that are in no row

    @property
    def waiting(self) -> list[Sequence]:
        """Those that wait, by arrival."""
        return self.admission.waiting

    @property
    def has_work(self) -> bool:
        """True while a step would do something."""
        return bool(self.waiting or self.running or self.closing)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.admission.add(sequence)

    def schedule(self) -> StepPlan:
        """Choose the next step's tokens, make room for them, and admit whom the budget allows."""
        self._step += 1
        self._planned = []
        copies: list[BlockCopy] = []
        budget = self.config.max_step_tokens
        preemptions_before = self.num_preemptions
        others = self._write_newest(copies)
        self._planned_rows = list(self._rows.sequences)
        budget -= len(self._planned_rows)
        # Those one token behind come first, so that no long prompt holds up a decode.
        others.sort(key=lambda s: s.num_behind > 1)
        for sequence in others:
            budget -= self._plan(sequence, budget)
        if budget > 0 and self.num_preemptions == preemptions_before:
            for sequence, owed in self.admission.admitted(self.running):
                self.running.append(sequence)
                copies += owed
                budget -= self._plan(sequence, budget)
                if budget <= 0:
                    break
        return StepPlan(
            step=self._step,
            rows=self._rows.columns(),
            pieces=tuple(piece for _, piece in self._planned),
            copies=tuple(copies),
        )

    def apply(self, result: StepResult) -> Applied:
        """Note a step's result: counts, published blocks, new tokens, new branches.

        returns  what came of each planned sequence; a new branch follows the one it forks from
        """
        rows = self._planned_rows
        drawn, others = result.token_ids[: len(rows)], result.token_ids[len(rows) :]
        self._planned_rows = []
        if rows:
            for sequence in self._rows.filling():
                assert sequence.lease is not None
                if self.cache.commit(sequence.lease, sequence.num_tokens).num_twins:
                    self._rows.refresh(sequence)
            self._rows.advance(drawn)
        logprobs = result.logprobs[len(rows) :]
        return Applied(rows, drawn, self._apply_pieces(others, logprobs, result.target_logprobs))

    def _apply_pieces(
        self,
        token_ids: tuple[int, ...],
        drawn_logprobs: tuple[TokenLogprobs | None, ...],
        target_logprobs: tuple[TokenLogprobs, ...],
    ) -> list[Step]:
        tokens = iter(token_ids)
        logprobs = iter(drawn_logprobs)
        scored = iter(target_logprobs)
        news: list[Step] = []
        for sequence, piece in self._planned:
            assert sequence.lease is not None
            sequence.num_computed += len(piece.tokens) // TOKEN_BYTES
            self.cache.commit(sequence.lease, sequence.num_computed)
            if sequence in self.closing:
                self.drop(sequence)
                continue
            told = tuple(islice(scored, len(piece.targets) // TOKEN_BYTES))
            sequence.num_scored += len(told)
            if not piece.draws:
                news.append(Step(sequence, prompt_logprobs=told))
            for branch in self._branches(sequence, len(piece.draws)):
                branch.take(next(tokens))
                news.append(Step(branch, branch.output[-1], next(logprobs, None), told))
                told = ()
        self._planned = []
        return news

    def _branches(self, sequence: Sequence, count: int) -> list[Sequence]:
        """Return a sequence and the branches that begin beside it: forks that share its blocks."""
        branches = [sequence] * min(count, 1)
        assert sequence.lease is not None
        for index in range(1, count):
            branch = sequence.branch(self.cache.fork(sequence.lease), index)
            self.running.append(branch)
            branches.append(branch)
        return branches

    def finish(self, sequence: Sequence) -> None:
        """End a sequence that has all its tokens; what it computed stays cached.

        The last token's K/V is not computed yet.  Where it would fill a block, one more row in
        the next step completes it, so that the whole turn can be a hit of the next turn.
        """
        whole_blocks = sequence.num_tokens % self.cache.config.block_size == 0
        if whole_blocks and self.cache.config.enable_prefix_cache and sequence.num_behind:
            self._rows.leave(sequence)
            self.running.remove(sequence)
            self.closing.append(sequence)
        else:
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """End a sequence at once, wherever it is; its lease is released."""
        self._rows.leave(sequence)
        for group in (self.waiting, self.running, self.closing):
            if sequence in group:
                group.remove(sequence)
        if self.admission.trace_log is not None:
            self.admission.trace_log.end(sequence)
        if sequence.lease is not None:
            if self.admission.curves is not None:
                self.admission.curves.touch(sequence.lease)
            self.cache.release(sequence.lease)
            sequence.lease = None

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks back; it waits at its old place and resumes as a hit."""
        assert sequence.lease is not None
        self._rows.leave(sequence)
        self.cache.release(sequence.lease)
        sequence.lease, sequence.num_computed = None, 0
        self.running.remove(sequence)
        self.admission.put_back(sequence)
        self.num_preemptions += 1

    def forget_released(self, plan: StepPlan) -> None:
        """Take the slices out of the step in progress whose sequences have no lease any more.

        All others are planned as slices from now on, in their order; their rows end here.
        """
        pairs = zip(self.planned(), plan.slices, strict=True)
        self._planned = [pair for pair in pairs if pair[0].lease is not None]
        self._planned_rows = []
        for sequence in list(self._rows.sequences):
            self._rows.leave(sequence)
            self._append_newest(sequence)  # its block is there, and nobody else's

    def planned(self) -> list[Sequence]:
        """Return the sequences of the step in progress, in the order of its slices."""
        return [*self._planned_rows, *self.planned_pieces()]

    def planned_pieces(self) -> list[Sequence]:
        """Return those of them that are in no row."""
        return [sequence for sequence, _ in self._planned]

    def check(self) -> None:
        """Check the rows against the sequences in them; raises EngineFailure.  For tests."""
        self._rows.check()

    def settle(self, sequence: Sequence) -> None:
        """Put all computed tokens of a running sequence on its lease, so that it can be forked.

        In a row its lease lacks up to a block of them; it leaves the row until the next step.
        """
        assert sequence.lease is not None
        self._rows.leave(sequence)
        missing = sequence.num_computed - sequence.lease.num_tokens
        if missing > 0:  # they need no block: the one that does is there before it is computed
            self.cache.append(sequence.lease, sequence.unwritten()[: missing * TOKEN_BYTES])

    def _write_newest(self, copies: list[BlockCopy]) -> list[Sequence]:
        """Put the newest tokens on leases: in rows only at the edges of blocks, else always.

        copies   those owed are added
        returns  who is in no row, those left out that have just entered one
        """
        starting, filling = self._rows.starting(), self._rows.filling()
        if self._step % TOUCH_EVERY == 0 and self.cache.stats().num_free < len(self.running):
            self.admission.touch_oldest()
        for sequence in (*starting, *filling):
            if sequence.row >= 0:  # or it has just been preempted
                copies += self._append_newest(sequence)
            if sequence.row >= 0:
                self._rows.add_block(sequence)
        others: list[Sequence] = []
        if len(self._rows) < len(self.running):
            others = [sequence for sequence in self.running if sequence.row < 0]
        for sequence in [*others, *self.closing]:
            copies += self._append_newest(sequence)
        for sequence in others:
            has_room = len(self._rows) < self.config.max_step_tokens
            if sequence.lease is not None and sequence.decodes and has_room:
                self._rows.enter(sequence)
        return [s for s in (*others, *self.closing) if s.lease is not None and s.row < 0]

    def _append_newest(self, sequence: Sequence) -> tuple[BlockCopy, ...]:
        """Put the newest tokens on the lease, and let others give way where there is no room.

        A finished sequence gives way first, as it misses no more than one block in the cache;
        then the youngest.
        """
        while sequence.lease is not None and (tokens := sequence.unwritten()):
            try:
                return self.cache.append(sequence.lease, tokens)
            except OutOfBlocks as refused:
                self._make_way(sequence if refused.quota else None)
        return ()

    def _make_way(self, refused: Sequence | None) -> None:
        """Take blocks back from somebody.

        refused  who was refused for its namespace's quota, so that only its like can make way
        """

        def counts(sequence: Sequence) -> bool:
            return refused is None or sequence.request.namespace == refused.request.namespace

        closing = [sequence for sequence in self.closing if counts(sequence)]
        if closing:
            self.drop(closing[-1])
        else:
            self.preempt(self.admission.weakest(list(filter(counts, self.running))))

    def _plan(self, sequence: Sequence, budget: int) -> int:
        """Plan as many tokens of a sequence as the budget and the chunk limit allow."""
        count = min(sequence.num_behind, budget, self.config.max_chunk_tokens or budget)
        if count <= 0:
            return 0
        piece = next_slice(
            sequence,
            count,
            block_size=self.cache.config.block_size,
            draws=sequence not in self.closing,
        )
        self._planned.append((sequence, piece))
        return count
