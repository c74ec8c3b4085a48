"""Who stands on which node: pins, and what may be evicted because nobody does.

Owns: `lock_ref`, the counts of pinned and evictable blocks, and membership of the eviction index.
Does not know: tokens, or which lease pins.
Idea: a node is pinned by the leases that end on it and by its pinned children.  A pin travels up
only where it turns a node from unpinned to pinned, so pinning below a busy prefix is O(1).
"""

from __future__ import annotations

from radixcache.errors import InvariantViolation
from radixcache.eviction import EvictionIndex
from radixcache.node import Node


class Pins:
    """Reference counts on nodes; keeps the eviction index in step with them."""

    __slots__ = ("index", "num_evictable", "num_pinned")

    def __init__(self, index: EvictionIndex) -> None:
        self.index = index
        self.num_evictable = 0  # blocks of nodes with lock_ref 0
        self.num_pinned = 0  # blocks of nodes with lock_ref above 0

    def lock(self, node: Node) -> None:
        """Pin a node and with it every ancestor; O(ancestors that were unpinned)."""
        if node.lock_ref == 0 and node.is_leaf:
            self.index.remove(node)
        count = 0
        current: Node | None = node
        while current is not None:
            current.lock_ref += 1
            if current.lock_ref > 1:
                break
            count += len(current.block_ids)
            current = current.parent
        self.num_evictable -= count
        self.num_pinned += count

    def unlock(self, node: Node) -> None:
        """Take back one `lock`.  Raises InvariantViolation where there is none."""
        count = 0
        current: Node | None = node
        while current is not None:
            if current.lock_ref < 1:
                raise InvariantViolation(f"{current!r} is unpinned more often than pinned")
            current.lock_ref -= 1
            if current.lock_ref > 0:
                break
            count += len(current.block_ids)
            current = current.parent
        self.num_evictable += count
        self.num_pinned -= count
        if node.lock_ref == 0 and node.is_leaf:
            self.index.add(node)

    def attached(self, leaf: Node) -> None:
        """Account for a new, unpinned leaf; its parent is a leaf no more."""
        self.num_evictable += len(leaf.block_ids)
        parent = leaf.parent
        if parent is not None and parent in self.index:
            self.index.remove(parent)
        self.index.add(leaf)

    def attached_below_pin(self, leaf: Node) -> None:
        """Account for a new leaf below a pinned node: who stood on that stands on the leaf now.

        The parent's count stays: it has lost the lease and won a pinned child.
        """
        leaf.lock_ref = 1
        self.num_pinned += len(leaf.block_ids)

    def extended(self, num_blocks: int) -> None:
        """Account for blocks added to a pinned leaf's edge."""
        self.num_pinned += num_blocks

    def trimmed(self, leaf: Node, num_blocks: int) -> None:
        """Account for blocks cut off an evictable leaf, whose rank may be another now."""
        self.num_evictable -= num_blocks
        self.index.update(leaf)

    def split(self, lower: Node) -> None:
        """Account for a cut edge; the lower part's rank may be another now."""
        if lower in self.index:
            self.index.update(lower)

    def removed(self, leaf: Node, parent: Node) -> None:
        """Account for an evictable leaf taken off; its parent may be an evictable leaf now."""
        self.index.remove(leaf)
        self.num_evictable -= len(leaf.block_ids)
        if parent.is_leaf and parent.lock_ref == 0:
            self.index.add(parent)

    def num_unpinned_above(self, node: Node, inside: int, block_size: int) -> int:
        """Return how many blocks of a path are evictable now, and pinned once `node` is locked.

        inside  tokens of `node`'s own edge that count
        """
        if node.lock_ref:
            return 0
        count = inside // block_size
        current = node.parent
        while current is not None and current.lock_ref == 0:
            count += len(current.block_ids)
            current = current.parent
        return count
