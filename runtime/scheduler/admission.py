"""Who is let in next.

Owns: those that wait, how far anybody may be overtaken, who waits for a prefix that another is
computing, and how much room stays free.  Does not know: budgets, slices, those that have ended.
Idea: an ordering only proposes.  Whoever was overtaken `max_overtaken` times goes before all
proposals, so under every ordering a request is admitted after a bounded number of later ones.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from math import ceil
from typing import NamedTuple

from radixcache.cache import RadixCache
from radixcache.errors import OutOfBlocks
from radixcache.lease import BlockCopy, Lease, PrefixKey
from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES
from runtime.config import EngineConfig
from runtime.curves import LiveCurves
from runtime.scheduler.ordering import ORDERINGS, Lookup
from runtime.scheduler.public import Brought, PublicPrefix
from runtime.sequence import Sequence as Waiting
from runtime.trace_log import TraceLog

LOOK_AHEAD = 256
"""Sequences that an ordering sees and a step asks the cache about, so that its cost is bounded."""


NUM_TOUCHED = 32
"""Waiting sequences whose prefixes are kept from being evicted next."""


Copies = tuple[BlockCopy, ...]


class _Room(NamedTuple):
    """Blocks left beside a sequence, and whether admitting it evicts some."""

    left: int
    evicts: bool


class _Lookups:
    """What is cached of those that wait, looked up once in a step."""

    def __init__(self, admission: Admission) -> None:
        self.cached_len = cache(admission.cached_len)
        self.loose_len = cache(admission.loose_len)


class Admission:
    """The queue, and the door behind it.

    public    what every namespace may have by copy
    give_way  ends a hold that a namespace's own sessions have; False where they have none
    curves    watches what is asked for, to tell what a larger cache would find; None: nobody does
    trace_log writes a line for each request as it ends; None: nobody does
    refused   who found no room as this was last asked, a quota's or else the pool's; None: nobody
    """

    def __init__(self, cache: RadixCache, config: EngineConfig) -> None:
        self.waiting: list[Waiting] = []  # by arrival
        self.public: PublicPrefix | None = None
        self.give_way: Callable[[Namespace], bool] = lambda namespace: False
        self.curves: LiveCurves | None = None
        self.trace_log: TraceLog | None = None
        self.refused: Waiting | None = None
        self.ordering = ORDERINGS[config.ordering]()
        self._just_aged: list[Waiting] = []  # in the step in progress
        self._cache = cache
        self._config = config
        self._num_arrived = 0
        self._reserve = ceil(cache.config.num_blocks * config.watermark)
        self._max_kept = int(cache.config.num_blocks * self.ordering.kept_share)

    def add(self, sequence: Waiting) -> None:
        """Queue a sequence that has just arrived; what it will find is not evicted next."""
        if self.trace_log is not None:
            self.trace_log.arrive(sequence)
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self.waiting.append(sequence)
        self._cache.touch(self._key_of(sequence))

    def put_back(self, sequence: Waiting) -> None:
        """Queue a sequence that had to give its blocks back, at its old place."""
        self.refused = None
        insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)

    def admitted(self, running: Sequence[Waiting]) -> Iterator[tuple[Waiting, Copies]]:
        """Admit one after another, each with a lease, until nobody else fits.

        running  those that run, those admitted meanwhile included
        yields   a sequence, and the copies that it counts on

        A sequence whose next block another one is computing waits for it, and lets others pass:
        what many ask for at once is computed once.  One that its namespace's quota keeps out lets
        others pass, too; one for which the pool is too full does not, or it would starve.
        """
        self.refused = None
        if not self.waiting or len(running) >= self._config.max_running:
            return
        num_running = sum(sequence.num_branches for sequence in running)
        if num_running >= self._config.max_running:
            return  # or a full batch would pay for an order that nobody is admitted by
        next_ones: list[Waiting] = []
        lookup = _Lookups(self)
        for sequence in self._proposed(lookup):
            if num_running + sequence.num_branches > self._config.max_running:
                return
            key = self._key_of(sequence)
            num_cached = self._cache.match_len(key)
            if self._is_under_way(key, num_cached, running):
                continue
            room = self._room_beside(key, num_cached)
            if running and room.left < self._reserve:
                return
            if room.evicts:
                next_ones = next_ones or self._next_ones(lookup)
                num_kept = self._keep_for(next_ones, sequence, key)
                if running and room.left - num_kept < self._reserve:
                    return
            try:
                lease = self._acquired(key, sequence)
            except OutOfBlocks as refused:
                if refused.quota is None:
                    self.refused = sequence
                    return
                self.refused = self.refused or sequence
                continue
            num_running += sequence.num_branches
            self._let_in(sequence)
            yield sequence, self._begun(sequence, lease)

    def _acquired(self, key: PrefixKey, sequence: Waiting) -> Lease:
        """Return a lease, letting holds of its own namespace go where its quota would refuse it."""
        while True:
            try:
                return self._cache.acquire(key, retentions=sequence.request.retentions)
            except OutOfBlocks as refused:
                if refused.quota is None or not self.give_way(key.namespace):
                    raise

    def _begun(self, sequence: Waiting, lease: Lease) -> Copies:
        """Give a sequence its lease; return the copies that bring what it found."""
        if self.curves is not None and sequence.num_cached is None:
            request = sequence.request
            self.curves.look_up(request.namespace, request.prompt, found=lease.num_committed)
        owed = () if lease.copy_owed is None else (lease.copy_owed,)
        brought = Brought(lease.num_cached) if self.public is None else self.public.brought(lease)
        sequence.admit(lease, brought.num_in_place)
        return owed + brought.copies

    def touch_oldest(self) -> None:
        """Make what the oldest find the last to go; a look-up for each, whatever the ordering."""
        self._touch(map(self._key_of, self.waiting[:NUM_TOUCHED]))

    def weakest(self, running: Sequence[Waiting]) -> Waiting:
        """Return who of those that run gives its blocks back first.

        Not whoever was overtaken too often before, or it would be so once more.
        """
        limit = self._config.max_overtaken
        rest = [sequence for sequence in running if sequence.num_overtaken < limit]
        return self.ordering.weakest(rest or running)

    def _proposed(self, lookup: Lookup) -> Iterator[Waiting]:
        """Yield the first to be tried first: those overtaken too often, then as ordered."""
        limit = self._config.max_overtaken
        seen = self.waiting[:LOOK_AHEAD]
        self._just_aged.clear()
        yield from [sequence for sequence in seen if sequence.num_overtaken >= limit]
        rest = [sequence for sequence in seen if sequence.num_overtaken < limit]
        for sequence in self.ordering.arranged(rest, lookup):
            while self._just_aged:
                yield self._just_aged.pop(0)
            if sequence.num_overtaken < limit:
                yield sequence

    def cached_len(self, sequence: Waiting) -> int:
        """Return how many tokens of a sequence are cached now; one look-up."""
        return self._cache.match_len(self._key_of(sequence))

    def loose_len(self, sequence: Waiting) -> int:
        """Return how many of those nobody holds, so that they may be evicted; one look-up."""
        num_blocks = self._cache.num_evictable_on([self._key_of(sequence)])
        return num_blocks * self._cache.config.block_size

    def _key_of(self, sequence: Waiting) -> PrefixKey:
        """Return what a sequence looks up; its epoch may have been raised while it waited."""
        namespace = self._cache.epochs.current(sequence.request.namespace)
        return PrefixKey(namespace, sequence.all_tokens())

    def _is_under_way(self, key: PrefixKey, num_cached: int, running: Sequence[Waiting]) -> bool:
        """True where a running sequence is about to publish the first block that the key misses."""
        if not self._cache.config.enable_prefix_cache:
            return False
        block_size = self._cache.config.block_size
        end = (num_cached // block_size + 1) * block_size
        if end >= key.num_tokens:  # the last token is computed in any case
            return False
        wanted = key.tokens[: end * TOKEN_BYTES]
        return any(
            other.lease is not None
            and other.num_computed < end <= other.lease.num_tokens
            and other.lease.namespace == key.namespace
            and other.lease.tokens.startswith(wanted)
            for other in running
        )

    def _room_beside(self, key: PrefixKey, num_cached: int) -> _Room:
        """Return what admitting a sequence would leave for those that run to grow into."""
        block_size = self._cache.config.block_size
        needed = -(-key.num_tokens // block_size) - num_cached // block_size
        stats = self._cache.stats()
        left = stats.num_free + stats.num_evictable - needed
        left -= self._cache.num_evictable_on([key])  # in use from then on
        return _Room(left=left, evicts=needed > stats.num_free)

    def _next_ones(self, lookup: Lookup) -> list[Waiting]:
        """Return who is likely next: as ordered and, since nobody is overtaken for ever, by age."""
        seen = self.waiting[:LOOK_AHEAD]
        pairs = zip(self.ordering.arranged(seen, lookup), seen, strict=True)
        merged = chain.from_iterable(islice(pairs, NUM_TOUCHED))
        return list(dict.fromkeys(merged))[:NUM_TOUCHED]

    def _keep_for(self, next_ones: Sequence[Waiting], sequence: Waiting, key: PrefixKey) -> int:
        """Before blocks are evicted for a sequence, make what the next ones find the last to go.

        returns  how many blocks of it the ordering would rather keep than evict
        """
        still = [other for other in next_ones if other.lease is None and other is not sequence]
        keys = [self._key_of(other) for other in still]
        self._touch(keys)
        if not self._max_kept:
            return 0
        wanted = self._cache.num_evictable_on([key, *keys]) - self._cache.num_evictable_on([key])
        return min(wanted, self._max_kept)

    def _touch(self, keys: Iterable[PrefixKey]) -> None:
        """Make what is cached of some keys the last to be evicted, of the first key last of all."""
        for key in reversed(list(keys)):
            self._cache.touch(key)

    def _let_in(self, sequence: Waiting) -> None:
        self.waiting.remove(sequence)
        for earlier in islice(self.waiting, LOOK_AHEAD):
            if earlier.arrival >= sequence.arrival:
                break
            earlier.num_overtaken += 1
            if earlier.num_overtaken == self._config.max_overtaken:
                self._just_aged.append(earlier)
        self.ordering.admitted(sequence)
