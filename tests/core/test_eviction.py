"""Eviction: which blocks go, in which order, and what it costs."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from radixcache import (
    CacheConfig,
    EvictionPolicy,
    InvariantViolation,
    NodeFacts,
    OutOfBlocks,
    RadixCache,
)
from radixcache.eviction import EvictionIndex
from radixcache.policy import LRU
from tests.core.serving import acquire, insert, match, num_owned


def test_an_empty_cache_evicts_nothing(cache):
    assert cache.evict(5) == 0
    assert cache.evict(0) == 0


def test_eviction_frees_as_many_blocks_as_it_reports(cache):
    insert(cache, [1, 2])
    insert(cache, [3, 4])
    assert cache.evict(2) == 2
    assert num_owned(cache) == 2
    assert cache.stats().num_free == 14


def test_a_chain_is_evicted_from_its_end(cache):
    for end in (2, 4, 6):
        insert(cache, range(end))
    for left in (4, 2, 0):
        assert cache.evict(2) == 2
        assert match(cache, range(6)).num_tokens == left


def test_the_output_of_a_request_goes_before_its_prompt(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, range(12))
    cache.commit(lease, 12)
    cache.append(lease, b"".join(n.to_bytes(4, sys.byteorder) for n in range(12, 16)))
    cache.commit(lease, 16)
    cache.release(lease)
    assert cache.evict(1) == 1
    assert match(cache, range(16)).num_tokens == 12


def test_a_long_leaf_loses_only_the_tail_that_is_needed(make_cache):
    cache = make_cache(num_blocks=100)
    served = insert(cache, range(100))
    assert cache.evict(1) == 1
    assert match(cache, range(100)).block_ids == served.block_ids[:99]
    insert(cache, range(100))
    assert match(cache, range(100)).num_tokens == 100


def test_after_evicting_everything_the_pool_is_whole(cache):
    for prompt in ([1, 2, 3], [1, 2, 4], [5], [1]):
        insert(cache, prompt)
    assert cache.evict(99) == 5
    assert (cache.stats().num_nodes, num_owned(cache)) == (0, 0)
    assert sorted(cache.pool.free_ids()) == list(range(16))
    assert cache.tree.roots == {}


def test_the_least_recently_used_leaf_goes_first(cache):
    for token in (1, 2, 3):
        insert(cache, [token])
    insert(cache, [1, 8])  # uses [1] again
    assert cache.evict(1) == 1
    assert match(cache, [2]).num_tokens == 0
    assert cache.evict(1) == 1
    assert match(cache, [3]).num_tokens == 0
    assert match(cache, [1, 8]).num_tokens == 2


def test_a_prefix_that_was_only_acquired_counts_as_used(cache):
    insert(cache, [1])
    insert(cache, [2])
    cache.release(acquire(cache, [1, 9]))
    cache.evict(1)
    assert match(cache, [1]).num_tokens == 1
    assert match(cache, [2]).num_tokens == 0


def test_a_parent_is_as_recent_as_the_last_use_of_its_evicted_child(cache):
    insert(cache, [1, 2])
    cache.release(acquire(cache, [1, 9]))  # cuts the edge: [1] and [2] are two nodes
    held = acquire(cache, [5])
    cache.commit(held, 1)
    cache.release(acquire(cache, [1, 2, 9]))  # passes over [1], ends at [1, 2]
    assert cache.evict(1) == 1  # [1, 2]: [5] is older, but pinned
    cache.release(held)
    assert cache.evict(1) == 1
    assert match(cache, [5]).num_tokens == 0, "[5] was used before [1, 2], so before [1]"
    assert match(cache, [1]).num_tokens == 1


def test_room_is_made_without_evicting_more_than_is_needed(make_cache):
    cache = make_cache(num_blocks=6)
    insert(cache, [1, 2, 3, 4])
    acquire(cache, [5, 6, 7])
    assert match(cache, [1, 2, 3, 4]).num_tokens == 3


def test_room_is_not_made_from_the_prefix_that_was_just_found(make_cache):
    cache = make_cache(num_blocks=4)
    insert(cache, [1, 2, 3])
    with pytest.raises(OutOfBlocks) as refusal:
        acquire(cache, [1, 2, 3, 4, 5])
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (2, 1, 0)
    assert match(cache, [1, 2, 3]).num_tokens == 3, "a refused call evicts nothing"


def test_a_refused_acquire_takes_no_lease_no_pin_and_no_block(make_cache):
    cache = make_cache(num_blocks=4)
    insert(cache, [1, 2])
    before = cache.stats()
    with pytest.raises(OutOfBlocks):
        acquire(cache, [1, 2, 3, 4, 5])
    after = cache.stats()
    assert (after.num_free, after.num_pinned, after.num_leases) == (2, 0, 0)
    assert after.out_of_blocks == before.out_of_blocks + 1
    assert after.queries == before.queries


def test_blocks_that_a_branch_still_holds_are_evicted_but_do_not_come_free(make_cache):
    cache = make_cache(num_blocks=4)
    lease = acquire(cache, [1, 2, 3])
    branch = cache.fork(lease)
    cache.commit(lease, 3)
    cache.release(lease)
    with pytest.raises(OutOfBlocks) as refusal:
        acquire(cache, [7, 8])  # looks possible: three blocks are evictable
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (2, 1, 0)
    assert match(cache, [1, 2, 3]).num_tokens == 0
    assert cache.commit(branch, 3).num_published == 3, "the branch can still publish them"


def calls_to_evict_one_block(num_leaves: int) -> Counter[str]:
    """How often each function runs while one block of so many leaves is evicted."""
    cache = RadixCache(CacheConfig(num_blocks=num_leaves, block_size=1))
    for token in range(num_leaves):
        insert(cache, [token])
    calls: Counter[str] = Counter()

    def count(frame, event, function):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[function.__qualname__] += 1

    sys.setprofile(count)
    try:
        cache.evict(1)
    finally:
        sys.setprofile(None)
    return calls


def test_evicting_a_block_takes_the_same_steps_among_few_leaves_and_many():
    few, many = calls_to_evict_one_block(50), calls_to_evict_one_block(5000)
    assert few["EvictionIndex.remove"] == 1
    assert sum(many.values()) <= sum(few.values()) + 5  # the sorted set may look at one list more
    assert not {"sorted", "list.sort", "heapify"} & many.keys()


class NewestFirst:
    """A policy of a caller's own: the youngest node goes first."""

    by_recency = False

    def rank(self, node: NodeFacts) -> int:
        return -node.node_id


def test_a_policy_of_the_caller_decides_the_order():
    policy: EvictionPolicy = NewestFirst()
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), policy=policy)
    for token in (1, 2, 3):
        insert(cache, [token])
    assert cache.evict(1) == 1
    assert match(cache, [3]).num_tokens == 0
    assert [node.evict_order for node in cache.view().nodes] == [1, 0]
    cache.check()


def test_the_index_refuses_a_leaf_that_is_in_twice_or_not_at_all(cache):
    insert(cache, [1])
    leaf = cache.accounts.index.first()[2]
    with pytest.raises(InvariantViolation, match="twice"):
        cache.accounts.index.add(leaf)
    index = EvictionIndex(LRU())
    assert index.first() is None
    assert leaf not in index
    with pytest.raises(InvariantViolation, match="not in the eviction index"):
        index.remove(leaf)
