"""The hit rate of LRU at every cache size, exactly, from one pass over a trace.

Owns: stack distances, and the curve made of them.  Does not know: caches, sampling.
Idea: a request uses a whole path, and the tree gives up leaves first, so LRU over leaves is LRU
over blocks if each request touches its deepest block first and its root last.  Then LRU's inclusion
property holds: a cache of C blocks holds the C blocks touched last, and a block is a hit wherever C
is at least its depth in that order (Mattson et al. 1970).

    order of last touch     …│ path of request 7: root a b c │ rest of request 5: d e │…
                              one path at a time, and of an older path only what lies below
                              the part that later requests shared

So blocks with one time of last touch are a run of one path, and a path crosses few runs: the cost
is O(log requests) a run, not a block.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from radixcache.sim.trace import Trace


class HitCurve:
    """Hits of LRU by cache size.

    references  blocks asked for

    Exact for every size that holds the longest request; a smaller cache would refuse that one.
    """

    __slots__ = ("_hits", "references")

    def __init__(self, hits: NDArray[np.int64], references: int) -> None:
        self._hits = hits  # index: cache size in blocks
        self.references = references

    def hits(self, num_blocks: int) -> int:
        """Return the hits in a cache of so many blocks."""
        return int(self._hits[min(num_blocks, len(self._hits) - 1)])

    def hit_rate(self, num_blocks: int) -> float:
        """Return the hits as a share of the references; 0 where there are none."""
        return self.hits(num_blocks) / self.references if self.references else 0.0

    @property
    def best(self) -> float:
        """The hit rate of a cache without bounds."""
        return self.hit_rate(len(self._hits))

    def smallest(self, hit_rate: float) -> int | None:
        """Return the smallest cache, in blocks, that reaches a hit rate; None where none does."""
        enough = int(np.searchsorted(self._hits, hit_rate * self.references - 1e-9))
        return enough if enough < len(self._hits) else None


def lru_curve(trace: Trace) -> HitCurve:
    """Return the exact curve of a trace, requests one after another; about 0.3 µs a block."""
    requests = trace.requests
    touched: dict[int, int] = {}  # when each block was touched last, as the place of the request
    living = _Counts(len(requests))  # how many blocks were touched last by each request
    steps = np.zeros(trace.num_distinct + 2, np.int64)  # second differences of `hits`
    for place, request in enumerate(requests):
        path, depth, runs = request.prompt + request.answer, 0, []
        for time, run in groupby(path, touched.get):
            if time is None:
                break  # below here everything is new
            length = sum(1 for _ in run)
            newer = living.total - living.upto(time)
            counted = max(0, min(length, len(request.prompt) - depth))
            steps[newer + 1] += 1 if counted else 0
            steps[newer + counted + 1] -= 1 if counted else 0
            runs.append((time, length))
            depth += length
        for time, length in runs:  # only now: all depths are those before the request
            living.add(time, -length)
        touched.update(dict.fromkeys(path, place))
        living.add(place, len(path))
    return HitCurve(np.cumsum(np.cumsum(steps))[:-1], trace.num_references)


class _Counts:
    """Counts by index whose sums up to an index cost O(log n).  Source: Fenwick 1994."""

    __slots__ = ("_tree", "total")

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)
        self.total = 0

    def add(self, index: int, count: int) -> None:
        """Add to one count."""
        self.total += count
        at = index + 1
        while at < len(self._tree):
            self._tree[at] += count
            at += at & -at

    def upto(self, index: int) -> int:
        """Return the sum of the counts at 0 … index."""
        at, total = index + 1, 0
        while at:
            total += self._tree[at]
            at -= at & -at
        return total
