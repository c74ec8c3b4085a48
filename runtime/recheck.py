"""Checks live traffic: now and then a finished request is computed again, and compared bit by bit.

Owns: which requests, how far a check got, and what follows from a difference.  Does not know:
tensors, threads, HTTP; the engine's thread calls it while the engine has nothing to do.
Idea: what was found right may be built on.  The next tokens are computed behind cached blocks that
agree already, into scratch blocks that are thrown away after.  So a check of any length needs
room for one chunk, and holds nothing between two calls.

    tokens   │ agree: read from the cache │ computed again, in scratch blocks │ later │
             0                        num_right                              end    hold
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from typing import NamedTuple

import msgspec

from radixcache.cache import RadixCache
from radixcache.errors import CacheError, OutOfBlocks
from radixcache.lease import BlockCopy, PrefixKey
from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES, common_prefix_len, unpack_tokens
from runtime.engine import Engine
from runtime.plan import Executor, Slice, StepPlan
from runtime.scheduler.public import PUBLIC
from runtime.scheduler.slices import draws_of
from runtime.sequence import Sequence

SCRATCH = Namespace(salt="recheck")
"""Where scratch blocks are taken; nothing is ever published there, and no caller's salt is this."""

RECHECK = "recheck of "
"""How the request ids of its slices begin."""

CHUNK_TOKENS = 32
"""Tokens computed in one call: the longest that a request which arrives meanwhile waits."""

MAX_PENDING = 16
"""Requests that wait to be checked; beyond, the oldest is forgotten."""

MAX_RESTARTS = 3
"""How often a check begins anew because blocks were evicted, until it is given up."""

_log = logging.getLogger("radixcache")


class RecheckStats(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked since the start.

    tokens     whose K/V was compared, and is the same
    same       requests that are as they were, as far as they are cached
    kv         requests whose K/V in the cache has other bits than are computed again
    sampled    requests that had drawn another token than is drawn again
    abandoned  requests given up: evicted meanwhile, too many to keep up with, or not computable
    """

    tokens: int = 0
    same: int = 0
    kv: int = 0
    sampled: int = 0
    abandoned: int = 0


class _Outcome(NamedTuple):
    """What one chunk showed: the first block that differs, or the first token."""

    block: tuple[int, int, int] | None = None  # layer, position of its first token, block id
    token: int | None = None  # position of a token that is drawn otherwise


class _Check:
    """A request that is being checked.

    sequence   stands where the original stood when it drew its next token
    num_right  tokens whose K/V agrees; reached without anything being evicted
    """

    def __init__(self, sequence: Sequence, namespace: Namespace) -> None:
        self.name = sequence.request.request_id
        self.namespace = namespace
        self.tokens = sequence.all_tokens()
        self.num_restarts = 0
        self._original = sequence
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.num_right = 0
        self.num_evicted = 0
        request, seed = self._original.request, self._original.seed
        self.sequence = Sequence(request, seed=seed, index=self._original.index)
        self.sequence.num_branches = 1

    @property
    def key(self) -> PrefixKey:
        """What to look up."""
        return PrefixKey(self.namespace, self.tokens)

    def slices(self, end: int, table: array[int], block_size: int) -> tuple[Slice, ...]:
        """Return tokens `num_right … end` as slices; one for each token that was drawn.

        A constraint's state is not kept, so that draws under one are not repeated.
        """
        drawn = len(self._original.output) if self._original.constraint is None else 0
        first = len(self.tokens) // TOKEN_BYTES - drawn - 1  # the row behind which the first is
        starts = [self.num_right, *range(max(first, self.num_right), end)] if drawn else []
        starts = sorted(set(starts)) or [self.num_right]
        return tuple(
            self._slice(start, stop, table[: -(-stop // block_size)], draws=start >= first)
            for start, stop in zip(starts, [*starts[1:], end], strict=True)
        )

    def _slice(self, start: int, end: int, table: array[int], *, draws: bool) -> Slice:
        token = self.tokens[end * TOKEN_BYTES : (end + 1) * TOKEN_BYTES]
        draws = draws and bool(token) and self._original.constraint is None
        piece = Slice(
            request_id=RECHECK + self.name,
            index=self._original.index,
            start=start,
            tokens=self.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES],
            block_table=table.tobytes(),
            draws=draws_of(self.sequence, end) if draws else (),
        )
        if draws:
            self.sequence.take(unpack_tokens(token)[0])
        return piece


class Recheck:
    """Checks one in `every` finished branches of an engine's requests.

    executor  the engine's own

    Listens to the engine from now on.  `advance` belongs to the engine's thread, in idle time.
    """

    def __init__(self, engine: Engine, executor: Executor, *, every: int) -> None:
        self._engine = engine
        self._cache: RadixCache = engine.cache
        self._executor = executor
        self._every = every
        self._num_ended = 0
        self._pending: deque[_Check] = deque()
        self._stats = RecheckStats()
        engine.on_end = self._note

    @property
    def stats(self) -> RecheckStats:
        """The counts so far; readable from any thread."""
        return self._stats

    @property
    def has_work(self) -> bool:
        """True while `advance` would do something."""
        return bool(self._pending)

    def advance(self) -> None:
        """Compute and compare the next tokens of the oldest request that waits.

        Takes one short step of the model.  Nothing is held after it, and whatever goes wrong ends
        the check, not the engine.
        """
        check = self._pending[0]
        if check.num_right and check.num_evicted != self._num_evicted:
            check.restart()  # what was compared may be gone, and in its place be another's
            check.num_restarts += 1
            if check.num_restarts > MAX_RESTARTS:
                self._end("abandoned")
                return
        if not self._cache.match_len(check.key):  # evicted, or never a whole block
            self._end("abandoned")
            return
        try:
            outcome = self._compare_next(check)
        except OutOfBlocks:
            self._end("abandoned")
            return
        except Exception as error:
            _log.warning("%s%s was given up: %s", RECHECK, check.name, error)
            self._end("abandoned")
            return
        check.num_evicted = self._num_evicted
        if outcome is not None:
            self._judge(check, outcome)

    @property
    def _num_evicted(self) -> int:
        return self._cache.room.counters.evicted_blocks

    def _note(self, sequence: Sequence) -> None:
        """Take up one in `every` branches that ended by themselves."""
        self._num_ended += 1
        if self._num_ended % self._every or sequence.lease is None:
            return
        if len(self._pending) == MAX_PENDING:
            self._end("abandoned")
        self._pending.append(_Check(sequence, sequence.lease.namespace))

    def _compare_next(self, check: _Check) -> _Outcome | None:
        """Compare the next chunk; return what that showed, once there is no more to compare."""
        if self._cache.epochs.is_stale(check.namespace):
            raise CacheError("its namespace was quarantined meanwhile")
        hold = self._cache.retain(check.key)
        try:
            end = min(check.num_right + CHUNK_TOKENS, hold.num_tokens)
            outcome = self._compare(check, end)
            if outcome.block is None:
                self._count(tokens=end - check.num_right)
                check.num_right = end
            is_over = end == hold.num_tokens or outcome != _Outcome()
            return outcome if is_over else None
        finally:
            self._cache.end_hold(hold)

    def _compare(self, check: _Check, end: int) -> _Outcome:
        """Compute tokens `num_right … end` again, and compare them with what is cached.

        The first block is begun by a copy where `num_right` lies inside of it.
        """
        size, start = self._cache.config.block_size, check.num_right
        first = start // size
        cached = array("i", self._cache.match(check.key).packed_ids)[: -(-end // size)]
        lease = self._cache.acquire(PrefixKey(SCRATCH, b""))
        try:
            self._cache.append(lease, check.tokens[first * size * TOKEN_BYTES : end * TOKEN_BYTES])
            scratch = lease.block_table
            slices = check.slices(end, cached[:first] + scratch, size)
            copies = (BlockCopy(cached[first], scratch[0], start % size),) if start % size else ()
            result = self._executor.execute(StepPlan(step=0, pieces=slices, copies=copies))
            found = self._executor.first_difference(cached[first:], scratch, end - first * size)
        finally:
            self._cache.release(lease)
        if found is not None:
            place = first + found.block
            return _Outcome(block=(found.layer, place * size, cached[place]))
        behind = [piece.start + len(piece.tokens) // TOKEN_BYTES for piece in slices if piece.draws]
        for position, token in zip(behind, result.token_ids, strict=True):
            at = position * TOKEN_BYTES
            if unpack_tokens(check.tokens[at : at + TOKEN_BYTES]) != [token]:
                return _Outcome(token=position)
        return _Outcome()

    def _judge(self, check: _Check, outcome: _Outcome) -> None:
        """End a check, and quarantine what it found wrong."""
        if outcome.block is not None:
            self._quarantine(check, *outcome.block)
            self._end("kv")
        elif outcome.token is not None:
            _log.error(
                "%s%s: token %d is drawn otherwise from the same K/V",
                RECHECK,
                check.name,
                outcome.token,
            )
            self._end("sampled")
        else:
            self._end("same")

    def _quarantine(self, check: _Check, layer: int, position: int, block_id: int) -> None:
        """Let nobody find what is cached in the namespace of a wrong block.

        Where the block is of the public prefix, that is not shared any more either, nor is what
        others have copies of.
        """
        guilty = [check.namespace]
        public = self._engine.scheduler.admission.public
        if public is not None and not self._cache.epochs.is_stale(PUBLIC):
            most = min(len(public.tokens), len(check.tokens)) // TOKEN_BYTES
            shared = common_prefix_len(check.tokens, 0, public.tokens, most)
            if shared > position:
                guilty += self._having(public.tokens, position, but=check.namespace)
        if PUBLIC in guilty:
            self._engine.release_public()
        for namespace in guilty:
            following = self._cache.raise_epoch(namespace)
            freed = self._cache.drop(namespace)
            _log.error(
                "%s%s: K/V in the cache is not what is computed again: first in layer %d, block %d "
                "(tokens %d to %d). Its namespace is quarantined: epoch %d, %d blocks given up",
                RECHECK,
                check.name,
                layer,
                block_id,
                position,
                position + self._cache.config.block_size - 1,
                following.epoch,
                freed,
            )

    def _having(self, tokens: bytes, position: int, *, but: Namespace) -> list[Namespace]:
        """Return the namespaces where tokens are cached to behind a position; one look-up each."""
        return [
            namespace
            for namespace in self._cache.tree.roots
            if namespace != but and self._cache.match_len(PrefixKey(namespace, tokens)) > position
        ]

    def _end(self, count: str) -> None:
        """Take the oldest off the list, and count what became of it."""
        self._pending.popleft()
        self._count(**{count: 1})

    def _count(self, **more: int) -> None:
        now = self._stats
        self._stats = msgspec.structs.replace(
            now, **{name: getattr(now, name) + count for name, count in more.items()}
        )
