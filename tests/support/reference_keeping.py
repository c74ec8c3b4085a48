"""The reference cache with what is kept for a time: holds, and priorities of prefixes.

Owns: the right answers where time passes.  Does not know: nodes, sorted deadlines, cut edges.
Idea: each prefix has a priority of its own, with its duration and the time at which it ends; the
ends that are due are found by looking at all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from radixcache import CacheConfig, Namespace, Retention
from tests.support.reference_cache import (
    NoRoom,
    Prefix,
    ReferenceCache,
    ReferenceLease,
)


class ReferenceHold:
    """Prefixes that stay, and until when."""

    def __init__(self, number: int, namespace: Namespace, prefixes: list[Prefix], until: float):
        self.number = number
        self.namespace = namespace
        self.prefixes = prefixes
        self.until = until


class KeepingReference(ReferenceCache):
    """The verbs of `RadixCache` on plain data, those with durations included."""

    def __init__(self, config: CacheConfig, *, clock: Callable[[], float], policy: str) -> None:
        super().__init__(config, policy=policy)
        self.clock = clock
        self.holds: list[ReferenceHold] = []
        self.worth: dict[Prefix, tuple[int, float]] = {}  # (priority, duration)
        self.ends: dict[Prefix, float] = {}
        self.ranges: dict[int, tuple[Retention, ...]] = {}  # of leases
        self.abandoned: set[Prefix] = set()
        self._num_holds = 0

    def pinned(self) -> set[Prefix]:
        """The cached prefixes that a lease or a hold stands on."""
        return super().pinned().union(*(hold.prefixes for hold in self.holds))

    def rank(self, prefix: Prefix) -> Any:
        """What is abandoned first, by its time; then the priority."""
        if prefix in self.abandoned:
            return 0, (self.used_at[prefix],)
        if self.policy != "priority":
            return 1, (super().rank(prefix),)
        return 1, (self.priority(prefix), self.used_at[prefix])

    def has_something(self, namespace: Namespace) -> bool:
        """A hold is something too."""
        held = any(hold.namespace == namespace for hold in self.holds)
        return held or super().has_something(namespace)

    def record(self) -> dict[str, int]:
        """Holds are counted."""
        return super().record() | {"num_holds": len(self.holds)}

    def acquire(
        self, namespace: Namespace, tokens: list[int], retentions: tuple[Retention, ...] = ()
    ) -> ReferenceLease:
        """A use: the time of what is found begins anew."""
        self.expire()
        hits, evicted = self.hits(namespace, tokens, len(tokens) - 1), self.num_evicted
        try:
            lease = super().acquire(namespace, tokens)
        except NoRoom:
            if self.num_evicted > evicted:  # it stood on what it found while room was made
                self.abandoned -= set(hits)
            raise
        self.ranges[id(lease)] = retentions
        found = self.prefixes(namespace, tokens, lease.num_committed)
        self._begin_anew(found)
        self._raise_worth(lease, found)
        return lease

    def append(self, lease: ReferenceLease, tokens: list[int]) -> list[int]:
        """Time is looked at, as room may be made."""
        self.expire()
        return super().append(lease, tokens)

    def commit(self, lease: ReferenceLease, num_tokens: int) -> tuple[int, int]:
        """What becomes the lease's in the cache is worth what the lease says."""
        before = lease.num_committed
        done = super().commit(lease, num_tokens)
        new = self.prefixes(lease.namespace, lease.tokens, lease.num_committed)
        self._raise_worth(lease, new[before // self.config.block_size :])
        return done

    def fork(self, lease: ReferenceLease) -> ReferenceLease:
        """Both say the same."""
        twin = super().fork(lease)
        self.ranges[id(twin)] = self.ranges[id(lease)]
        return twin

    def release(self, lease: ReferenceLease) -> None:
        """The end of a use: time begins anew."""
        self._begin_anew(self.prefixes(lease.namespace, lease.tokens, lease.num_committed))
        super().release(lease)

    def evict(self, num_blocks: int, asking: Namespace | None = None) -> int:
        """Time is looked at before."""
        self.expire()
        return super().evict(num_blocks, asking)

    def set_quota(self, namespace: Namespace, quota: Any) -> int:
        """Time is looked at before."""
        self.expire()
        return super().set_quota(namespace, quota)

    def retain(self, namespace: Namespace, tokens: list[int], duration: float | None) -> Any:
        """Hold what is cached of the tokens."""
        self.expire()
        hits = [] if namespace in self.raised else self.hits(namespace, tokens, len(tokens))
        until = inf if duration is None else self.clock() + duration
        self._num_holds += 1
        self.abandoned -= set(hits)
        self.holds.append(ReferenceHold(self._num_holds, namespace, hits, until))
        return self.holds[-1]

    def abandon(self, namespace: Namespace, tokens: list[int], start: int) -> int:
        """Mark prefixes from the last on, up to where another one goes on; return how many."""
        hits = [] if namespace in self.raised else self.hits(namespace, tokens, len(tokens))
        size, marked = self.config.block_size, 0
        for place, prefix in enumerate(reversed(hits)):
            longer = {p for p in self.cached if p[0] == namespace and p[1][:-size] == prefix[1]}
            is_left = longer <= self.abandoned and (not place or len(longer) == 1)
            if not is_left or prefix in self.pinned() or len(prefix[1]) - size < start:
                break
            marked += prefix not in self.abandoned
            self.abandoned.add(prefix)
        return marked

    @property
    def num_evicted(self) -> int:
        """Prefixes given up so far."""
        return self.counts["evicted_blocks"]

    def end_hold(self, hold: ReferenceHold) -> None:
        """Hold it no more."""
        if hold in self.holds:
            self.holds.remove(hold)
            self._forget(hold.namespace)

    def expire(self) -> None:
        """End what is due, in the order of time."""
        now = self.clock()
        while True:
            holds = [(h.until, 0, h.number, h) for h in self.holds if h.until <= now]
            ends = [(end, 1, 0, prefix) for prefix, end in self.ends.items() if end <= now]
            if not holds and not ends:
                return
            what = min([*holds, *ends], key=lambda entry: entry[:3])[3]
            if isinstance(what, ReferenceHold):
                self.end_hold(what)
            elif what in self.pinned():
                self._begin_anew([what])
            else:
                del self.worth[what], self.ends[what]

    def priority(self, prefix: Prefix) -> int:
        """What the retentions make of a prefix, as long as they last."""
        return self.worth.get(prefix, (0, 0))[0]

    def _raise_worth(self, lease: ReferenceLease, prefixes: list[Prefix]) -> None:
        size = self.config.block_size
        for prefix in prefixes:
            end = len(prefix[1])
            touching = [
                (r.priority, inf if r.duration_s is None else r.duration_s)
                for r in self.ranges[id(lease)]
                if r.start < end and (r.end is None or r.end > end - size)
            ]
            if touching and max(touching) >= self.worth.get(prefix, (0, 0)):
                self.worth[prefix] = max(touching)
                self._begin_anew([prefix])

    def _begin_anew(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            if prefix in self.worth:
                self.ends[prefix] = self.clock() + self.worth[prefix][1]

    def _use(self, prefixes: list[Prefix]) -> None:
        self.abandoned -= set(prefixes)
        super()._use(prefixes)

    def _give_up(self, prefix: Prefix) -> None:
        self.abandoned.discard(prefix)
        self.worth.pop(prefix, None)
        self.ends.pop(prefix, None)
        super()._give_up(prefix)
