"""What each namespace owns: a block counts once, and with the last one it is forgotten."""

from __future__ import annotations

from radixcache import DEFAULT_NAMESPACE, Namespace, Quota, pack_tokens
from tests.core.serving import acquire, insert
from tests.core.test_quotas import A, B, C, owns, refusal_of


def test_a_block_that_branches_share_counts_once(make_cache):
    cache = make_cache(16, 2)
    lease = acquire(cache, range(5), A)
    branch = cache.fork(lease)
    assert owns(cache, A) == (3, 0, 0)
    cache.append(branch, pack_tokens([9, 9]))  # its own copy of the part-full block, and one more
    assert owns(cache, A) == (5, 0, 0)
    cache.commit(lease, 4)
    assert owns(cache, A) == (3, 2, 0), "published ones count as the tree's, whoever else has them"
    cache.release(lease)
    assert owns(cache, A) == (2, 0, 2), "pinned by nobody: the branch holds them privately"
    cache.check()
    assert cache.evict(16) == 0
    assert owns(cache, A) == (4, 0, 0)
    cache.truncate(branch, 1)
    assert owns(cache, A) == (1, 0, 0)
    cache.release(branch)
    assert owns(cache, A) is None


def test_shared_blocks_that_do_not_come_free_are_no_room_within_the_limit(cache):
    cache.set_quota(A, Quota(hard_limit=4))
    lease = acquire(cache, [1, 2, 3], A)
    branch = cache.fork(lease)
    cache.commit(lease, 3)
    cache.release(lease)
    numbers, _ = refusal_of(acquire, cache, [7, 8], A)
    assert numbers == (2, 1, 0, Quota(hard_limit=4))
    assert owns(cache, A) == (3, 0, 0)
    assert cache.commit(branch, 3).num_published == 3


def test_twins_are_given_back_to_the_namespace(cache):
    cache.set_quota(A, Quota(hard_limit=6))
    first, second = acquire(cache, [1, 2, 3], A), acquire(cache, [1, 2, 3], A)
    assert owns(cache, A) == (6, 0, 0)
    cache.commit(first, 3)
    assert cache.commit(second, 3).num_twins == 3
    assert owns(cache, A) == (0, 3, 0)
    assert cache.namespaces()[A].twin_blocks == 3
    cache.append(second, pack_tokens([4, 5, 6]))
    assert refusal_of(cache.append, second, pack_tokens([7]))[0] == (1, 0, 0, Quota(hard_limit=6))
    cache.truncate(second, 4)
    assert owns(cache, A) == (1, 3, 0)


def test_the_numbers_of_all_namespaces_add_up_to_those_of_the_cache(cache):
    cache.set_quota(A, Quota(soft_limit=4))
    insert(cache, range(6), A)
    lease = acquire(cache, [0, 1, 9], A)
    insert(cache, range(8), B)
    acquire(cache, [5, 6], C)
    total, parts = cache.stats(), cache.namespaces().values()
    for name in ("num_private", "num_pinned", "num_evictable", "queries", "hit_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(total, name)
    assert sum(part.evicted_blocks for part in parts) == total.evicted_blocks
    cache.release(lease)


def test_a_namespace_that_owns_nothing_is_forgotten(cache):
    insert(cache, [1], DEFAULT_NAMESPACE)
    for number in range(1000):
        insert(cache, [1, 2, 3], Namespace(salt=str(number)))
        assert len(cache.namespaces()) <= 16 // 3 + 1
    for number in range(1000):
        cache.set_quota(Namespace(salt=str(number)), Quota(hard_limit=3))
        cache.set_quota(Namespace(salt=str(number)), None)
    cache.evict(16)
    assert cache.namespaces() == {}
    assert cache.accounts.by_namespace == {}
    assert not cache.accounts._touched


def test_with_a_quota_a_namespace_is_remembered_though_it_owns_nothing(cache):
    cache.set_quota(A, Quota(soft_limit=2))
    assert owns(cache, A) == (0, 0, 0)
    insert(cache, [1, 2], A)
    cache.drop(A)
    assert cache.namespaces()[A].evicted_blocks == 2
