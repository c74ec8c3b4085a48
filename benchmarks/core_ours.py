"""radixcache behind the verbs that bench_core.py measures.

build      an empty cache                  begin    pin what is cached, take blocks for the rest
found      tokens it found; in whole blocks publish  its tokens, or the first `end`, are computed
run_of     ids as a request keeps them
head       the first of such a run         extend   more tokens of the same request
key        what `match` takes              end      publish what is not yet, and let go
match      look up; tokens found           evict    give up blocks, the oldest first
"""

from __future__ import annotations

from typing import Any


class Ours:
    """radixcache.  A request keeps its ids packed."""

    name = "radixcache"
    by_turns = True
    token_bytes = 4

    def build(self, block_size: int, num_blocks: int, policy: str = "lru") -> None:
        import radixcache

        policies = getattr(radixcache, "POLICIES", {"lru": radixcache.LRU})
        self.cache = radixcache.RadixCache(
            radixcache.CacheConfig(num_blocks=num_blocks, block_size=block_size),
            policy=policies[policy](),
        )
        if hasattr(self.cache, "match_len"):
            self.match_len = lambda key: self.cache.match_len(key)
        self.new_key, self.namespace = radixcache.PrefixKey, radixcache.DEFAULT_NAMESPACE

    def run_of(self, ids: Any) -> Any:
        return ids.tobytes()

    def head(self, run: Any, num_tokens: int) -> Any:
        return run[: 4 * num_tokens]

    def key_of_list(self, ids: list[int]) -> Any:
        return self.new_key.of(ids)

    def key(self, run: Any) -> Any:
        return self.new_key(self.namespace, run)

    def match(self, key: Any) -> int:
        return self.cache.match(key).num_tokens

    def begin(self, run: Any) -> Any:
        return self.cache.acquire(self.new_key(self.namespace, run))

    def found(self, lease: Any) -> tuple[int, int]:
        return lease.num_cached, lease.num_committed

    def publish(self, lease: Any, end: int | None = None) -> None:
        self.cache.commit(lease, lease.num_tokens if end is None else end)

    def extend(self, lease: Any, run: Any) -> None:
        self.cache.append(lease, run)

    def end(self, lease: Any) -> None:
        if lease.num_committed < lease.num_tokens:
            self.cache.commit(lease, lease.num_tokens)
        self.cache.release(lease)

    def evict(self, num_blocks: int) -> None:
        self.cache.evict(num_blocks)

    def num_cached_tokens(self) -> int:
        stats = self.cache.stats()
        return (stats.num_evictable + stats.num_pinned) * self.cache.config.block_size
