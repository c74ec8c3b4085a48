"""Which tokens are computed in the next step.

Owns: the running sequences, their leases, and the token budget.  Does not know: text, devices,
clocks, in which order those that wait are let in.
Idea: there are no phases.  A sequence has tokens and a computed count, and every step lets some
counts catch up: a decode is one token behind, a prompt many, a prefix hit starts ahead.
"""

from __future__ import annotations

from itertools import chain, islice

import msgspec

from radixcache.cache import RadixCache
from radixcache.errors import OutOfBlocks
from radixcache.lease import BlockCopy
from radixcache.tokens import TOKEN_BYTES, pack_tokens
from runtime.config import EngineConfig
from runtime.plan import Slice, StepPlan, StepResult, TokenLogprobs
from runtime.scheduler.admission import Admission
from runtime.scheduler.slices import next_slice
from runtime.sequence import Sequence


class Step(msgspec.Struct, frozen=True):
    """What a step brought one sequence: a token, or log-probabilities of its prompt, or neither."""

    sequence: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


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
        self._planned: list[tuple[Sequence, Slice]] = []

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
        for sequence in [*self.running, *self.closing]:
            if sequence.lease is not None and sequence.sampled is not None:
                copies += self._append_sampled(sequence)
        # Those one token behind come first, so that no long prompt holds up a decode.
        behind = [s for s in chain(self.running, self.closing) if s.lease is not None]
        behind.sort(key=lambda s: s.num_behind > 1)
        for sequence in behind:
            budget -= self._plan(sequence, budget)
        if budget > 0 and self.num_preemptions == preemptions_before:
            for sequence, owed in self.admission.admitted(self.running):
                self.running.append(sequence)
                copies += owed
                budget -= self._plan(sequence, budget)
                if budget <= 0:
                    break
        slices = tuple(piece for _, piece in self._planned)
        return StepPlan(step=self._step, slices=slices, copies=tuple(copies))

    def apply(self, result: StepResult) -> list[Step]:
        """Note a step's result: counts, published blocks, new tokens, new branches.

        returns  what came of each planned sequence; a new branch follows the one it forks from
        """
        tokens = iter(result.token_ids)
        logprobs = iter(result.logprobs)
        scored = iter(result.target_logprobs)
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
        self.cache.release(sequence.lease)
        sequence.lease, sequence.sampled, sequence.num_computed = None, None, 0
        self.running.remove(sequence)
        self.admission.put_back(sequence)
        self.num_preemptions += 1

    def forget_released(self) -> None:
        """Take the slices out of the step in progress whose sequences have no lease any more."""
        self._planned = [pair for pair in self._planned if pair[0].lease is not None]

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
            except OutOfBlocks as refused:
                self._make_way(sequence if refused.quota else None)
            else:
                sequence.sampled = None
                return copies
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
            self.preempt(self.admission.ordering.weakest(list(filter(counts, self.running))))

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
