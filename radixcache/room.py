"""Making room: blocks for whoever asks, taken from what may be given up.

Owns: taking and returning blocks, and eviction.  Does not know: leases, or what the blocks are for.
Idea: a call that asks for blocks is refused before anything is given up for it; what counts as room
depends on who asks, as a namespace's share is evicted for the namespace itself only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

from radixcache.accounts import Account, Accounts
from radixcache.deadlines import Deadlines
from radixcache.errors import OutOfBlocks
from radixcache.lease import Lease
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.observer import TreeObserver
from radixcache.pins import Pins
from radixcache.pool import BlockPool
from radixcache.stats import CacheStats, Counters
from radixcache.tree import RadixTree


class Room:
    """The blocks of the pool, as a cache takes and returns them."""

    __slots__ = ("accounts", "counters", "deadlines", "observers", "pins", "pool", "tree")

    def __init__(
        self,
        tree: RadixTree,
        pool: BlockPool,
        pins: Pins,
        deadlines: Deadlines,
        observers: Sequence[TreeObserver],
    ) -> None:
        self.tree = tree
        self.pool = pool
        self.pins = pins
        self.deadlines = deadlines
        self.accounts: Accounts = pins.accounts
        self.observers = tuple(observers)
        self.counters = Counters()

    def require(self, account: Account | None, needed: int, held: int) -> None:
        """Raise OutOfBlocks unless `needed` blocks can be had for a namespace.

        account  None for a namespace that owns nothing, and has no quota
        held     evictable blocks of the namespace that the call is about to pin
        """
        if not needed:
            return
        free, evictable = self.pool.num_free, self.pins.num_evictable - held
        evictable -= self.accounts.guarded_from(account)
        if needed > free + evictable:
            self._refuse(account, OutOfBlocks(needed=needed, free=free, evictable=evictable))
        left = account.num_left if account else None
        if account is None or left is None:
            return
        own = account.num_evictable - held
        if needed > left + own:
            spare = max(0, own + min(0, left))  # what is owned beyond the limit has to go first
            error = OutOfBlocks(
                needed=needed, free=max(0, left), evictable=spare, quota=account.quota
            )
            self._refuse(account, error)

    def allocate(self, account: Account, count: int) -> array[int]:
        """Take `count` blocks for a namespace, evicting if it must.

        Raises OutOfBlocks, and then no block was taken.
        """
        if not count:
            return array("i")
        left = account.num_left if account.quota is not None else None
        if count > self.pool.num_free or (left is not None and count > left):
            self.require(account, count, 0)
            if left is not None:
                self._evict(count - left, partial(self.accounts.own_victim, account))
            self.evict(count - self.pool.num_free, account)
            self._require_free(account, count)
        account.num_owned += count
        if account.quota is not None:
            self.accounts.touch(account)
        return self.pool.allocate(count)

    def lock_and_allocate(self, node: Node, account: Account, count: int) -> array[int]:
        """Pin a node and take blocks to go on from it.

        Raises OutOfBlocks, and then neither was done.
        """
        self.pins.lock(node)
        try:
            return self.allocate(account, count)
        except OutOfBlocks:
            self.unlock(node)
            raise

    def free(self, account: Account, block_ids: Sequence[int]) -> int:
        """Take one owner from each block; return how many came free."""
        if not len(block_ids):
            return 0
        count = self.pool.release(block_ids)
        account.num_owned -= count
        if account.quota is not None:
            self.accounts.touch(account)
        return count

    def evict(self, num_blocks: int, account: Account | None = None) -> int:
        """Give up cached blocks for a namespace, or for nobody; return how many came free.

        The last leaf is only trimmed at its tail where not all of it is needed.
        """
        return self._evict(num_blocks, partial(self.accounts.victim, account))

    def trim_to_quota(self, account: Account) -> int:
        """Evict what a namespace owns beyond its hard limit, as far as nobody stands on it."""
        freed = self._evict(-(account.num_left or 0), partial(self.accounts.own_victim, account))
        self.forget_if_unused(account.namespace)
        return freed

    def drop(self, namespace: Namespace) -> int:
        """Give up all of a namespace that nobody stands on; return how many blocks came free."""
        root = self.tree.roots.get(namespace)
        nodes = [root] if root is not None else []
        for node in nodes:  # grows: parents before children
            nodes.extend(node.children.values())
        unpinned = [node for node in reversed(nodes) if node is not root and not node.lock_ref]
        return sum(self.give_up(node, len(node.block_ids)) for node in unpinned)

    def give_up(self, leaf: Node, num_blocks: int) -> int:
        """Take the last blocks off an evictable leaf, or all of it; return how many came free."""
        account = self.accounts.by_namespace[leaf.namespace]
        for observer in self.observers:
            observer.removed(leaf, num_blocks)
        if num_blocks == len(leaf.block_ids):
            parent = self.tree.remove(leaf)
            parent.last_access = max(parent.last_access, leaf.last_access)
            parent.num_hits += leaf.num_hits
            self.deadlines.forget(leaf)
            self.pins.removed(leaf, parent)
            evicted = leaf.block_ids
        else:
            parent = None
            evicted = self.tree.trim(leaf, num_blocks)
            self.pins.trimmed(leaf, num_blocks)
            self.counters.trims += 1
            account.trims += 1
        self.counters.evicted_blocks += num_blocks
        account.evicted_blocks += num_blocks
        freed = self.free(account, evicted)
        if parent is not None:
            self.drop_if_unused(parent)
        return freed

    def note_query(self, account: Account, lease: Lease, now: int) -> None:
        """Count a prompt that was acquired, and tell a policy that learns."""
        for counters in (self.counters, account):
            counters.count_query(lease.num_tokens, lease.num_cached)
        learning = self.accounts.index.learning
        if learning is not None:
            learning.asked(
                lease.namespace,
                lease.tokens,
                block_size=self.tree.block_size,
                num_found=lease.num_committed,
                now=now,
            )

    def unlock(self, node: Node) -> None:
        """Take back one pin of a node; a root that is left with nothing is forgotten."""
        self.pins.unlock(node)
        self.drop_if_unused(node)

    def drop_if_unused(self, node: Node) -> None:
        """Forget a root that nothing hangs below and nobody stands on."""
        if node.parent is None and node.lock_ref == 0 and not node.children:
            self.tree.drop_root(node)
            self.forget_if_unused(node.namespace)

    def forget_if_unused(self, namespace: Namespace) -> None:
        """Close the account of a namespace that has neither a tree nor a quota."""
        if namespace not in self.tree.roots:
            self.accounts.close(namespace)

    def stats(self, *, num_leases: int) -> CacheStats:
        """Return the counters as one record."""
        pins, pool = self.pins, self.pool
        return CacheStats(
            num_blocks=pool.capacity,
            num_free=pool.num_free,
            num_private=pool.capacity - pool.num_free - pins.num_pinned - pins.num_evictable,
            num_pinned=pins.num_pinned,
            num_evictable=pins.num_evictable,
            num_nodes=self.tree.num_nodes,
            num_leases=num_leases,
            num_holds=len(self.deadlines.holds),
            **self.counters.counts(),
        )

    def _evict(self, num_blocks: int, victim: Callable[[], tuple[Node, int] | None]) -> int:
        freed = 0
        while freed < num_blocks:
            found = victim()
            if found is None:
                break
            leaf, most = found
            assert most > 0, "a victim that gives nothing up would be asked for ever"
            freed += self.give_up(leaf, min(num_blocks - freed, most))
        return freed

    def _require_free(self, account: Account, count: int) -> None:
        """Check again after eviction: blocks that a fork still holds did not come free."""
        left = account.num_left
        if count > self.pool.num_free:
            error = OutOfBlocks(needed=count, free=self.pool.num_free, evictable=0)
            self._refuse(account, error)
        if left is not None and count > left:
            error = OutOfBlocks(needed=count, free=max(0, left), evictable=0, quota=account.quota)
            self._refuse(account, error)

    def _refuse(self, account: Account | None, error: OutOfBlocks) -> None:
        self.counters.out_of_blocks += 1
        if account is not None:
            account.out_of_blocks += 1
        raise error
