"""Abandoned branches: what nobody comes back to goes first, and what others use does not."""

from __future__ import annotations

import pytest

from radixcache import (
    POLICIES,
    CacheConfig,
    Namespace,
    PrefixKey,
    Quota,
    RadixCache,
    Retention,
)
from tests.core.serving import acquire, insert, match

A = Namespace(salt="a")


def abandon(cache, token_ids, start=0, namespace=None):
    key = PrefixKey.of(list(token_ids), *([namespace] if namespace else []))
    return cache.abandon(key, start=start)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_abandoned_branch_goes_before_all_others_whatever_the_policy_is(policy):
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=1), policy=POLICIES[policy]())
    for token in range(4):
        insert(cache, [token, token])
    for _ in range(3):
        insert(cache, [2, 2, 7])
    assert abandon(cache, [2, 2]) == 0  # a longer prompt goes on from there
    assert abandon(cache, [2, 2, 7]) == 3
    cache.check()
    assert cache.evict(3) == 3
    assert [match(cache, [token, token]).num_tokens for token in range(4)] == [2, 2, 0, 2]
    cache.check()


def test_what_another_branch_goes_on_from_stays(cache):
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5])
    insert(cache, [8])
    assert abandon(cache, [1, 2, 3, 4]) == 2
    assert cache.evict(2) == 2
    assert match(cache, [1, 2, 5]).num_tokens == 3
    assert match(cache, [8]).num_tokens == 1


def test_a_place_that_two_branches_came_through_keeps_its_worth_when_both_are_gone(cache):
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    insert(cache, [8])
    assert abandon(cache, [1, 2, 3]) == abandon(cache, [1, 2, 4]) == 1
    cache.evict(2)
    insert(cache, [1, 2])
    assert cache.evict(1) == 1
    assert match(cache, [1, 2]).num_tokens == 2
    assert match(cache, [8]).num_tokens == 0


def test_a_parent_is_abandoned_with_its_branches_once_all_of_them_are(cache):
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    assert abandon(cache, [1, 2]) == 0
    abandon(cache, [1, 2, 3])
    assert abandon(cache, [1, 2]) == 0
    abandon(cache, [1, 2, 4])
    assert abandon(cache, [1, 2]) == 2
    assert abandon(cache, [1, 2]) == 0  # once is enough


def test_tokens_before_the_start_are_left_alone(cache):
    insert(cache, [1, 2, 3])
    assert abandon(cache, [1, 2, 3], start=2) == 1
    assert cache.evict(1) == 1
    assert match(cache, [1, 2, 3]).num_tokens == 2


def test_tokens_before_the_start_are_left_alone_in_whole_blocks(make_cache):
    cache = make_cache(16, 2)
    insert(cache, range(8))
    insert(cache, [9, 9])
    assert abandon(cache, range(8), start=3) == 2
    assert cache.evict(2) == 2
    assert match(cache, range(8)).num_tokens == 4
    assert match(cache, [9, 9]).num_tokens == 2
    assert abandon(cache, range(8), start=4) == 0


def test_what_somebody_stands_on_is_not_abandoned(cache):
    insert(cache, [1, 2, 3])
    lease = acquire(cache, [1, 2, 3, 4])
    assert abandon(cache, [1, 2, 3]) == 0
    cache.release(lease)
    hold = cache.retain(PrefixKey.of([1, 2, 3]))
    assert abandon(cache, [1, 2, 3]) == 0
    cache.end_hold(hold)
    assert abandon(cache, [1, 2, 3]) == 3


def test_who_comes_back_after_all_takes_it_back(cache):
    insert(cache, [1, 2, 3])
    insert(cache, [8])
    for come_back in (
        lambda: insert(cache, [1, 2, 3]),
        lambda: cache.touch(PrefixKey.of([1, 2, 3])),
        lambda: cache.end_hold(cache.retain(PrefixKey.of([1, 2, 3]))),
    ):
        assert abandon(cache, [1, 2, 3]) == 3
        come_back()
        cache.check()
    insert(cache, [1, 2, 3])
    cache.evict(1)
    assert match(cache, [8]).num_tokens == 0
    assert match(cache, [1, 2, 3]).num_tokens == 3


def test_who_comes_back_to_the_begin_takes_only_that_back(cache):
    insert(cache, [1, 2, 3, 4])
    insert(cache, [8])
    assert abandon(cache, [1, 2, 3, 4]) == 4
    insert(cache, [1, 2])
    cache.check()
    assert cache.evict(3) == 3
    assert match(cache, [1, 2, 3]).num_tokens == 2


def test_of_several_the_one_used_longest_ago_goes_first(cache):
    for token in (1, 2, 3):
        insert(cache, [token, 5])
    for token in (3, 1, 2):
        abandon(cache, [token, 5])
    for token in (1, 2, 3):
        assert match(cache, [token, 5]).num_tokens == 2
        cache.evict(2)
        assert match(cache, [token, 5]).num_tokens == 0


def test_a_priority_does_not_save_what_is_abandoned(make_cache):
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), policy=POLICIES["priority"]())
    lease = cache.acquire(PrefixKey.of([1, 2]), retentions=[Retention(priority=9)])
    cache.commit(lease, 2)
    cache.release(lease)
    insert(cache, [3])
    abandon(cache, [1, 2])
    cache.evict(2)
    assert match(cache, [3]).num_tokens == 1
    cache.check()


def test_within_a_share_an_abandoned_branch_is_guarded_like_any_other(make_cache):
    cache = make_cache(6)
    cache.set_quota(A, Quota(soft_limit=2))
    insert(cache, [1, 2], A)
    insert(cache, [3, 4, 5, 6])
    assert abandon(cache, [1, 2], namespace=A) == 2
    insert(cache, [7, 8])
    assert match(cache, [1, 2], A).num_tokens == 2
    insert(cache, [9, 9], A)  # its own request takes it
    assert match(cache, [1, 2], A).num_tokens == 0


def test_beyond_a_share_an_abandoned_branch_goes_before_what_others_used_longer_ago(make_cache):
    cache = make_cache(6)
    insert(cache, [3, 4])
    cache.set_quota(A, Quota())
    insert(cache, [1, 2], A)
    abandon(cache, [1, 2], namespace=A)
    cache.evict(2)
    assert match(cache, [3, 4]).num_tokens == 2
    assert match(cache, [1, 2], A).num_tokens == 0


def test_nothing_is_abandoned_of_what_is_not_cached(cache):
    assert abandon(cache, [1, 2]) == abandon(cache, []) == 0
    insert(cache, [3])
    assert abandon(cache, [1]) == abandon(cache, [3], start=1) == abandon(cache, [], start=2) == 0
