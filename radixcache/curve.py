"""The hit rate of LRU at every cache size, estimated while serving, in fixed memory.

Owns: which blocks are sampled, their order of last use, and the curve made of it.  Does not know:
the cache whose traffic it watches, clocks, tenants.
Idea: of some blocks every use is watched; among these, a block's depth in the order of last use is
the true depth times the share that is watched.  A request uses its deepest block first and its root
last, as the tree gives up leaves first.

Source: Waldspurger et al. 2015 (SHARDS), with its correction for the hot blocks that a sample
happens to hold too many or too few of; depths of trees as in `radixcache.sim.curve`.
"""

from __future__ import annotations

import msgspec
import numpy as np
from sortedcontainers import SortedList

from radixcache.errors import InvalidConfig, InvariantViolation
from radixcache.namespace import Namespace
from radixcache.sampling import PrefixSample
from radixcache.tokens import TOKEN_BYTES, Packed

BUCKETS_PER_DOUBLING = 8
"""Of the histogram of depths: sizes within 9 % of each other share one."""

_DOUBLINGS = 40
_DEPTH_BITS = 24


class CurveEstimate(msgspec.Struct, frozen=True):
    """The curve at one moment.

    references       blocks asked for, recent ones for more where the curve forgets
    tokens_per_s     prompt tokens asked for in a second; None where no time has passed
    found            of the references, blocks that the cache itself found; None where nobody told
    hits_below       estimated hits in a cache of 2^(i / `BUCKETS_PER_DOUBLING`) blocks
    """

    references: float
    tokens_per_s: float | None
    found: float | None
    hits_below: tuple[float, ...]

    def hit_rate(self, num_blocks: float) -> float:
        """Return the estimated hit rate of a cache of so many blocks, 0 where nothing was asked."""
        if not self.references or num_blocks < 1:
            return 0.0
        place = BUCKETS_PER_DOUBLING * float(np.log2(num_blocks))
        hits = float(np.interp(place, range(len(self.hits_below)), self.hits_below))
        return min(1.0, max(0.0, hits / self.references))

    def anchored(self, num_blocks: float) -> CurveEstimate:
        """Return the curve moved up or down, so that a cache of so many blocks hits what was found.

        What a sample gets wrong it gets wrong at all sizes alike, for the most part: measured, this
        halves the error.  The curve as it is where nobody told what was found.
        """
        if self.found is None or not self.references:
            return self
        moved = self.found - self.hit_rate(num_blocks) * self.references
        hits = (min(self.references, max(0.0, hits + moved)) for hits in self.hits_below)
        return msgspec.structs.replace(self, hits_below=tuple(hits))


class LiveCurve:
    """Watches what is asked of a cache, and estimates what caches of other sizes would have hit.

    block_size   tokens a block
    max_samples  blocks watched at most, about 400 bytes each
    half_life_s  seconds after which a request counts half; None: all count the same
    seed         which blocks are watched; of the operator's choice, as whoever knew it could ask
                 for blocks that are never watched

    A request costs about 25 µs, and 7 µs for each watched block on its path.
    Raises InvalidConfig for numbers below 1.
    """

    __slots__ = (
        "_found",
        "_half_life_s",
        "_hits",
        "_now",
        "_order",
        "_references",
        "_sample",
        "_seconds",
        "_stamps",
        "_time",
        "_weight",
    )

    def __init__(
        self,
        *,
        block_size: int,
        max_samples: int = 8192,
        half_life_s: float | None = None,
        seed: int = 0,
    ) -> None:
        if half_life_s is not None and not half_life_s > 0:
            raise InvalidConfig(f"half_life_s must be above 0, not {half_life_s!r}")
        self._sample = PrefixSample(block_size=block_size, max_samples=max_samples, seed=seed)
        self._half_life_s = half_life_s
        self._stamps: dict[int, int] = {}  # of the watched blocks, by hash
        self._order: SortedList = SortedList()  # of the stamps: the later the use, the greater
        self._time = 0  # logical, of uses
        self._now: float | None = None
        self._seconds = 0.0
        self._references = 0.0
        self._found: float | None = None
        self._weight = 0.0  # of all uses that were counted, estimated from the watched ones
        self._hits = np.zeros(_DOUBLINGS * BUCKETS_PER_DOUBLING + 1)  # by bucket of depth

    def look_up(
        self,
        namespace: Namespace,
        tokens: Packed,
        *,
        found_blocks: int | None = None,
        now: float | None = None,
    ) -> None:
        """Note that a prompt was asked for.

        found_blocks  of its whole blocks, how many were cached; for `CurveEstimate.anchored`
        now           seconds, of a clock that never goes backwards; for rates and forgetting
        """
        self._pass_time(now)
        if found_blocks is not None:
            self._found = (self._found or 0.0) + found_blocks
        self._use(namespace, tokens, counts=True)

    def touch(self, namespace: Namespace, tokens: Packed) -> None:
        """Note that a sequence was used without being asked for, such as an answer published."""
        self._use(namespace, tokens, counts=False)

    @property
    def sampled_share(self) -> float:
        """Part of all blocks that is watched, from 0 to 1."""
        return self._sample.share

    def estimate(self) -> CurveEstimate:
        """Return the curve as it is now; O(buckets)."""
        # SHARDS' correction: what the sample counts too little are uses of blocks that are hit at
        # any size, and what it counts too much as well.
        missing = self._references - self._weight
        below = np.cumsum(self._hits) + missing
        return CurveEstimate(
            self._references,
            self._references * self._sample.block_size / self._seconds if self._seconds else None,
            self._found,
            tuple(np.maximum(0.0, below).tolist()),
        )

    def check(self) -> None:
        """Raise InvariantViolation unless sample, stamps and order hold the same blocks."""
        self._sample.check(set(self._stamps))
        if list(self._order) != sorted(self._stamps.values()):
            raise InvariantViolation("the watched blocks are not in the order of their last use")

    def _use(self, namespace: Namespace, tokens: Packed, *, counts: bool) -> None:
        watched = self._sample.watched(namespace, tokens)
        self._time += 1
        if counts:
            self._references += len(tokens) // (self._sample.block_size * TOKEN_BYTES)
            self._count(watched)
        for block, place in watched:
            self._stamp(block, place)

    def _count(self, watched: list[tuple[int, int]]) -> None:
        """Enter the depths of a request's watched blocks, all as they are before the request."""
        order, scale = self._order, 1 / self._sample.share
        for block, _ in watched:
            self._weight += scale
            stamp = self._stamps.get(block)
            if stamp is not None:
                depth = 1 + (len(order) - 1 - order.bisect_left(stamp)) * scale
                bucket = int(np.ceil(BUCKETS_PER_DOUBLING * np.log2(depth)))
                self._hits[min(bucket, len(self._hits) - 1)] += scale

    def _stamp(self, block: int, place: int) -> None:
        """Make a watched block the last used; at one time, the less deep it lies the later."""
        before = self._stamps.get(block)
        if before is not None:
            self._order.remove(before)
        else:
            forgotten = self._sample.admit(block)
            if forgotten == block:
                return
            if forgotten is not None:
                self._order.remove(self._stamps.pop(forgotten))
        stamp = (self._time << _DEPTH_BITS) + (1 << _DEPTH_BITS) - 1 - place
        self._stamps[block] = stamp
        self._order.add(stamp)

    def _pass_time(self, now: float | None) -> None:
        """Let what was counted weigh less, as time goes by."""
        if now is None:
            return
        passed = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now
        if self._half_life_s is not None and passed:
            kept = 0.5 ** (passed / self._half_life_s)
            self._references *= kept
            self._weight *= kept
            self._found = None if self._found is None else self._found * kept
            self._seconds *= kept
            self._hits *= kept
        self._seconds += passed
