"""The hit rate of LRU at every cache size, estimated while serving, in fixed memory.

Owns: which blocks are sampled, their order of last use, and the curve made of it.  Does not know:
the cache whose traffic it watches, clocks, tenants.
Idea: spatial sampling.  A block is watched if the hash of its whole prefix is below a threshold, so
all uses of one block are seen or none; among the watched ones, a block's depth in the order of last
use is the true depth times the share that is watched.  As more blocks are met than there is memory
for, the threshold falls, and those above it are forgotten.  A request uses its deepest block first
and its root last, as the tree gives up leaves first.

Source: Waldspurger et al. 2015 (SHARDS), with its correction for the hot blocks that a sample
happens to hold too many or too few of; depths of trees as in `radixcache.sim.curve`.
"""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from radixcache.errors import InvalidConfig, InvariantViolation
from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES, Packed

BUCKETS_PER_DOUBLING = 8
"""Of the histogram of depths: sizes within 9 % of each other share one."""

_DOUBLINGS = 40
_ALL = 1 << 64
_DEPTH_BITS = 24
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


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
        "_block_size",
        "_by_hash",
        "_found",
        "_half_life_s",
        "_hits",
        "_max_samples",
        "_now",
        "_order",
        "_references",
        "_salts",
        "_seconds",
        "_stamps",
        "_threshold",
        "_time",
        "_weight",
        "_weights",
    )

    def __init__(
        self,
        *,
        block_size: int,
        max_samples: int = 8192,
        half_life_s: float | None = None,
        seed: int = 0,
    ) -> None:
        if block_size < 1 or max_samples < 1 or (half_life_s is not None and half_life_s <= 0):
            raise InvalidConfig("block_size, max_samples and half_life_s must be above 0")
        random = Random(seed)
        self._block_size = block_size
        self._max_samples = max_samples
        self._half_life_s = half_life_s
        self._weights = np.array([random.getrandbits(64) | 1 for _ in range(block_size)], np.uint64)
        self._salts = random.getrandbits(64), random.getrandbits(64) | 1
        self._threshold = _ALL
        self._stamps: dict[int, int] = {}  # of the watched blocks, by hash
        self._order: SortedList = SortedList()  # of the stamps: the later the use, the greater
        self._by_hash: list[int] = []  # a heap, of the hashes backwards
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
        return self._threshold / _ALL

    def estimate(self) -> CurveEstimate:
        """Return the curve as it is now; O(buckets)."""
        # SHARDS' correction: what the sample counts too little are uses of blocks that are hit at
        # any size, and what it counts too much as well.
        missing = self._references - self._weight
        below = np.cumsum(self._hits) + missing
        return CurveEstimate(
            self._references,
            self._references * self._block_size / self._seconds if self._seconds else None,
            self._found,
            tuple(np.maximum(0.0, below).tolist()),
        )

    def check(self) -> None:
        """Raise InvariantViolation unless the three tables hold the same blocks."""
        hashes = sorted(-negative for negative in self._by_hash)
        if hashes != sorted(self._stamps) or list(self._order) != sorted(self._stamps.values()):
            raise InvariantViolation("the watched blocks differ between order, stamps and heap")
        if len(hashes) > self._max_samples or any(h >= self._threshold for h in hashes):
            raise InvariantViolation("blocks are watched that should have been forgotten")

    def _use(self, namespace: Namespace, tokens: Packed, *, counts: bool) -> None:
        num_blocks = len(tokens) // (self._block_size * TOKEN_BYTES)
        if not num_blocks:
            return
        self._time += 1
        if counts:
            self._references += num_blocks
        hashes = self._hashes(namespace, tokens, num_blocks)
        if self._threshold < _ALL:
            places = np.flatnonzero(hashes < np.uint64(self._threshold))
        else:
            places = np.arange(num_blocks)
        if not len(places):
            return
        watched = hashes[places].tolist()
        depths = places.tolist()
        if counts:
            self._count(watched)
        for block, depth in zip(watched, depths, strict=True):
            if block < self._threshold:
                self._stamp(block, depth)

    def _count(self, watched: list[int]) -> None:
        """Enter the depths of a request's watched blocks, all as they are before the request."""
        order, scale = self._order, _ALL / self._threshold
        for block in watched:
            self._weight += scale
            stamp = self._stamps.get(block)
            if stamp is not None:
                depth = 1 + (len(order) - 1 - order.bisect_left(stamp)) * scale
                bucket = int(np.ceil(BUCKETS_PER_DOUBLING * np.log2(depth)))
                self._hits[min(bucket, len(self._hits) - 1)] += scale

    def _stamp(self, block: int, depth: int) -> None:
        """Make a watched block the last used; at one time, the less deep it lies the later."""
        stamp = (self._time << _DEPTH_BITS) + (1 << _DEPTH_BITS) - 1 - depth
        before = self._stamps.get(block)
        if before is not None:
            self._order.remove(before)
        else:
            heappush(self._by_hash, -block)
        self._stamps[block] = stamp
        self._order.add(stamp)
        if len(self._stamps) > self._max_samples:
            largest = -heappop(self._by_hash)
            self._order.remove(self._stamps.pop(largest))
            self._threshold = largest

    def _hashes(self, namespace: Namespace, tokens: Packed, num_blocks: int) -> NDArray[np.uint64]:
        """Hash the prefix that ends with each whole block.

        A block is a sum of its tokens with random weights; a prefix is the sum of its blocks, each
        mixed with its place.  64 bits, as good as the weights are secret.
        """
        first, step = self._salts
        ids = np.frombuffer(tokens, np.int32, num_blocks * self._block_size)
        sums = ids.reshape(num_blocks, self._block_size).astype(np.uint64) @ self._weights
        begin = (first + hash(namespace)) % _ALL
        sums += np.arange(num_blocks, dtype=np.uint64) * np.uint64(step) + np.uint64(begin)
        return _mixed(np.cumsum(_mixed(sums), dtype=np.uint64))

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


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed 64-bit values (splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> _SHIFTS[0])) * _MIX[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MIX[1]
    return values ^ (values >> _SHIFTS[2])
