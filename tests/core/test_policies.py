"""Each policy's order of victims, on histories small enough to read."""

from __future__ import annotations

from itertools import count

import pytest

from radixcache import (
    FIFO,
    LRU,
    POLICIES,
    SLRU,
    CacheConfig,
    CostAware,
    EvictionPolicy,
    InvalidConfig,
    InvariantViolation,
    NodeFacts,
    PrefixKey,
    Priority,
    RadixCache,
)
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
    cache.check()


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


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_all_that_was_hit_too_seldom_goes_before_what_is_protected(threshold: int) -> None:
    cache = RadixCache(CacheConfig(num_blocks=32, block_size=1), policy=SLRU(threshold))
    hits = {10: 3, 20: 0, 30: 2, 40: 1, 50: 0}
    for token in hits:
        insert(cache, [token])
    for token in (10, 10, 10, 30, 30, 40):
        hit(cache, [token])
    last_use = [20, 50, 10, 30, 40]
    expected = sorted(last_use, key=lambda token: hits[token] >= threshold)  # stable: by age
    for place in range(5):
        assert survivors(cache, [[token] for token in expected]) == list(range(place, 5))
        assert cache.evict(1) == 1
    cache.check()


@pytest.mark.parametrize(("policy", "reverse"), [("fifo", False), ("lru", False), ("mru", True)])
def test_without_hits_age_decides_forwards_or_backwards(policy: str, reverse: bool) -> None:
    cache = cache_of(policy)
    tokens = [3, 1, 4, 2, 9]
    for token in tokens:
        insert(cache, [token])
    for token in sorted(tokens, key=tokens.index, reverse=reverse):
        assert cache.match(PrefixKey.of([token])).num_tokens == 1
        assert cache.evict(1) == 1
        assert cache.match(PrefixKey.of([token])).num_tokens == 0
    cache.check()


class Restless:
    """A policy that breaks its contract: a rank is another one each time."""

    by_recency = False

    def __init__(self) -> None:
        self._ranks = count()

    def rank(self, node: NodeFacts) -> int:
        return next(self._ranks)


class Moody:
    """A policy that breaks its contract: a rank depends on what is not the node's."""

    by_recency = False

    def __init__(self) -> None:
        self.is_reversed = False

    def rank(self, node: NodeFacts) -> int:
        return -node.last_access if self.is_reversed else node.last_access


@pytest.mark.parametrize("wrap", [lambda policy: policy, Priority], ids=["alone", "within"])
def test_a_rank_that_is_another_each_time_is_found_by_check(wrap) -> None:
    policy: EvictionPolicy = wrap(Restless())
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), policy=policy)
    insert(cache, [1])
    with pytest.raises(InvariantViolation, match=r"^I5: .* stale rank"):
        cache.check()


def test_a_rank_that_depends_on_something_outside_is_found_by_check() -> None:
    policy = Moody()
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), policy=policy)
    insert(cache, [1])
    insert(cache, [2])
    cache.check()
    policy.is_reversed = True
    with pytest.raises(InvariantViolation, match=r"^I5: .* stale rank"):
        cache.check()
    policy.is_reversed = False
    cache.check()


def test_every_policy_has_a_name() -> None:
    assert sorted(POLICIES) == ["adaptive", "cost", "fifo", "lfu", "lru", "mru", "priority", "slru"]


@pytest.mark.parametrize(
    "policy", [LRU, object(), POLICIES], ids=["a class", "an object", "a dict"]
)
def test_what_is_no_policy_is_refused_when_the_cache_is_built(policy) -> None:
    with pytest.raises(InvalidConfig):
        RadixCache(CacheConfig(num_blocks=4), policy=policy)
