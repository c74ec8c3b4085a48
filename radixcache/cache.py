"""The cache: the verbs that an engine calls, composed of tree, pool, pins and eviction index.

Owns: every change of a lease, and that a call does all of its work or none.  Does not know: memory,
devices, models, threads (one thread owns a cache).
Idea: a sequence is a lease.  `acquire` pins what is cached and adds blocks for the rest, `append`
makes room, `commit` publishes what was computed, `release` lets go; what nobody stands on stays
cached until its blocks are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import index

from radixcache.accounts import Accounts, Quota
from radixcache.check import verify
from radixcache.config import CacheConfig
from radixcache.deadlines import Deadlines, Hold
from radixcache.epochs import Epochs
from radixcache.errors import InvalidLease
from radixcache.explain import Explanation, explain
from radixcache.ghosts import remember_ghosts
from radixcache.keeping import Keeper
from radixcache.lease import BlockCopy, Commit, Lease, Match, PrefixKey
from radixcache.namespace import Namespace
from radixcache.observer import TreeObserver
from radixcache.pins import Pins
from radixcache.policy import LRU, EvictionPolicy
from radixcache.pool import BlockPool
from radixcache.publishing import Publisher
from radixcache.retention import Retention
from radixcache.room import Room
from radixcache.stats import CacheStats, NamespaceStats
from radixcache.tokens import TOKEN_BYTES, Packed, check_packed
from radixcache.tree import Position, RadixTree
from radixcache.view import TreeView, view_tree


class RadixCache:
    """A radix tree of token prefixes over refcounted blocks.

    config     sizes; see `CacheConfig`
    policy     order of eviction, LRU unless given
    observers  told of every block that is published or given up
    clock      tells the time in seconds, never backwards, such as `time.monotonic`; without one
               nothing can have a duration

    The parts (`tree`, `pool`, `pins`, `accounts` …) are there to be read by checks and views.

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
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.ghosts = remember_ghosts(config, clock)
        if self.ghosts is not None:
            observers = (*observers, self.ghosts)
        self.tree = RadixTree(config.block_size)
        self.pool = BlockPool(config.num_blocks)
        self.accounts = Accounts(policy or LRU(), num_blocks=config.num_blocks)
        self.pins = Pins(self.accounts)
        self.deadlines = Deadlines(clock)
        self.room = Room(self.tree, self.pool, self.pins, self.deadlines, observers)
        self.leases: dict[int, Lease] = {}
        self.epochs = Epochs()
        self._publisher = Publisher(self.room)
        self._keeper = Keeper(self.room, self._publisher, self.deadlines)
        self._clock = 0
        self._ids = count(1)  # of leases and holds

    @property
    def logical_time(self) -> int:
        """When the last acquire, commit or touch was, as nodes' `last_access` counts."""
        return self._clock

    def match(self, key: PrefixKey) -> Match:
        """Look up the longest cached prefix; change nothing, not even recency.

        O(nodes passed), one comparison of the bytes matched, and a copy of their block ids.
        """
        found = self._find(key)
        return Match(found.num_tokens, self.tree.blocks_of(found)) if found else Match(0, b"")

    def match_len(self, key: PrefixKey) -> int:
        """Return how many tokens `match` would find, without the block ids; to order a queue by."""
        found = self._find(key)
        return found.num_tokens if found else 0

    def touch(self, key: PrefixKey) -> int:
        """Make the longest cached prefix the most recently used: a request waits that will want it.

        returns  its tokens, as `match_len` does; no query is counted, nothing is pinned
        """
        found = self._find(key)
        if found and found.num_tokens:
            self._clock += 1
            self._keeper.touch(found, self._clock)
        return found.num_tokens if found else 0

    def num_evictable_on(self, keys: Iterable[PrefixKey]) -> int:
        """Return how many blocks of cached prefixes are evictable, shared ones counted once.

        They are room no more once the keys are acquired.  Changes nothing; a look-up each.
        """
        found = filter(None, map(self._find, keys))
        return self.pins.num_unpinned_above(found, self.config.block_size)

    def abandon(self, key: PrefixKey, *, start: int = 0) -> int:
        """Let what nobody else went on from go first: its user says that it comes back no more.

        start    tokens before it are left alone
        returns  blocks that go before all others, until somebody uses them; O(nodes passed)
        """
        found = self._find(key)
        return self._keeper.abandon(found, start) if found else 0

    def acquire(self, key: PrefixKey, *, retentions: Iterable[Retention] = ()) -> Lease:
        """Pin the longest cached prefix of a prompt and add blocks for the rest.

        retentions  token ranges of the sequence that are worth more than the rest; needs a policy
                    that asks for priorities to make a difference

        Where the prompt leaves the cache inside a block, the head of that block is used by a copy
        (`lease.copy_owed`), so that large blocks find as many tokens as small ones.
        At least the last token is left to compute, so that there are logits to sample from.
        O(nodes passed + blocks); evicts if it must.  Raises OutOfBlocks, and then no lease, pin
        or block was taken; StaleEpoch; InvalidConfig for a duration without a clock.
        """
        self.epochs.check(key.namespace)
        retentions = self.deadlines.checked(retentions) if retentions else ()
        self.expire()
        num_tokens, block_size = key.num_tokens, self.config.block_size
        needed = -(-num_tokens // block_size)
        root = self.tree.roots.get(key.namespace)
        account = self.accounts.by_namespace.get(key.namespace)
        committed, node, source, partial = 0, root, -1, 0
        if root is not None and num_tokens and self.config.enable_prefix_cache:
            found = self.tree.find(root, key.tokens, 0, num_tokens - 1)
            source, partial = self.tree.find_partial(found, key.tokens, num_tokens - 1)
            needed -= found.num_tokens // block_size
            if needed > self.pool.num_free or (account and account.num_left is not None):
                held = self.pins.num_unpinned_above([found], block_size)
                self.room.require(account, needed, held)
            committed, node = found.num_tokens, self._publisher.upper(found.node, found.inside)
        if node is None:
            self.room.require(account, needed, 0)
            node = self.tree.root(key.namespace)
            account = self.accounts.open(key.namespace)
        assert account is not None
        fresh = self.room.lock_and_allocate(node, account, needed)
        lease = Lease(next(self._ids), key.namespace, key.tokens, node, retentions)
        lease.block_table = self.tree.blocks(node, None)
        lease.block_table.extend(fresh)
        lease.num_committed, lease.num_cached = committed, committed + partial
        if partial:
            lease.copy_owed = BlockCopy(source, fresh[0], partial)
        self.leases[lease.lease_id] = lease
        # Nodes above need no touch: they go after `node`, and inherit its time.
        self._clock += 1
        node.last_access = self._clock
        node.num_hits += 1
        self._keeper.retain(lease, 0, committed)
        self.room.note_query(account, lease, self._clock)
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
        self.expire()
        block_size, old_len = self.config.block_size, len(lease.tokens) // TOKEN_BYTES
        filled, new_len = old_len % block_size, old_len + len(tokens) // TOKEN_BYTES
        needed = -(-new_len // block_size) - len(lease.block_table)
        copies: tuple[BlockCopy, ...] = ()
        shared = bool(filled and tokens) and self.pool.refcount(lease.block_table[-1]) > 1
        if needed or shared:
            account = self.accounts.by_namespace[lease.namespace]
            fresh = self.room.allocate(account, needed + shared)
            if shared:
                own, source = fresh.pop(0), lease.block_table[-1]
                self.room.free(account, [source])
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
        if index(num_tokens) > lease.num_tokens:
            raise InvalidLease(f"{num_tokens} tokens committed, but {lease!r} has fewer")
        block_size = self.config.block_size
        start, end = lease.num_committed, num_tokens - num_tokens % block_size
        is_off = not self.config.enable_prefix_cache
        if end <= start or is_off or self.epochs.is_stale(lease.namespace):
            return Commit(0, 0)
        self._clock += 1
        done = self._publisher.commit(lease, end, self._clock)
        self._keeper.retain(lease, start, end)
        return done

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
        account = self.accounts.by_namespace[lease.namespace]
        self.room.free(account, lease.block_table[keep:])
        del lease.block_table[keep:]
        del lease.tokens[num_tokens * TOKEN_BYTES :]

    def fork(self, lease: Lease) -> Lease:
        """Return a second lease on the same tokens that shares every block; takes no block.

        Whichever of the two first writes into a part-full block gets its own copy (`append`).
        """
        self._check_lease(lease)
        twin = Lease(next(self._ids), lease.namespace, lease.tokens, lease.node, lease.retentions)
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
        if self.deadlines.num_retained:
            self._keeper.refresh(lease.node)
        del self.leases[lease.lease_id]
        self.room.free(self.accounts.by_namespace[lease.namespace], self._private(lease))
        self.room.unlock(lease.node)

    def retain(self, key: PrefixKey, duration_s: float | None = None) -> Hold:
        """Hold the longest cached prefix, in whole blocks, so that nothing of it is evicted.

        duration_s  seconds until the hold ends of itself; None: not before `end_hold`

        For a system prompt that must stay, or a conversation whose tool is running.  Not a use: it
        changes no recency.  Raises StaleEpoch; InvalidConfig for a duration without a clock.
        """
        self.epochs.check(key.namespace)
        until = self.deadlines.after(duration_s)
        self.expire()
        found, num_tokens = self._find(key), 0
        if found is None:
            self.accounts.open(key.namespace)
            node = self.tree.root(key.namespace)
        else:
            node, num_tokens = self._publisher.upper(found.node, found.inside), found.num_tokens
        hold = Hold(next(self._ids), key.namespace, num_tokens, node)
        self._keeper.hold(hold, until)
        return hold

    def end_hold(self, hold: Hold) -> None:
        """End a hold before its time; one that has ended already is left alone.

        Raises InvalidLease for a hold of another cache.
        """
        self._keeper.end_hold(hold)

    def expire(self) -> None:
        """End holds and priorities whose time is over, as all that want room do; O(1) for none."""
        if self.deadlines.order:
            self._keeper.expire()

    def set_quota(self, namespace: Namespace, quota: Quota | None) -> int:
        """Set what a namespace may own, from now on; None takes its quota back.

        What it owns beyond a hard limit is evicted at once, as far as nobody stands on it.  The
        epoch that follows by `raise_epoch` takes the quota over.

        returns  how many blocks came free; O(all evictable leaves) at its first quota
        Raises StaleEpoch; InvalidConfig where soft limits together exceed the pool.
        """
        self.epochs.check(namespace)
        self.expire()
        account = self.accounts.set_quota(namespace, quota)
        return self.room.trim_to_quota(account)

    def evict(self, num_blocks: int) -> int:
        """Give up cached blocks, leaves first in the policy's order; return how many came free.

        The last leaf is only trimmed at its tail where not all of it is needed.  Shares of
        namespaces are left alone (`drop` takes them).  O(log n) a leaf.
        """
        self.expire()
        return self.room.evict(num_blocks)

    def raise_epoch(self, namespace: Namespace) -> Namespace:
        """Make all that was cached in a namespace unreachable, in O(1); return the next epoch.

        For weights, an adapter, a template or a dtype that changed.  Live leases finish, but
        publish no more; what was cached is evicted as room is needed, or at once by `drop`.
        """
        self.epochs.check(namespace)
        following = self.epochs.raise_above(namespace)
        self.accounts.pass_quota(namespace, following)
        self.room.forget_if_unused(namespace)
        return following

    def drop(self, namespace: Namespace) -> int:
        """Give up what of a namespace nobody stands on, O(its nodes); return how many came free."""
        return self.room.drop(namespace)

    def advance_clock(self, last_access: int) -> None:
        """Let logical time go on behind `last_access`, after nodes were loaded."""
        self._clock = max(self._clock, last_access)

    def stats(self) -> CacheStats:
        """Return the counters as one record; O(1)."""
        return self.room.stats(num_leases=len(self.leases))

    def namespaces(self) -> dict[Namespace, NamespaceStats]:
        """Return the numbers of each namespace that owns something, or has a quota.

        A namespace that owns nothing any more is forgotten, with its counts.  O(namespaces).
        """
        return {account.namespace: account.stats() for account in self.accounts}

    def explain(self, key: PrefixKey, *, among: Iterable[Namespace] | None = None) -> Explanation:
        """Say how much of a prompt is cached, which token is the first that is not, and why.

        among  other namespaces that may be spoken of; None: all

        Changes nothing; O(tokens, and nodes passed in each namespace).  Whether something was
        evicted is known where `config.max_ghosts` allows for a memory of it.
        """
        return explain(
            key,
            tree=self.tree,
            is_enabled=self.config.enable_prefix_cache,
            newest_epoch=self.epochs.newest(key.namespace),
            ghosts=self.ghosts,
            among=among,
        )

    def view(self) -> TreeView:
        """Return the tree as records, without changing anything; O(nodes + tokens)."""
        return view_tree(self.tree, self.accounts)

    def check(self) -> None:
        """Derive every invariant anew from the parts; O(everything), for tests and debugging.

        Raises InvariantViolation that names the invariant and what contradicts it.
        """
        verify(self)

    def _find(self, key: PrefixKey) -> Position | None:
        root = self.tree.roots.get(key.namespace)
        if root is None or self.epochs.is_stale(key.namespace):
            return None
        return self.tree.find(root, key.tokens, 0, key.num_tokens)

    def _private(self, lease: Lease) -> array[int]:
        return lease.block_table[lease.num_committed // self.config.block_size :]

    def _check_lease(self, lease: Lease) -> None:
        if self.leases.get(lease.lease_id) is not lease:
            raise InvalidLease(f"{lease!r} is released, or belongs to another cache")
