"""A second simulator, of blocks alone: slow, short, and without a line of the first.

One dictionary a fact, no tree, no edges: a block is cached or it is not, a leaf is a cached block
that no cached block has as its parent, and the next victim is the least of all leaves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

Path = Sequence[int]


def reference_hits(paths: Sequence[Path], policy: str, capacity: int) -> int:
    """Blocks found, over all requests, by a cache of `capacity` blocks."""
    cached: set[int] = set()
    parent: dict[int, int] = {}
    used: dict[int, int] = {}
    entered: dict[int, int] = {}
    hits: dict[int, int] = {}
    protected: list[int] = []  # least recently hit first
    total = 0
    for now, path in enumerate(paths):
        found = 0
        while found < len(path) and path[found] in cached:
            found += 1
        total += found
        for block in reversed(path[:found]):
            hits[block] += 1
            used[block] = now
            protected = [other for other in protected if other != block] + [block]
        protected = protected[max(0, len(protected) - int(0.8 * capacity)) :]
        while len(cached) + len(path) - found > capacity:
            inner = {parent[block] for block in cached}
            leaves = [block for block in cached - inner if block not in path]
            by = Ranks(used, entered, hits, set(protected), paths[now + 1 :])
            victim = min(leaves, key=getattr(by, policy.replace("-", "_")))
            cached.remove(victim)
            protected = [block for block in protected if block != victim]
        for above, block in zip([-1, *path], path[:], strict=False):
            if block not in cached:
                cached.add(block)
                parent[block], entered[block], hits[block], used[block] = above, now, 0, now
    return total


class Ranks(NamedTuple):
    """The facts of all blocks at one moment, and what each policy makes of them."""

    used: dict[int, int]
    entered: dict[int, int]
    hits: dict[int, int]
    protected: set[int]
    later: Sequence[Path]

    def lru(self, block: int) -> Any:
        return self.used[block]

    def fifo(self, block: int) -> Any:
        return self.entered[block]

    def lfu(self, block: int) -> Any:
        return self.hits[block], self.used[block]

    def slru(self, block: int) -> Any:
        return block in self.protected, self.used[block]

    def opt(self, block: int) -> Any:
        return -next_use(block, self.later)

    def told_dead(self, block: int) -> Any:
        return next_use(block, self.later) < len(self.later), self.used[block]


def next_use(block: int, later: Sequence[Path]) -> int:
    """The place of the next request for a block; the number of requests where there is none."""
    return next((place for place, path in enumerate(later) if block in path), len(later))


def random_paths(seed: int, *, requests: int, depth: int = 6, branching: int = 3) -> list[Path]:
    """Paths down a random tree, popular branches more often; a block's number names its prefix."""
    rng = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(requests):
        steps = [min(int(rng.expovariate(1.0)), branching) for _ in range(rng.randint(1, depth))]
        prefixes = [tuple(steps[: end + 1]) for end in range(len(steps))]
        paths.append([names.setdefault(prefix, len(names)) for prefix in prefixes])
    return paths
