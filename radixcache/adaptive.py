"""An eviction policy that learns which blocks come back, and how long they take.

Owns: what was seen of reuse, by class and age, and which class gives the next victim.  Does not
know: the tree, the index, blocks' contents beyond a hash.
Idea: a block's class is how deep in its prompt it lies, and whether it was hit since it was
published; its age is the time since its last use.  Of a sample of all blocks, cached or evicted
long ago (they are the ghosts), every use is watched.  From that follows, for each class and age,
how many hits a block will bring for the time that it will take up.  Within a class the oldest goes
first, as under LRU; among the classes' oldest, the oldest of all, unless another one promises
clearly less.

Source: hit density as in LHD (Beckmann et al. 2018), with the best horizon in place of an average
one; spatial sampling as in SHARDS (Waldspurger et al. 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np
from numpy.typing import NDArray

from radixcache.learning import ClassRank, LearningPolicy
from radixcache.namespace import Namespace
from radixcache.node import NodeFacts
from radixcache.sampling import PrefixSample
from radixcache.tokens import Packed

AGES = 40
"""Ages that are told apart: powers of √2 of the logical time."""

DEPTHS = 40
"""Depths that are told apart: powers of √2 of tokens."""

CLASSES = 2 * DEPTHS
"""Depths of blocks that were hit since they were published, behind those that were not."""

_CLEARLY = 0.5  # what is learned is uncertain: without this, up to 1.4 points worse than LRU
_PRIOR = 16.0  # blocks of the average class that each class is taken to have shown already
_Table = NDArray[np.float64]


class Adaptive(LearningPolicy):
    """Evicts the oldest leaf, or that of a class whose blocks promise less than half as much.

    max_samples  blocks watched, about 300 bytes each
    learn_every  requests after which what was learned is put to use
    half_life    requests after which what was seen counts half
    seed         which blocks are watched

    Until something was learned it is LRU.  A request costs some 30 µs, and 3 µs for each watched
    block on its path; a victim 2 µs a class, 5 to 20 of which are there.
    """

    by_recency = False

    def __init__(
        self,
        *,
        max_samples: int = 8192,
        learn_every: int = 256,
        half_life: float = 20_000,
        seed: int = 0,
    ) -> None:
        self._max_samples = max_samples
        self._learn_every = learn_every
        self._kept = 0.5 ** (learn_every / half_life)
        self._seed = seed
        self._sample: PrefixSample | None = None
        self._seen: dict[int, tuple[int, int]] = {}  # hash to (time of last use, class then)
        self._now = 0
        self._asked = 0
        self._reused: _Table = np.zeros((CLASSES, AGES))  # by class and age at the next use
        self._worth: list[list[float]] = [[0.0] * AGES for _ in range(CLASSES)]

    def rank(self, node: NodeFacts) -> ClassRank:
        """Return (class, last access)."""
        depth = depth_of(node.start + node.num_tokens)
        return depth + (DEPTHS if node.num_hits else 0), node.last_access

    def choose(self, ranks: Sequence[ClassRank]) -> int:
        """Return the oldest of all, unless a class's oldest promises clearly less than that."""
        worth, now = self._worth, self._now
        promised = [(worth[of][age_of(max(0, now - used))], used) for of, used in ranks]
        least = min(promised)
        oldest = min(promised, key=lambda pair: pair[1])
        return promised.index(least if least[0] < _CLEARLY * oldest[0] else oldest)

    def asked(
        self, namespace: Namespace, tokens: Packed, *, block_size: int, num_found: int, now: int
    ) -> None:
        """Note a request: which of its watched blocks are used again, and after how long."""
        self._now = now
        sample = self._sample
        if sample is None:
            sample = self._sample = PrefixSample(
                block_size=block_size, max_samples=self._max_samples, seed=self._seed
            )
        for block, place in sample.watched(namespace, tokens):
            before = self._seen.get(block)
            if before is not None:
                self._reused[before[1], age_of(now - before[0])] += 1
            else:
                forgotten = sample.admit(block)
                if forgotten == block:
                    continue
                if forgotten is not None:
                    del self._seen[forgotten]
            end = (place + 1) * block_size
            self._seen[block] = now, depth_of(end) + (DEPTHS if end <= num_found else 0)
        self._asked += 1
        if self._asked % self._learn_every == 0:
            self._learn()

    def check(self) -> None:
        """Raise InvariantViolation unless what is noted is what is watched."""
        if self._sample is not None:
            self._sample.check(set(self._seen))

    def _learn(self) -> None:
        """Work out what blocks of each class and age promise; O(samples + classes · ages²)."""
        waiting = np.zeros((CLASSES, AGES))  # by class and age now: not used again so far
        for used, of in self._seen.values():
            waiting[of, age_of(self._now - used)] += 1
        reused = self._reused + _prior(self._reused, waiting)
        waiting += _prior(waiting, self._reused)
        self._worth = hit_density(reused, waiting).tolist()
        self._reused *= self._kept


def age_of(time: int) -> int:
    """Return the age that a time since the last use is.

    >>> age_of(0), age_of(1), age_of(1000)
    (0, 2, 19)
    """
    return min(AGES - 1, int(2 * log2(time + 1)))


def depth_of(num_tokens: int) -> int:
    """Return the depth that a block has whose last token is so many tokens from the begin."""
    return min(DEPTHS - 1, int(2 * log2(num_tokens)))


def hit_density(reused: _Table, waiting: _Table) -> _Table:
    """Return the hits that a block of a class and age brings for each unit of time it is kept.

    reused   blocks by class, and age when they were used again
    waiting  blocks by class, and age that they have reached without being used again
    returns  the best that can be had by keeping it up to any later age, and then giving it up
    """
    bounds = 2.0 ** (np.arange(AGES + 1) / 2) - 1
    widths = np.diff(bounds)
    ended = reused + waiting
    reached = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]  # blocks that got to the begin of an age
    spent = (reached - ended / 2) * widths  # time that they spent in it; half, where it ends there
    best = np.zeros_like(reused)
    for age in range(AGES):
        hits = np.cumsum(reused[:, age:], axis=1)
        time = np.maximum(np.cumsum(spent[:, age:], axis=1), 1e-9)
        best[:, age] = (hits / time).max(axis=1)
    return best


def _prior(counts: _Table, others: _Table) -> _Table:
    """A few blocks of the average class, so that a class hardly seen is no better or worse."""
    total = counts.sum() + others.sum()
    pooled = counts.sum(axis=0) / total * _PRIOR if total else np.zeros(AGES)
    return np.broadcast_to(pooled, counts.shape)
