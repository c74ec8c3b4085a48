"""Quotas: a share that nobody else evicts, and a limit that a namespace keeps by itself."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from radixcache import (
    CacheConfig,
    CacheError,
    InvalidConfig,
    Namespace,
    OutOfBlocks,
    Quota,
    RadixCache,
    StaleEpoch,
    dump_tree,
    load_tree,
    pack_tokens,
)
from tests.core.serving import acquire, insert, match, num_owned

A, B, C = Namespace(salt="a"), Namespace(salt="b"), Namespace(salt="c")


def owns(cache, namespace):
    """(private, pinned, evictable) blocks of a namespace; None where it is forgotten."""
    numbers = cache.namespaces().get(namespace)
    return numbers and (numbers.num_private, numbers.num_pinned, numbers.num_evictable)


def refusal_of(call, *args):
    """(needed, free, evictable, quota) of the OutOfBlocks that a call raises, and its text."""
    with pytest.raises(OutOfBlocks) as refusal:
        call(*args)
    error = refusal.value
    return (error.needed, error.free, error.evictable, error.quota), str(error)


# --- the share


@pytest.mark.parametrize("guarded", [0, 1, 3, 5])
def test_others_leave_what_is_within_a_share_and_take_what_is_beyond(cache, guarded):
    cache.set_quota(A, Quota(soft_limit=guarded))
    insert(cache, range(5), A)
    insert(cache, range(100, 116 - guarded), B)
    assert match(cache, range(5), A).num_tokens == guarded
    assert num_owned(cache) == 16
    assert owns(cache, B) == (0, 0, 16 - guarded)


def test_a_call_that_only_a_share_could_serve_is_refused_and_changes_nothing(cache):
    cache.set_quota(A, Quota(soft_limit=5))
    insert(cache, range(5), A)
    before = cache.view()
    numbers, text = refusal_of(acquire, cache, range(100, 112), B)
    assert numbers == (12, 11, 0, None)
    assert "release a lease or use a larger pool" in text
    assert cache.view() == before
    assert cache.stats().out_of_blocks == 1


def test_a_share_that_is_exceeded_counts_as_room_down_to_the_share(cache):
    cache.set_quota(A, Quota(soft_limit=4))
    insert(cache, range(10), A)
    numbers, _ = refusal_of(acquire, cache, range(100, 113), B)
    assert numbers == (13, 6, 6, None)
    assert acquire(cache, range(100, 112), B).num_tokens == 12
    assert match(cache, range(10), A).num_tokens == 4


def test_private_and_pinned_blocks_count_for_the_share_so_cached_ones_go_first(cache):
    cache.set_quota(A, Quota(soft_limit=4))
    insert(cache, range(3), A)
    running = acquire(cache, range(50, 54), A)
    insert(cache, range(100, 112), B)
    assert match(cache, range(3), A).num_tokens == 0, "the four of the lease are the whole share"
    assert owns(cache, A) == (4, 0, 0)
    cache.commit(running, 2)
    cache.release(running)
    assert owns(cache, A) == (0, 0, 2)
    insert(cache, range(200, 214), B)
    assert owns(cache, A) == (0, 0, 2), "now it owns less than its share"


def test_a_namespace_evicts_within_its_own_share(cache):
    cache.set_quota(A, Quota(soft_limit=16))
    insert(cache, range(16), A)
    insert(cache, range(100, 110), A)
    assert match(cache, range(16), A).num_tokens == 6
    assert match(cache, range(100, 110), A).num_tokens == 10


def test_nobodys_eviction_leaves_shares_alone_and_drop_takes_them(cache):
    cache.set_quota(A, Quota(soft_limit=3))
    insert(cache, range(5), A)
    insert(cache, range(100, 102), B)
    assert cache.evict(16) == 4
    assert owns(cache, A) == (0, 0, 3)
    assert cache.drop(A) == 3
    assert owns(cache, A) == (0, 0, 0)


def test_a_flood_of_one_tenant_does_not_reach_the_working_set_of_another(make_cache):
    cache = make_cache(num_blocks=32)
    cache.set_quota(A, Quota(soft_limit=12))
    working_set = [[n, n + 1, n + 2] for n in (10, 20, 30, 40)]
    for prompt in working_set:
        insert(cache, prompt, A)
    for flood in range(60):
        insert(cache, [1000 + flood, *range(flood % 17)], B)
        assert all(match(cache, prompt, A).num_tokens == 3 for prompt in working_set)
        cache.check()
    assert owns(cache, A) == (0, 0, 12)
    assert cache.namespaces()[A].evicted_blocks == 0


def test_a_flood_that_holds_on_to_its_blocks_is_refused_before_the_share_is_touched(make_cache):
    cache = make_cache(num_blocks=32)
    cache.set_quota(A, Quota(soft_limit=6))
    insert(cache, range(6), A)
    for flood in range(5):
        lease = acquire(cache, [1000 + flood, *range(4)], B if flood % 2 else C)
        cache.commit(lease, flood)  # some pinned, the rest private
    for flood in range(15):
        numbers, _ = refusal_of(acquire, cache, [2000 + flood, *range(4)], B if flood % 2 else C)
        assert numbers == (5, 1, 0, None)
    assert match(cache, range(6), A).num_tokens == 6
    assert cache.namespaces()[A].evicted_blocks == 0
    assert owns(cache, A) == (0, 0, 6)


def test_of_two_namespaces_over_their_shares_the_policys_first_leaf_goes(cache):
    cache.set_quota(A, Quota(soft_limit=1))
    cache.set_quota(B, Quota(soft_limit=1))
    for prompt, namespace in ([[1], A], [[2], B], [[3], A], [[4], B], [[5], C]):
        insert(cache, prompt, namespace)
    gone = []
    for _ in range(3):
        assert cache.evict(1) == 1
        for token, namespace in ((1, A), (2, B), (3, A), (4, B), (5, C)):
            if token not in gone and not match(cache, [token], namespace).num_tokens:
                gone.append(token)
    assert gone == [1, 2, 5]
    assert cache.evict(1) == 0


# --- the limit


def test_a_namespace_makes_room_for_itself_within_its_limit(cache):
    cache.set_quota(A, Quota(hard_limit=4))
    insert(cache, [1, 2, 3], A)
    insert(cache, [100, 101], B)
    insert(cache, [7, 8], A)
    assert match(cache, [1, 2, 3], A).num_tokens == 2
    assert match(cache, [7, 8], A).num_tokens == 2
    assert owns(cache, A) == (0, 0, 4)
    assert owns(cache, B) == (0, 0, 2), "nobody else pays, and the pool has room"


def test_beyond_its_limit_a_namespace_is_refused_and_told_what_to_do(cache):
    quota = Quota(soft_limit=1, hard_limit=4)
    cache.set_quota(A, quota)
    insert(cache, [1, 2], A)
    running = acquire(cache, [7], A)
    before = cache.view()
    numbers, text = refusal_of(acquire, cache, range(20, 24), A)
    assert numbers == (4, 1, 2, quota)
    assert "release a lease of this namespace or raise its hard limit" in text
    assert cache.view() == before
    numbers, _ = refusal_of(cache.append, running, pack_tokens(range(4)))
    assert numbers == (4, 1, 2, quota)
    assert running.num_tokens == 1
    assert cache.namespaces()[A].out_of_blocks == cache.stats().out_of_blocks == 2
    cache.append(running, pack_tokens(range(3)))
    assert owns(cache, A) == (4, 0, 0)


def test_the_prefix_that_was_found_is_no_room_within_the_limit(cache):
    cache.set_quota(A, Quota(hard_limit=3))
    insert(cache, [1, 2, 3], A)
    numbers, _ = refusal_of(acquire, cache, [1, 2, 3, 4], A)
    assert numbers == (1, 0, 0, Quota(hard_limit=3))
    assert acquire(cache, [1, 2, 9], A).num_cached == 2
    assert match(cache, [1, 2, 3], A).num_tokens == 2


def test_where_the_pool_is_what_is_too_small_the_refusal_names_no_quota(cache):
    cache.set_quota(A, Quota(hard_limit=16))
    acquire(cache, range(10), B)
    numbers, _ = refusal_of(acquire, cache, range(7), A)
    assert numbers == (7, 6, 0, None)


def test_a_limit_of_nothing_refuses_all_but_an_empty_prompt(cache):
    cache.set_quota(A, Quota(hard_limit=0))
    numbers, _ = refusal_of(acquire, cache, [1], A)
    assert numbers == (1, 0, 0, Quota(hard_limit=0))
    empty = acquire(cache, [], A)
    cache.release(empty)
    assert owns(cache, A) == (0, 0, 0)


def test_a_lowered_limit_evicts_at_once_what_nobody_stands_on(cache):
    insert(cache, range(6), A)
    running = acquire(cache, [0, 1, 2, 50], A)
    assert cache.set_quota(A, Quota(hard_limit=5)) == 2
    assert match(cache, range(6), A).num_tokens == 4
    assert cache.set_quota(A, Quota(hard_limit=1)) == 1
    assert owns(cache, A) == (1, 3, 0), "what a lease holds stays"
    cache.release(running)
    assert cache.set_quota(A, Quota(hard_limit=1)) == 2
    assert owns(cache, A) == (0, 0, 1)


@pytest.mark.parametrize("block_size", [1, 4])
def test_what_is_cached_beyond_a_lowered_limit_still_serves_when_its_end_is_needed(
    make_cache, block_size
):
    cache = make_cache(16, block_size)
    prompt = list(range(4 * block_size))
    insert(cache, prompt, A)
    running = acquire(cache, [*prompt, 99], A)
    quota = Quota(hard_limit=2)
    cache.set_quota(A, quota)
    numbers, _ = refusal_of(acquire, cache, prompt, A)  # its last token has to be computed
    assert numbers == (1, 0, 0, quota)
    assert cache.fork(running).num_cached == 4 * block_size, "a fork takes no block"
    assert owns(cache, A) == (1, 4, 0)
    assert match(cache, prompt, A).num_tokens == 4 * block_size


def test_a_quota_that_is_taken_back_guards_and_limits_no_more(cache):
    cache.set_quota(A, Quota(soft_limit=4, hard_limit=4))
    insert(cache, range(4), A)
    assert cache.set_quota(A, None) == 0
    assert cache.namespaces()[A].hard_limit is None
    insert(cache, range(50, 54), A)
    assert owns(cache, A) == (0, 0, 8)
    assert cache.evict(16) == 8
    assert cache.namespaces() == {}


def test_a_quota_given_again_counts_from_what_is_owned_by_then(cache):
    cache.set_quota(A, Quota(soft_limit=4))
    cache.set_quota(A, None)
    insert(cache, range(6), A)
    cache.set_quota(A, Quota(soft_limit=2))
    assert cache.evict(16) == 4
    assert owns(cache, A) == (0, 0, 2)


# --- what is refused


@pytest.mark.parametrize(
    "limits",
    [
        {"soft_limit": True},
        {"soft_limit": 1.0},
        {"soft_limit": -1},
        {"soft_limit": None},
        {"soft_limit": "1"},
        {"hard_limit": False},
        {"hard_limit": 2.5},
        {"hard_limit": -1},
        {"soft_limit": 3, "hard_limit": 2},
    ],
)
def test_a_quota_of_anything_but_counts_in_order_is_refused(limits):
    with pytest.raises(InvalidConfig):
        Quota(**limits)
    with pytest.raises((InvalidConfig, msgspec.ValidationError)):
        msgspec.json.decode(msgspec.json.encode(limits), type=Quota)


def test_a_quota_has_no_other_fields():
    with pytest.raises(TypeError):
        Quota(soft=3)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"soft": 3}', type=Quota)


def test_shares_that_together_exceed_the_pool_are_refused_and_nothing_changes(cache):
    cache.set_quota(A, Quota(soft_limit=10))
    insert(cache, [1, 2], B)
    before = (cache.namespaces(), cache.view())
    for namespace, share in ((B, 7), (C, 7), (A, 17), (A, 10**40)):
        with pytest.raises(InvalidConfig, match="more than the pool's 16"):
            cache.set_quota(namespace, Quota(soft_limit=share))
        assert (cache.namespaces(), cache.view()) == before
        cache.check()
    cache.set_quota(B, Quota(soft_limit=6))
    cache.set_quota(A, Quota(soft_limit=3))
    cache.set_quota(B, Quota(soft_limit=13))


@pytest.mark.parametrize("quota", [0, {}, ""], ids=repr)
def test_what_is_no_quota_is_refused_or_at_least_does_no_harm(make_cache, quota):
    """The leaves went to an index that no eviction looks into: lost room that check() can't see."""
    cache = make_cache()
    insert(cache, [1, 2], A)
    with contextlib.suppress(TypeError, InvalidConfig):
        cache.set_quota(A, quota)
    assert cache.evict(16) == 2


# --- epochs


def test_the_next_epoch_takes_the_quota_over_and_the_old_one_is_guarded_no_more(cache):
    quota = Quota(soft_limit=4, hard_limit=5)
    cache.set_quota(A, quota)
    insert(cache, range(4), A)
    following = cache.raise_epoch(A)
    assert owns(cache, A) == (0, 0, 4)
    assert cache.namespaces()[following].hard_limit == 5
    with pytest.raises(StaleEpoch):
        cache.set_quota(A, None)
    insert(cache, range(4), following)
    assert cache.evict(16) == 4
    assert list(cache.namespaces()) == [following]
    assert refusal_of(acquire, cache, range(50, 56), following)[0] == (6, 1, 4, quota)


def test_an_epoch_that_owns_nothing_passes_its_quota_on_and_is_forgotten(cache):
    cache.set_quota(A, Quota(soft_limit=16))
    namespace = A
    for _ in range(3):
        namespace = cache.raise_epoch(namespace)
        assert list(cache.namespaces()) == [namespace]
        assert cache.namespaces()[namespace].soft_limit == 16


# --- snapshots


def test_a_manifest_is_loaded_under_quotas_that_allow_it(make_cache):
    source, target = make_cache(), make_cache()
    insert(source, range(6), A)
    insert(source, [0, 1, 9], A)
    insert(source, range(4), B)
    target.set_quota(A, Quota(soft_limit=3, hard_limit=7))
    load_tree(target, dump_tree(source))
    assert num_owned(target) == 11
    assert target.evict(16) == 8
    assert owns(target, A) == (0, 0, 3)


@pytest.mark.parametrize("hard_limit", [1, 2, 3])
def test_a_manifest_beyond_a_hard_limit_is_loaded_whole_or_not_at_all(make_cache, hard_limit):
    """With 2, [1, 2] lost its tail while loading, and [3] behind it was then found as [1, 3]."""
    source = make_cache()
    insert(source, [1, 2, 3], A)
    insert(source, [1, 2, 4], A)
    target = RadixCache(CacheConfig(num_blocks=16, block_size=1))
    target.set_quota(A, Quota(hard_limit=hard_limit))
    try:
        load_tree(target, dump_tree(source))
    except CacheError:
        assert target.tree.roots == {}
    else:
        assert match(target, [1, 2, 3], A).num_tokens == 3
        assert match(target, [1, 2, 4], A).num_tokens == 3
    assert match(target, [1, 3], A).num_tokens <= 1
    target.check()
