"""Who stands on which node: pins, and what may be evicted because nobody does.

Owns: `lock_ref`, the counts of pinned and evictable blocks, and membership of the eviction
indexes.  Does not know: tokens, or which lease pins.
Idea: a node is pinned by the leases that end on it and by its pinned children.  A pin travels up
only where it turns a node from unpinned to pinned, so pinning below a busy prefix is O(1).
Every change that can be seen of a node comes by here, so here it is noted for whoever watches.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixcache.accounts import Account, Accounts
from radixcache.errors import InvariantViolation
from radixcache.node import Node
from radixcache.tree import Position


class Pins:
    """Reference counts on nodes; keeps accounts and eviction indexes in step with them.

    touched  nodes that were made, changed or taken off since whoever watches looked; None while
             nobody does
    """

    __slots__ = ("accounts", "num_evictable", "num_pinned", "touched")

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.num_evictable = 0  # blocks of nodes with lock_ref 0
        self.num_pinned = 0  # blocks of nodes with lock_ref above 0
        self.touched: set[Node] | None = None

    def note(self, *nodes: Node) -> None:
        """Note that nodes have changed; nothing while nobody watches."""
        if self.touched is not None:
            self.touched.update(nodes)

    def lock(self, node: Node) -> None:
        """Pin a node and with it every ancestor; O(ancestors that were unpinned)."""
        account = self.accounts.by_namespace[node.namespace]
        if node.lock_ref == 0 and node.is_leaf:
            account.index.remove(node)
        count, touched = 0, self.touched
        current: Node | None = node
        while current is not None:
            if touched is not None:
                touched.add(current)
            current.lock_ref += 1
            if current.lock_ref > 1:
                break
            current.is_abandoned = False
            count += len(current.block_ids)
            current = current.parent
        self._count(account, evictable=-count, pinned=count)

    def unlock(self, node: Node) -> None:
        """Take back one `lock`.  Raises InvariantViolation where there is none."""
        count, touched = 0, self.touched
        current: Node | None = node
        while current is not None:
            if current.lock_ref < 1:
                raise InvariantViolation(f"{current!r} is unpinned more often than pinned")
            if touched is not None:
                touched.add(current)
            current.lock_ref -= 1
            if current.lock_ref > 0:
                break
            count += len(current.block_ids)
            current = current.parent
        account = self.accounts.by_namespace[node.namespace]
        if node.lock_ref == 0 and node.is_leaf:
            account.index.add(node)
        self._count(account, evictable=count, pinned=-count)

    def attached(self, leaf: Node) -> None:
        """Account for a new, unpinned leaf; its parent is a leaf no more."""
        account = self.accounts.by_namespace[leaf.namespace]
        parent = leaf.parent
        if parent is not None and parent in account.index:
            account.index.remove(parent)
        if parent is not None:
            self.note(leaf, parent)
        account.index.add(leaf)
        self._count(account, evictable=len(leaf.block_ids))

    def attached_below_pin(self, leaf: Node) -> None:
        """Account for a new leaf below a pinned node: who stood on that stands on the leaf now.

        The parent's count stays: it has lost the lease and won a pinned child.
        """
        leaf.lock_ref = 1
        self.extended(leaf, len(leaf.block_ids))

    def extended(self, leaf: Node, num_blocks: int) -> None:
        """Account for blocks added to a pinned leaf's edge."""
        self.note(leaf)
        self._count(self.accounts.by_namespace[leaf.namespace], pinned=num_blocks)

    def trimmed(self, leaf: Node, num_blocks: int) -> None:
        """Account for blocks cut off an evictable leaf, whose rank may be another now."""
        account = self.accounts.by_namespace[leaf.namespace]
        account.index.update(leaf)
        self.note(leaf)
        self._count(account, evictable=-num_blocks)

    def revive(self, node: Node | None) -> None:
        """Take back that a node, and so what is above it, is abandoned; ranks stay as they are."""
        while node is not None and node.is_abandoned:
            node.is_abandoned = False
            node = node.parent

    def reranked(self, node: Node) -> None:
        """Account for a node whose rank may be another now: a cut edge, a priority."""
        account = self.accounts.by_namespace[node.namespace]
        self.note(node)
        if node in account.index:
            account.index.update(node)
            self.accounts.touch(account)

    def removed(self, leaf: Node, parent: Node) -> None:
        """Account for an evictable leaf taken off; its parent may be an evictable leaf now."""
        account = self.accounts.by_namespace[leaf.namespace]
        account.index.remove(leaf)
        self.note(leaf, parent)
        if parent.is_leaf and parent.lock_ref == 0:
            account.index.add(parent)
        self._count(account, evictable=-len(leaf.block_ids))

    def num_unpinned_above(self, places: Iterable[Position], block_size: int) -> int:
        """Return how many blocks of some paths are evictable now, and pinned once they are locked.

        places  where the paths end; what they share is counted once
        """
        reach: dict[Node, int] = {}  # blocks of each node's edge that a path goes through
        for node, _, inside in places:
            current: Node | None = node
            count = inside // block_size
            while current is not None and not current.lock_ref and reach.get(current, -1) < count:
                reach[current] = count
                current = current.parent
                count = len(current.block_ids) if current else 0
        return sum(reach.values())

    def _count(self, account: Account, *, evictable: int = 0, pinned: int = 0) -> None:
        self.num_evictable += evictable
        self.num_pinned += pinned
        account.num_evictable += evictable
        account.num_pinned += pinned
        if account.quota is not None:
            self.accounts.touch(account)
