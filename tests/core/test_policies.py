"""Each policy's order of victims, on histories small enough to read."""

from __future__ import annotations

import pytest

from radixcache import FIFO, POLICIES, CacheConfig, CostAware, PrefixKey, RadixCache
from tests.core.serving import acquire, insert


def cache_of(policy: str, *, num_blocks: int = 32, block_size: int = 1) -> RadixCache:
    return RadixCache(
        CacheConfig(num_blocks=num_blocks, block_size=block_size), policy=POLICIES[policy]()
    )


def hit(cache: RadixCache, tokens: list[int]) -> None:
    """Ask for more than the tokens, so that all of them are found; publish nothing."""
    lease = acquire(cache, [*tokens, 99])
    assert lease.num_cached == len(tokens)
    cache.release(lease)


def survivors(cache: RadixCache, entries: list[list[int]]) -> list[int]:
    """Which entries are still whole."""
    whole = [cache.match(PrefixKey.of(entry)).num_tokens == len(entry) for entry in entries]
    return [place for place, found in enumerate(whole) if found]


# Entries 0 to 3, published in order; hits: entry 0 three times, entry 2 once, in that order.
ENTRIES = [[10, 11], [20, 21], [30, 31], [40, 41]]
VICTIMS = {
    "lru": [1, 3, 0, 2],
    "mru": [2, 0, 3, 1],
    "fifo": [0, 1, 2, 3],
    "lfu": [1, 3, 2, 0],
    "slru": [1, 3, 2, 0],
}


@pytest.mark.parametrize("policy", VICTIMS)
def test_victims_come_in_the_policys_order(policy: str) -> None:
    cache = cache_of(policy)
    for entry in ENTRIES:
        insert(cache, entry)
    for which in (0, 0, 0, 2):
        hit(cache, ENTRIES[which])
    left = [0, 1, 2, 3]
    for victim in VICTIMS[policy]:
        assert cache.evict(2) == 2
        left.remove(victim)
        assert survivors(cache, ENTRIES) == left
        cache.check()


def test_a_hit_counts_once_however_many_chunks_are_published() -> None:
    cache = cache_of("lfu")
    insert(cache, [10, 11])
    lease = acquire(cache, [20, 21, 22, 23])
    for computed in (1, 2, 3, 4):
        cache.commit(lease, computed)
    cache.release(lease)
    hit(cache, [10, 11])
    cache.evict(1)
    assert survivors(cache, [[10, 11], [20, 21, 22]]) == [0, 1]
    cache.check()


def test_what_grows_behind_a_hit_has_hits_of_its_own() -> None:
    cache = cache_of("lfu")
    insert(cache, [10, 11])
    lease = acquire(cache, [10, 11, 12, 13])
    cache.commit(lease, 4)
    cache.release(lease)
    insert(cache, [20, 21])
    cache.evict(2)  # 12 and 13 were never found, and are the older of two such
    assert survivors(cache, [[10, 11], [20, 21]]) == [0, 1]
    assert cache.match(PrefixKey.of([10, 11, 12, 13])).num_tokens == 2
    cache.check()


def test_a_prefix_is_as_often_hit_as_all_that_went_through_it() -> None:
    cache = cache_of("lfu")
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    insert(cache, [7, 8])
    hit(cache, [7, 8])
    hit(cache, [1, 2, 3])
    hit(cache, [1, 2, 4])
    cache.evict(4)  # all that was hit once: [7, 8] first, then the ends of both branches
    assert survivors(cache, [[7, 8], [1, 2, 3], [1, 2, 4], [1, 2]]) == [3]
    cache.check()


def test_fifo_does_not_care_for_use() -> None:
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), policy=FIFO())
    for entry in ([1], [2], [3]):
        insert(cache, entry)
    for _ in range(5):
        hit(cache, [1])
    cache.evict(1)
    assert survivors(cache, [[1], [2], [3]]) == [1, 2]


def test_a_deep_block_outlives_a_shallow_one_by_what_it_costs() -> None:
    policy = CostAware(attention_len=4, weight=2.0)
    cache = RadixCache(CacheConfig(num_blocks=32, block_size=1), policy=policy)
    insert(cache, range(8))  # its end costs 3, and its last access is older
    insert(cache, [50])
    cache.evict(1)
    assert survivors(cache, [list(range(8)), [50]]) == [0]
    for entry in range(60, 70):
        insert(cache, [entry])
    cache.evict(1)  # long enough ago
    assert cache.match(PrefixKey.of(list(range(8)))).num_tokens == 7
    cache.check()


def test_every_policy_has_a_name() -> None:
    assert sorted(POLICIES) == ["cost", "fifo", "lfu", "lru", "mru", "priority", "slru"]
