"""The cache: the verbs that an engine calls, composed of tree, pool, pins and eviction index.

Owns: every change of a lease, and that a call does all of its work or none.  Does not know: memory,
devices, models, threads (one thread owns a cache).
Idea: a sequence is a lease.  `acquire` pins what is cached and adds blocks for the rest, `append`
makes room, `commit` publishes what was computed, `release` lets go; what nobody stands on stays
cached until its blocks are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import ne

from msgspec import structs

from radixcache.check import verify
from radixcache.config import CacheConfig
from radixcache.errors import InvalidLease, OutOfBlocks, StaleEpoch
from radixcache.eviction import EvictionIndex
from radixcache.lease import BlockCopy, Commit, Lease, Match, PrefixKey
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.observer import TreeObserver
from radixcache.pins import Pins
from radixcache.policy import LRU, EvictionPolicy
from radixcache.pool import BlockPool
from radixcache.stats import CacheStats, Counters
from radixcache.tokens import TOKEN_BYTES, Packed, check_packed
from radixcache.tree import RadixTree
from radixcache.view import TreeView, view_tree


class RadixCache:
    """A radix tree of token prefixes over refcounted blocks.

    config     sizes; see `CacheConfig`
    policy     order of eviction, LRU unless given
    observers  told of every block that is published or given up

    The parts (`tree`, `pool`, `pins`, `leases`) are there to be read by checks and views.

    >>> cache = RadixCache(CacheConfig(num_blocks=8, block_size=2))
    >>> lease = cache.acquire(PrefixKey.of([1, 2, 3, 4, 5]))
    >>> _ = cache.commit(lease, 5)  # after K/V of all five was computed
    >>> cache.release(lease)
    >>> cache.match(PrefixKey.of([1, 2, 3, 4, 9])).num_tokens
    4
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        policy: EvictionPolicy | None = None,
        observers: Sequence[TreeObserver] = (),
    ) -> None:
        self.config = config
        self.observers = tuple(observers)
        self.tree = RadixTree(config.block_size)
        self.pool = BlockPool(config.num_blocks)
        self.pins = Pins(EvictionIndex(policy or LRU()))
        self.leases: dict[int, Lease] = {}
        self._counters = Counters()
        self._clock = 0
        self._next_lease_id = 0
        self._epochs: dict[Namespace, int] = {}  # of namespaces raised once, by themselves at 0

    def match(self, key: PrefixKey) -> Match:
        """Look up the longest cached prefix; change nothing, not even recency."""
        block_size = self.config.block_size
        root = self.tree.roots.get(key.namespace)
        if root is None or self._is_stale(key.namespace):
            return Match(0, b"")
        found = self.tree.find(root, key.tokens, 0, key.num_tokens)
        runs = self.tree.runs(found.node, None)
        if found.inside < found.node.num_tokens:
            runs[-1] = runs[-1][: found.inside // block_size]
        return Match(found.num_tokens, b"".join(runs))

    def acquire(self, key: PrefixKey) -> Lease:
        """Pin the longest cached prefix of a prompt and add blocks for the rest.

        Where the prompt leaves the cache inside a block, the head of that block is used by a copy
        (`lease.copy_owed`), so that large blocks find as many tokens as small ones.
        At least the last token is left to compute, so that there are logits to sample from.
        O(nodes passed + blocks); evicts if it must.  Raises OutOfBlocks, and then no lease, pin
        or block was taken; StaleEpoch.
        """
        self._check_epoch(key.namespace)
        num_tokens, block_size = key.num_tokens, self.config.block_size
        needed = -(-num_tokens // block_size)
        root = self.tree.roots.get(key.namespace)
        committed, node, source, partial = 0, root, -1, 0
        if root is not None and num_tokens and self.config.enable_prefix_cache:
            found = self.tree.find(root, key.tokens, 0, num_tokens - 1)
            source, partial = self.tree.find_partial(found, key.tokens, num_tokens - 1)
            needed -= found.num_tokens // block_size
            if needed > self.pool.num_free:
                held = self.pins.num_unpinned_above(found.node, found.inside, block_size)
                self._require(needed, held)
            committed, node = found.num_tokens, self._upper(found.node, found.inside)
        if node is None:
            self._require(needed, 0)
            node = self.tree.root(key.namespace)
        self.pins.lock(node)
        try:
            fresh = self._allocate(needed)
        except OutOfBlocks:
            self._unlock(node)
            raise
        self._next_lease_id += 1
        lease = Lease(self._next_lease_id, key.namespace, key.tokens, node)
        lease.block_table = self.tree.blocks(node, None)
        lease.block_table.extend(fresh)
        lease.num_committed, lease.num_cached = committed, committed + partial
        if partial:
            lease.copy_owed = BlockCopy(source, fresh[0], partial)
        self.leases[lease.lease_id] = lease
        self._touch(node)
        node.num_hits += 1
        self._counters.queries += 1
        self._counters.query_tokens += num_tokens
        self._counters.hit_tokens += lease.num_cached
        return lease

    def append(self, lease: Lease, tokens: Packed) -> tuple[BlockCopy, ...]:
        """Make room for more tokens of a sequence, and note them.

        tokens   packed ids
        returns  copies to carry out before the next step writes: where the last block is part
                 full and shared with a fork, this lease gets its own copy of it

        Raises OutOfBlocks or InvalidTokens, and then the lease is as it was.
        """
        self._check_lease(lease)
        check_packed(tokens)
        block_size, old_len = self.config.block_size, lease.num_tokens
        filled = old_len % block_size
        new_len = old_len + len(tokens) // TOKEN_BYTES
        needed = -(-new_len // block_size) - len(lease.block_table)
        copies: tuple[BlockCopy, ...] = ()
        shared = bool(filled and tokens) and self.pool.refcount(lease.block_table[-1]) > 1
        fresh = self._allocate(needed + shared)
        if shared:
            own, source = fresh.pop(0), lease.block_table[-1]
            self.pool.release([source])
            lease.block_table[-1] = own
            copies = (BlockCopy(source, own, filled),)
        lease.block_table.extend(fresh)
        lease.tokens.extend(tokens)
        return copies

    def commit(self, lease: Lease, num_tokens: int) -> Commit:
        """Publish the full blocks among the first `num_tokens` tokens.

        num_tokens  tokens whose K/V is computed and final

        Blocks that another lease has published meanwhile are twins: ours are freed, and the
        block table names the others' from then on.  O(new tokens).
        Raises InvalidLease where `num_tokens` exceeds the lease's tokens.
        """
        self._check_lease(lease)
        if num_tokens > lease.num_tokens:
            raise InvalidLease(f"{num_tokens} tokens committed, but {lease!r} has fewer")
        block_size = self.config.block_size
        start, end = lease.num_committed, num_tokens - num_tokens % block_size
        if end <= start or not self.config.enable_prefix_cache or self._is_stale(lease.namespace):
            return Commit(0, 0)
        found = self.tree.find(lease.node, lease.tokens, start, end)
        node, num_twins, ours = lease.node, 0, True
        if found.num_tokens > start:
            node, ours = self._upper(found.node, found.inside), False
            num_twins = self._remap(lease, node, found.num_tokens)
            self.pins.lock(node)
            self._unlock(lease.node)
        self._clock += 1
        if found.num_tokens < end:
            node = self._publish(lease, node, found.num_tokens, end, may_extend=ours)
        node.last_access = self._clock
        lease.node = node
        lease.num_committed = end
        published = (end - found.num_tokens) // block_size
        self._counters.published_blocks += published
        self._counters.twin_blocks += num_twins
        return Commit(published, num_twins)

    def truncate(self, lease: Lease, num_tokens: int) -> None:
        """Roll a sequence back to `num_tokens` tokens, such as after rejected drafts.

        Raises InvalidLease for more tokens than there are, or fewer than are committed.
        """
        self._check_lease(lease)
        if not lease.num_committed <= num_tokens <= lease.num_tokens:
            raise InvalidLease(
                f"{lease!r} can be cut to {lease.num_committed} … {lease.num_tokens} tokens, "
                f"not to {num_tokens}"
            )
        keep = -(-num_tokens // self.config.block_size)
        self.pool.release(lease.block_table[keep:])
        del lease.block_table[keep:]
        del lease.tokens[num_tokens * TOKEN_BYTES :]

    def fork(self, lease: Lease) -> Lease:
        """Return a second lease on the same tokens that shares every block; takes no block.

        Whichever of the two first writes into a part-full block gets its own copy (`append`).
        """
        self._check_lease(lease)
        self._next_lease_id += 1
        twin = Lease(self._next_lease_id, lease.namespace, lease.tokens, lease.node)
        twin.block_table.extend(lease.block_table)
        twin.num_cached, twin.num_committed = lease.num_cached, lease.num_committed
        self.pool.share(self._private(lease))
        self.pins.lock(lease.node)
        self.leases[twin.lease_id] = twin
        return twin

    def release(self, lease: Lease) -> None:
        """Let go of a sequence: its private blocks are free, its committed ones evictable.

        Raises InvalidLease for a lease that is released already, and changes nothing then.
        """
        self._check_lease(lease)
        del self.leases[lease.lease_id]
        self.pool.release(self._private(lease))
        self._unlock(lease.node)

    def evict(self, num_blocks: int) -> int:
        """Give up cached blocks, leaves first in the policy's order; return how many came free.

        The last leaf is only trimmed at its tail where not all of it is needed.  O(log n) a leaf.
        """
        freed = 0
        while freed < num_blocks:
            leaf = self.pins.index.first()
            if leaf is None:
                break
            freed += self._give_up(leaf, min(num_blocks - freed, len(leaf.block_ids)))
        return freed

    def raise_epoch(self, namespace: Namespace) -> Namespace:
        """Make all that was cached in a namespace unreachable, in O(1); return the next epoch.

        For weights, an adapter, a template or a dtype that changed.  Live leases finish, but
        publish no more; what was cached is evicted as room is needed, or at once by `drop`.
        """
        self._check_epoch(namespace)
        following = structs.replace(namespace, epoch=namespace.epoch + 1)
        self._epochs[structs.replace(namespace, epoch=0)] = following.epoch
        return following

    def drop(self, namespace: Namespace) -> int:
        """Give up all cached blocks of a namespace that nobody stands on.

        returns  how many blocks came free; O(nodes of the namespace)
        """
        root = self.tree.roots.get(namespace)
        nodes = [root] if root is not None else []
        for node in nodes:  # grows: parents before children
            nodes.extend(node.children.values())
        unpinned = [node for node in reversed(nodes) if node is not root and not node.lock_ref]
        return sum(self._give_up(node, len(node.block_ids)) for node in unpinned)

    def advance_clock(self, last_access: int) -> None:
        """Let logical time go on behind `last_access`, after nodes were loaded."""
        self._clock = max(self._clock, last_access)

    def stats(self) -> CacheStats:
        """Return the counters as one record; O(1)."""
        pins, pool, counters = self.pins, self.pool, self._counters
        owned = pins.num_pinned + pins.num_evictable
        return CacheStats(
            num_blocks=pool.capacity,
            num_free=pool.num_free,
            num_private=pool.capacity - pool.num_free - owned,
            num_pinned=pins.num_pinned,
            num_evictable=pins.num_evictable,
            num_nodes=self.tree.num_nodes,
            num_leases=len(self.leases),
            **{name: getattr(counters, name) for name in counters.__slots__},
        )

    def view(self) -> TreeView:
        """Return the tree as records, without changing anything; O(nodes + tokens)."""
        return view_tree(self.tree, self.pins.index)

    def check(self) -> None:
        """Derive every invariant anew from the parts; O(everything), for tests and debugging.

        Raises InvariantViolation that names the invariant and what contradicts it.
        """
        verify(self)

    def _require(self, needed: int, held: int) -> None:
        evictable = self.pins.num_evictable - held
        if needed > self.pool.num_free + evictable:
            self._counters.out_of_blocks += 1
            raise OutOfBlocks(needed=needed, free=self.pool.num_free, evictable=evictable)

    def _allocate(self, count: int) -> array[int]:
        if count > self.pool.num_free:
            self._require(count, 0)
            self.evict(count - self.pool.num_free)
            # Evicted blocks that a fork still holds privately did not come free.
            self._require(count, self.pins.num_evictable)
        return self.pool.allocate(count)

    def _give_up(self, leaf: Node, num_blocks: int) -> int:
        """Take the last blocks off an evictable leaf, or all of it; return how many came free."""
        for observer in self.observers:
            observer.removed(leaf, num_blocks)
        if num_blocks == len(leaf.block_ids):
            parent = self.tree.remove(leaf)
            parent.last_access = max(parent.last_access, leaf.last_access)
            parent.num_hits += leaf.num_hits
            self.pins.removed(leaf, parent)
            self._drop_if_unused(parent)
            evicted = leaf.block_ids
        else:
            evicted = self.tree.trim(leaf, num_blocks)
            self.pins.trimmed(leaf, num_blocks)
        self._counters.evicted_blocks += num_blocks
        return self.pool.release(evicted)

    def _upper(self, node: Node, inside: int) -> Node:
        """The node whose edge ends after `inside` tokens of `node`'s: itself, or split off."""
        if inside == node.num_tokens:
            return node
        upper = self.tree.split(node, inside)
        self.pins.split(node)
        for observer in self.observers:
            observer.split(upper, node)
        return upper

    def _remap(self, lease: Lease, node: Node, end: int) -> int:
        """Give up the lease's private blocks below token `end` for those that the tree has."""
        first, last = (n // self.config.block_size for n in (lease.num_committed, end))
        own, theirs = lease.block_table[first:last], self.tree.blocks(node, lease.node)
        self.pool.release(own)
        lease.block_table[first:last] = theirs
        return sum(map(ne, own, theirs))

    def _publish(self, lease: Lease, node: Node, start: int, end: int, *, may_extend: bool) -> Node:
        """Hand the lease's private blocks of tokens `start … end` to the tree, below `node`.

        The lease's pin on `node` passes to the node that is returned.
        """
        first, last = (n // self.config.block_size for n in (start, end))
        block_ids = lease.block_table[first:last]
        edge = bytes(lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES])
        alone = may_extend and node.lock_ref == 1 and node.is_leaf
        if alone and (self.pins.index.policy.by_recency or not node.num_hits):
            self.tree.extend(node, edge, block_ids)
            self.pins.extended(len(block_ids))
            leaf = node
        else:
            leaf = self.tree.attach(node, edge, block_ids)
            leaf.created = self._clock
            self.pins.attached_below_pin(leaf)
        for observer in self.observers:
            observer.stored(leaf, len(block_ids))
        return leaf

    def _private(self, lease: Lease) -> array[int]:
        return lease.block_table[lease.num_committed // self.config.block_size :]

    def _touch(self, node: Node) -> None:
        """Note an access.  Nodes above need none: they go after `node`, and inherit its time."""
        self._clock += 1
        node.last_access = self._clock

    def _unlock(self, node: Node) -> None:
        self.pins.unlock(node)
        self._drop_if_unused(node)

    def _drop_if_unused(self, node: Node) -> None:
        if node.parent is None and node.lock_ref == 0 and not node.children:
            self.tree.drop_root(node)

    def _is_stale(self, namespace: Namespace) -> bool:
        """True where the namespace's epoch was raised since; free where no epoch ever was."""
        if not self._epochs:
            return False
        return namespace.epoch < self._epochs.get(structs.replace(namespace, epoch=0), 0)

    def _check_epoch(self, namespace: Namespace) -> None:
        if self._is_stale(namespace):
            raise StaleEpoch(f"the epoch of {namespace} was raised: use the one that is current")

    def _check_lease(self, lease: Lease) -> None:
        if self.leases.get(lease.lease_id) is not lease:
            raise InvalidLease(f"{lease!r} is released, or belongs to another cache")
