"""The blocks of one tier: ids, reference counts, free list.

Owns: which block ids are free, and how many owners each other one has.  Does not know: tokens,
trees, or the memory behind an id.
Idea: an id is an int32 in an array, so that taking or returning a hundred thousand of them is a
few copies, not a loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from radixcache.errors import InvariantViolation

BlockIds = array  # array("i"); the alias names what the numbers are
"""Block ids as a compact int32 array."""


class BlockPool:
    """Reference counts and the free list of `capacity` blocks, ids 0 … capacity − 1.

    A block is free, or has one owner or more: the tree, and leases that hold it privately.
    """

    __slots__ = ("_free", "_refs", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = array("i", range(capacity - 1, -1, -1))  # a stack: the lowest id on top
        self._refs = np.zeros(capacity, np.int32)

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def allocate(self, count: int) -> array[int]:
        """Take `count` free blocks, one owner each; O(count) copies.

        Raises InvariantViolation where fewer are free: the cache makes room first.
        """
        if count > len(self._free):
            raise InvariantViolation(f"{count} blocks taken, but only {len(self._free)} are free")
        if count == 0:
            return array("i")
        ids = self._free[-count:]
        del self._free[-count:]
        ids.reverse()
        self._refs[np.frombuffer(ids, np.int32)] = 1
        return ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Give each block one owner more.  Raises InvariantViolation for a free block."""
        ids = self._checked(block_ids)
        self._refs[ids] += 1

    def release(self, block_ids: Sequence[int]) -> int:
        """Take one owner from each block; return how many became free.

        Raises InvariantViolation, before anything changes, for a block that is free, out of
        range, or named twice.
        """
        ids = self._checked(block_ids)
        if not len(ids):
            return 0
        self._refs[ids] -= 1
        freed = ids[self._refs[ids] == 0]
        self._free.frombytes(freed[::-1].astype(np.int32).tobytes())
        return len(freed)

    def refcount(self, block_id: int) -> int:
        """Return how many owners a block has; 0 is free."""
        return int(self._refs[block_id])

    def free_ids(self) -> list[int]:
        """Return the free ids, next to be taken last."""
        return self._free.tolist()

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        ids = np.asarray(block_ids, np.int32)
        if not len(ids):
            return ids
        if len(set(block_ids)) != len(ids):
            raise InvariantViolation(f"a block is named twice: {list(block_ids)}")
        if ids.min() < 0 or ids.max() >= self.capacity:
            raise InvariantViolation(f"no such block: {list(block_ids)} of {self.capacity}")
        if self._refs[ids].min() < 1:
            raise InvariantViolation(f"a free block is shared or freed again: {list(block_ids)}")
        return ids
