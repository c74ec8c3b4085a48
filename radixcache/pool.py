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

FEW_BLOCKS = 32
"""Up to so many ids a loop is faster than numpy's fixed cost."""


class BlockPool:
    """Reference counts and the free list of `capacity` blocks, ids 0 … capacity − 1.

    A block is free, or has one owner or more: the tree, and leases that hold it privately.
    """

    __slots__ = ("_free", "_many_refs", "_refs", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = array("i", range(capacity - 1, -1, -1))  # a stack: the lowest id on top
        self._refs = array("i", bytes(4 * capacity))
        self._many_refs = np.frombuffer(self._refs, np.int32)  # the same memory

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
        ids = self._free[: -count - 1 : -1]
        del self._free[-count:]
        if count <= FEW_BLOCKS:
            for block_id in ids:
                self._refs[block_id] = 1
        else:
            self._many_refs[np.frombuffer(ids, np.int32)] = 1
        return ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Give each block one owner more.  Raises InvariantViolation for a free block."""
        self._check(block_ids)
        self._many_refs[np.asarray(block_ids, np.int32)] += 1

    def release(self, block_ids: Sequence[int]) -> int:
        """Take one owner from each block; return how many became free.

        Raises InvariantViolation, before anything changes, for a block that is free, out of
        range, or named twice.
        """
        if not len(block_ids):
            return 0
        self._check(block_ids)
        before = len(self._free)
        if len(block_ids) <= FEW_BLOCKS:
            refs = self._refs
            for block_id in reversed(block_ids):
                refs[block_id] -= 1
                if not refs[block_id]:
                    self._free.append(block_id)
        else:
            ids = np.asarray(block_ids, np.int32)
            self._many_refs[ids] -= 1
            freed = ids[self._many_refs[ids] == 0]
            self._free.frombytes(freed[::-1].tobytes())
        return len(self._free) - before

    def refcount(self, block_id: int) -> int:
        """Return how many owners a block has; 0 is free."""
        return self._refs[block_id]

    def free_ids(self) -> list[int]:
        """Return the free ids, next to be taken last."""
        return self._free.tolist()

    def _check(self, block_ids: Sequence[int]) -> None:
        """Raise InvariantViolation unless these are different blocks, all owned."""
        if len(block_ids) <= FEW_BLOCKS:
            refs, capacity = self._refs, self.capacity
            twice = len(set(block_ids)) != len(block_ids)
            unknown = bool(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < capacity
            owned = unknown or all(map(refs.__getitem__, block_ids))
        else:
            ids = np.sort(np.asarray(block_ids, np.int32))
            twice = bool((ids[1:] == ids[:-1]).any())
            unknown = bool(ids[0] < 0 or ids[-1] >= self.capacity)
            owned = unknown or bool(self._many_refs[ids].all())
        if twice:
            raise InvariantViolation(f"a block is named twice: {list(block_ids)}")
        if unknown:
            raise InvariantViolation(f"no such block: {list(block_ids)} of {self.capacity}")
        if not owned:
            raise InvariantViolation(f"a free block is shared or freed again: {list(block_ids)}")
