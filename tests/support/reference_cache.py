"""A second cache, too simple to be wrong: what each call must answer, found by looking.

Owns: the right answers.  Does not know: nodes, edges, pins, indexes, refcounts, free lists, ids.
Idea: the cache is a dict of whole-block prefixes, each with its block and the time of its last
use.  A block is a number that is never used again, free when no prefix and no lease names it.
What could be wrong (pinned, evictable, leaf, shared) is found anew at each question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

from msgspec import structs

from radixcache import CacheConfig, Lease, Namespace, Quota, RadixCache, TreeView, unpack_tokens

Prefix = tuple[Namespace, tuple[int, ...]]

COUNTED = (
    "queries",
    "query_tokens",
    "hit_tokens",
    "published_blocks",
    "twin_blocks",
    "evicted_blocks",
    "out_of_blocks",
)
"""What is counted over the life of a cache."""


class NoRoom(Exception):
    """The call must be refused with OutOfBlocks; blocks needed, free and evictable."""


class Disagreement(AssertionError):
    """The cache and the reference answer differently."""


class ReferenceLease:
    """A sequence: its tokens, and the name of the block behind each `block_size` of them."""

    def __init__(self, namespace: Namespace, tokens: list[int], blocks: list[int]) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.blocks = blocks
        self.num_cached = 0
        self.num_committed = 0


class ReferenceCache:
    """The verbs of `RadixCache` on plain data."""

    def __init__(self, config: CacheConfig, *, policy: str = "lru") -> None:
        self.config = config
        self.policy = policy
        self.cached: dict[Prefix, int] = {}  # a whole-block prefix → the block of its last tokens
        self.used_at: dict[Prefix, int] = {}
        self.num_hits: dict[Prefix, int] = {}
        self.raised: set[Namespace] = set()
        self.leases: list[ReferenceLease] = []
        self.quotas: dict[Namespace, Quota] = {}
        self.counts = dict.fromkeys(COUNTED, 0)
        self.counts_of: dict[Namespace, dict[str, int]] = {}
        self._now = 0
        self._names = count()

    def prefixes(self, namespace: Namespace, tokens: list[int], end: int) -> list[Prefix]:
        """The whole-block prefixes of the first `end` tokens, shortest first."""
        size = self.config.block_size
        return [(namespace, tuple(tokens[:n])) for n in range(size, end + 1, size)]

    def hits(self, namespace: Namespace, tokens: list[int], end: int) -> list[Prefix]:
        """Those of them that are cached."""
        return [p for p in self.prefixes(namespace, tokens, end) if p in self.cached]

    def agreed(self, namespace: Namespace, tokens: list[int]) -> int:
        """How many of the tokens begin some cached prefix, to the token."""
        if not self.config.enable_prefix_cache:
            return 0
        known = [cached for space, cached in self.cached if space == namespace]
        return max((_num_equal(cached, tokens) for cached in known), default=0)

    def pinned(self) -> set[Prefix]:
        """The cached prefixes that a lease has committed or been given."""
        return {
            prefix
            for lease in self.leases
            for prefix in self.prefixes(lease.namespace, lease.tokens, lease.num_committed)
        }

    def evictable(self) -> set[Prefix]:
        """The cached prefixes that no lease stands on."""
        return self.cached.keys() - self.pinned()

    def victims(self) -> list[Prefix]:
        """The evictable prefixes that no cached prefix continues, in the policy's order."""
        size = self.config.block_size
        continued = {(namespace, tokens[:-size]) for namespace, tokens in self.cached}
        return sorted(self.evictable() - continued, key=self.rank)

    def victim(self, asking: Namespace | None) -> Prefix | None:
        """The first victim that a request of a namespace, or of nobody, may take."""
        return next((p for p in self.victims() if p[0] == asking or self.over(p[0]) > 0), None)

    def owned(self, namespace: Namespace) -> int:
        """Blocks that the prefixes and leases of a namespace name."""
        names = {block for prefix, block in self.cached.items() if prefix[0] == namespace}
        mine = (lease.blocks for lease in self.leases if lease.namespace == namespace)
        return len(names.union(*mine))

    def over(self, namespace: Namespace) -> int:
        """Blocks that a namespace owns beyond its share."""
        quota = self.quotas.get(namespace)
        return self.owned(namespace) - (quota.soft_limit if quota else 0)

    def left(self, namespace: Namespace) -> int | None:
        """Blocks that it may own beside; None without limit."""
        quota = self.quotas.get(namespace)
        if quota is None or quota.hard_limit is None:
            return None
        return quota.hard_limit - self.owned(namespace)

    def num_evictable_by(self, asking: Namespace | None) -> int:
        """How many blocks a request of a namespace may evict in all."""
        evictable = Counter(namespace for namespace, _ in self.evictable())
        return sum(
            count if namespace == asking else min(count, max(0, self.over(namespace)))
            for namespace, count in evictable.items()
        )

    def rank(self, prefix: Prefix) -> Any:
        """What the policy orders by: the lowest goes first."""
        used_at, hits = self.used_at[prefix], self.num_hits[prefix]
        return {
            "lru": used_at,
            "mru": -used_at,
            "lfu": (hits, used_at),
            "slru": (hits >= 2, used_at),
            "cost": used_at + 64 * (1 + len(prefix[1]) / 4096),
        }[self.policy]

    def is_shared(self, block: int) -> bool:
        """True where more than one of the leases and the cache name a block."""
        holders = sum(block in lease.blocks[self._whole(lease) :] for lease in self.leases)
        return holders + (block in self.cached.values()) > 1

    def num_free(self) -> int:
        """Blocks that neither a prefix nor a lease names."""
        named = set(self.cached.values()).union(*(lease.blocks for lease in self.leases))
        return self.config.num_blocks - len(named)

    def _whole(self, lease: ReferenceLease) -> int:
        return lease.num_committed // self.config.block_size

    # The verbs.

    def acquire(self, namespace: Namespace, tokens: list[int]) -> ReferenceLease:
        """Take the cached prefix, all but the last token at most, and fresh blocks for the rest."""
        hits = self.hits(namespace, tokens, len(tokens) - 1)
        lease = ReferenceLease(namespace, list(tokens), [self.cached[p] for p in hits])
        lease.num_committed = len(hits) * self.config.block_size
        lease.num_cached = self.agreed(namespace, tokens[:-1])
        self.leases.append(lease)  # it pins what it was given while room is made for the rest
        try:
            lease.blocks += self._take(self._num_blocks(len(tokens)) - len(hits), namespace)
        except NoRoom:
            self.leases.remove(lease)
            self._forget(namespace)
            raise
        self._use(hits)
        for prefix in hits:
            self.num_hits[prefix] += 1
        self._count(namespace, queries=1, query_tokens=len(tokens), hit_tokens=lease.num_cached)
        return lease

    def touch(self, namespace: Namespace, tokens: list[int]) -> int:
        """Use what is cached of the tokens; return how many those are."""
        hits = [] if namespace in self.raised else self.hits(namespace, tokens, len(tokens))
        self._use(hits)
        return len(hits) * self.config.block_size

    def append(self, lease: ReferenceLease, tokens: list[int]) -> list[int]:
        """Make room; return the slots to copy, for each copy owed (one at most)."""
        filled = len(lease.tokens) % self.config.block_size
        is_copied = bool(filled and tokens) and self.is_shared(lease.blocks[-1])
        needed = self._num_blocks(len(lease.tokens) + len(tokens)) - len(lease.blocks)
        fresh = self._take(needed + is_copied, lease.namespace)
        if is_copied:
            lease.blocks[-1] = fresh.pop()
        lease.blocks += fresh
        lease.tokens += tokens
        return [filled] if is_copied else []

    def commit(self, lease: ReferenceLease, num_tokens: int) -> tuple[int, int]:
        """Cache the whole blocks, or take over those that are cached; return (published, twins)."""
        published = twins = 0
        if not self.config.enable_prefix_cache:
            return 0, 0
        prefixes = self.prefixes(lease.namespace, lease.tokens, num_tokens)
        if len(prefixes) <= self._whole(lease) or lease.namespace in self.raised:
            return 0, 0
        for i in range(self._whole(lease), len(prefixes)):
            if prefixes[i] in self.cached:
                twins += lease.blocks[i] != self.cached[prefixes[i]]
                lease.blocks[i] = self.cached[prefixes[i]]
            else:
                published += 1
                self.cached[prefixes[i]] = lease.blocks[i]
                self.num_hits[prefixes[i]] = 0
        lease.num_committed = len(prefixes) * self.config.block_size
        self._use(prefixes)
        self._count(lease.namespace, published_blocks=published, twin_blocks=twins)
        return published, twins

    def truncate(self, lease: ReferenceLease, num_tokens: int) -> None:
        """Forget the tokens from `num_tokens` on, and the blocks that hold none of the rest."""
        del lease.tokens[num_tokens:]
        del lease.blocks[self._num_blocks(num_tokens) :]

    def fork(self, lease: ReferenceLease) -> ReferenceLease:
        """A second lease on the same blocks."""
        twin = ReferenceLease(lease.namespace, list(lease.tokens), list(lease.blocks))
        twin.num_cached, twin.num_committed = lease.num_cached, lease.num_committed
        self.leases.append(twin)
        return twin

    def release(self, lease: ReferenceLease) -> None:
        """Forget a lease."""
        self.leases.remove(lease)
        self._forget(lease.namespace)

    def evict(self, num_blocks: int, asking: Namespace | None = None) -> int:
        """Drop one prefix after another until so many blocks are free; return how many came."""
        before = self.num_free()
        while self.num_free() - before < num_blocks and (victim := self.victim(asking)):
            self._give_up(victim)
        return self.num_free() - before

    def set_quota(self, namespace: Namespace, quota: Quota | None) -> int:
        """Note a quota, and drop prefixes until its hard limit holds."""
        before = self.num_free()
        self.quotas.pop(namespace, None)
        if quota not in (None, Quota()):
            self.quotas[namespace] = quota
            self._keep_within_limit(namespace, 0)
        self._forget(namespace)
        return self.num_free() - before

    def raise_epoch(self, old: Namespace, new: Namespace) -> None:
        """Nothing of the old is found any more; its quota is the new one's."""
        self.raised.add(old)
        if old in self.quotas:
            self.quotas[new] = self.quotas.pop(old)
        self._forget(old)

    def drop(self, namespace: Namespace) -> int:
        """Drop every prefix of a namespace that no lease stands on; return how many came free."""
        before = self.num_free()
        for prefix in [p for p in self.evictable() if p[0] == namespace]:
            self._give_up(prefix)
        return self.num_free() - before

    def _take(self, needed: int, namespace: Namespace) -> list[int]:
        for is_first_look in (True, False) if needed else ():
            free, left = self.num_free(), self.left(namespace)
            evictable = self.num_evictable_by(namespace) if is_first_look else 0
            own = [p for p in self.evictable() if p[0] == namespace] if is_first_look else []
            if needed > free + evictable:
                self._count(namespace, out_of_blocks=1)
                raise NoRoom(needed, free, evictable)
            if left is not None and needed > left + len(own):
                self._count(namespace, out_of_blocks=1)
                raise NoRoom(needed, max(0, left), max(0, len(own) + min(0, left)))
            if is_first_look:
                self._keep_within_limit(namespace, needed)
                self.evict(needed - self.num_free(), namespace)
        return [next(self._names) for _ in range(needed)]

    def _keep_within_limit(self, namespace: Namespace, needed: int) -> None:
        """Drop the namespace's own prefixes until its limit allows for so many blocks more."""
        while (left := self.left(namespace)) is not None and left < needed:
            own = [prefix for prefix in self.victims() if prefix[0] == namespace]
            if not own:
                return
            self._give_up(own[0])

    def _give_up(self, prefix: Prefix) -> None:
        for table in (self.cached, self.used_at, self.num_hits):
            del table[prefix]
        self._count(prefix[0], evicted_blocks=1)
        self._forget(prefix[0])

    def _forget(self, namespace: Namespace) -> None:
        """Of a namespace that owns nothing, and has no quota, the counts are forgotten."""
        if not self.has_something(namespace):
            self.counts_of.pop(namespace, None)

    def has_something(self, namespace: Namespace) -> bool:
        """True where the namespace has a quota, a lease or a cached prefix."""
        spaces = {prefix[0] for prefix in self.cached} | {lease.namespace for lease in self.leases}
        return namespace in spaces | self.quotas.keys()

    def _num_blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.config.block_size - 1) // self.config.block_size

    def _use(self, prefixes: list[Prefix]) -> None:
        self._now += 1
        self.used_at.update(dict.fromkeys(prefixes, self._now))

    def _count(self, namespace: Namespace, **amounts: int) -> None:
        own = self.counts_of.setdefault(namespace, dict.fromkeys(COUNTED, 0))
        for name, amount in amounts.items():
            self.counts[name] += amount
            own[name] += amount

    def record(self) -> dict[str, int]:
        """What `CacheStats` must say, but for `num_nodes`: there are no nodes here."""
        free, pinned, evictable = self.num_free(), len(self.pinned()), len(self.evictable())
        return {
            "num_blocks": self.config.num_blocks,
            "num_free": free,
            "num_private": self.config.num_blocks - free - pinned - evictable,
            "num_pinned": pinned,
            "num_evictable": evictable,
            "num_leases": len(self.leases),
            "num_holds": 0,
            **self.counts,
        }

    def record_of(self, namespace: Namespace) -> dict[str, int | None]:
        """What `NamespaceStats` must say."""
        quota = self.quotas.get(namespace, Quota())
        pinned = sum(prefix[0] == namespace for prefix in self.pinned())
        evictable = sum(prefix[0] == namespace for prefix in self.evictable())
        return {
            "soft_limit": quota.soft_limit,
            "hard_limit": quota.hard_limit,
            "num_private": self.owned(namespace) - pinned - evictable,
            "num_pinned": pinned,
            "num_evictable": evictable,
            **self.counts_of.get(namespace, dict.fromkeys(COUNTED, 0)),
        }

    def compare(self, cache: RadixCache, pairs: list[tuple[Lease, ReferenceLease]]) -> None:
        """Raise Disagreement unless `cache`, and each lease with its counterpart, are as here."""
        view = cache.view()
        blocks, victims = self._read(view)
        stats, spaces = structs.asdict(cache.stats()), cache.namespaces()
        unknown = {"num_nodes": len(view.nodes), "trims": stats["trims"]}
        _agree("stats", stats, self.record() | unknown)
        known = {space for space in (*spaces, *self.counts_of) if self.has_something(space)}
        _agree("namespaces", spaces.keys(), known | self.quotas.keys())
        for space, numbers in spaces.items():
            expected = self.record_of(space) | {"trims": numbers.trims}
            _agree(f"stats of {space}", structs.asdict(numbers), expected)
        _agree("trims", sum(numbers.trims for numbers in spaces.values()) <= stats["trims"], True)
        _agree("cached prefixes", blocks.keys(), self.cached.keys())
        _agree("order of eviction", victims, self.victims())
        same = {(block, self.cached[prefix]) for prefix, block in blocks.items()}
        for lease, twin in pairs:
            _agree("tokens", unpack_tokens(lease.tokens), twin.tokens)
            counts = (lease.num_cached, lease.num_committed, len(lease.block_table))
            _agree("counts", counts, (twin.num_cached, twin.num_committed, len(twin.blocks)))
            same.update(zip(lease.block_table, twin.blocks, strict=True))
        ids, names = {block for block, _ in same}, {name for _, name in same}
        _agree("who shares which block", (len(ids), len(names)), (len(same), len(same)))

    def _read(self, view: TreeView) -> tuple[dict[Prefix, int], list[Prefix]]:
        """The block behind each prefix in the tree, and the evictable leaves in order."""
        paths: dict[int | None, list[int]] = {None: []}
        blocks: dict[Prefix, int] = {}
        victims: dict[int, Prefix] = {}
        for node in view.nodes:
            path = paths[node.node_id] = paths[node.parent] + unpack_tokens(node.tokens)
            prefixes = self.prefixes(node.namespace, path, len(path))[-len(node.block_ids) :]
            for prefix, block in zip(prefixes, node.block_ids, strict=True):
                blocks[prefix] = block
                if prefix in self.cached:
                    _agree("worth of a prefix", node.priority, self.priority(prefix))
            if node.evict_order is not None:
                victims[node.evict_order] = prefixes[-1]
        return blocks, [victims[place] for place in sorted(victims)]

    def priority(self, prefix: Prefix) -> int:
        """What a prefix is worth to an eviction policy that asks."""
        return 0


def _agree(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise Disagreement(f"{what}: {got}, but the reference says {expected}")


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    pairs = list(zip(left, right, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
