"""Holds: a prefix that stays until its holder lets go, or its time is over."""

from __future__ import annotations

import pytest

from radixcache import (
    DEFAULT_NAMESPACE,
    CacheConfig,
    InvalidConfig,
    InvalidLease,
    Namespace,
    OutOfBlocks,
    PrefixKey,
    Quota,
    RadixCache,
    StaleEpoch,
    pack_tokens,
)
from tests.core.serving import acquire, insert, match, num_owned
from tests.core.test_state_machine_keeping import FakeClock

A = Namespace(salt="a")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def timed(clock):
    """A cache of 16 blocks of one token that knows the time."""
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=1), clock=clock)
    yield cache
    cache.check()


def retain(cache, token_ids, duration_s=None, namespace=DEFAULT_NAMESPACE):
    return cache.retain(PrefixKey.of(list(token_ids), namespace), duration_s)


def test_a_held_prefix_survives_the_eviction_of_everything(cache):
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 9])
    insert(cache, [5])
    hold = retain(cache, [1, 2, 3])
    assert (hold.num_tokens, hold.has_ended, hold.namespace) == (3, False, DEFAULT_NAMESPACE)
    assert cache.evict(99) == 2
    assert match(cache, [1, 2, 3]).num_tokens == 3
    assert cache.stats().num_holds == 1
    cache.end_hold(hold)
    assert hold.has_ended
    assert cache.stats().num_holds == 0
    assert cache.evict(99) == 3


def test_a_hold_is_no_room_for_a_request(make_cache):
    cache = make_cache(4)
    insert(cache, [1, 2, 3])
    hold = retain(cache, [1, 2])
    with pytest.raises(OutOfBlocks) as refusal:
        acquire(cache, [7, 8, 9])
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (3, 1, 1)
    assert match(cache, [1, 2, 3]).num_tokens == 3
    cache.end_hold(hold)
    acquire(cache, [7, 8, 9])


def test_a_hold_is_of_whole_blocks_and_of_what_is_cached_only(make_cache):
    cache = make_cache(16, 4)
    insert(cache, range(12))
    assert retain(cache, [*range(6), 99, 98]).num_tokens == 4
    assert retain(cache, range(11)).num_tokens == 8
    assert retain(cache, range(12)).num_tokens == 12, "not as for `acquire`: the last token counts"
    assert retain(cache, range(20)).num_tokens == 12
    assert retain(cache, range(3)).num_tokens == 0


def test_a_hold_ends_when_its_time_is_over_and_somebody_wants_room(timed, clock):
    insert(timed, [1, 2, 3])
    hold = retain(timed, [1, 2, 3], 5)
    clock.now += 4.5
    assert timed.evict(3) == 0
    clock.now += 0.5
    match(timed, [1, 2, 3])
    timed.stats()
    timed.release(acquire(timed, []))
    clock.now += 100
    assert timed.evict(3) == 3
    assert hold.has_ended
    timed.end_hold(hold)


NOTICING = {
    "expire": lambda cache, lease: cache.expire(),
    "evict": lambda cache, lease: cache.evict(0),
    "acquire": lambda cache, lease: acquire(cache, [9]),
    "append": lambda cache, lease: cache.append(lease, pack_tokens([8])),
    "retain": lambda cache, lease: retain(cache, [9]),
    "set_quota": lambda cache, lease: cache.set_quota(A, Quota(soft_limit=1)),
}


@pytest.mark.parametrize("call", NOTICING)
def test_the_end_of_a_hold_is_noticed_by_each_call_that_wants_room(timed, clock, call):
    insert(timed, [1, 2])
    lease, hold = acquire(timed, [7]), retain(timed, [1, 2], 1.0)
    clock.now += 1.0
    assert not hold.has_ended
    NOTICING[call](timed, lease)
    assert hold.has_ended
    assert timed.stats().num_evictable == 2


SILENT = {
    "match": lambda cache, lease: match(cache, [1, 2]),
    "commit": lambda cache, lease: cache.commit(lease, 1),
    "truncate": lambda cache, lease: cache.truncate(lease, 0),
    "fork": lambda cache, lease: cache.fork(lease),
    "release": lambda cache, lease: cache.release(lease),
    "drop": lambda cache, lease: cache.drop(DEFAULT_NAMESPACE),
    "stats": lambda cache, lease: cache.stats(),
    "view": lambda cache, lease: cache.view(),
    "check": lambda cache, lease: cache.check(),
}


@pytest.mark.parametrize("call", SILENT)
def test_a_call_that_wants_no_room_does_not_look_at_the_time(timed, clock, call):
    insert(timed, [1, 2])
    lease, hold = acquire(timed, [7]), retain(timed, [1, 2], 1.0)
    clock.now += 50
    SILENT[call](timed, lease)
    assert not hold.has_ended
    assert match(timed, [1, 2]).num_tokens == 2


def test_holds_end_in_the_order_of_their_times(timed, clock):
    insert(timed, [1, 2, 3, 4])
    holds = [retain(timed, range(1, 1 + n), seconds) for n, seconds in ((4, 1), (2, 3), (3, 2))]
    left = []
    for _ in range(3):
        clock.now += 1
        assert timed.evict(16) >= 1
        left.append((match(timed, [1, 2, 3, 4]).num_tokens, timed.stats().num_holds))
    assert left == [(3, 2), (2, 1), (0, 0)]
    assert all(hold.has_ended for hold in holds)
    assert not timed.deadlines.order


def test_ending_a_hold_twice_takes_back_one_pin_only(cache):
    insert(cache, [1, 2])
    first, second = retain(cache, [1, 2]), retain(cache, [1, 2])
    cache.end_hold(first)
    cache.end_hold(first)
    assert cache.evict(2) == 0
    assert not second.has_ended
    cache.end_hold(second)
    assert cache.evict(2) == 2


def test_ending_a_hold_before_its_time_leaves_nothing_to_end(timed, clock):
    insert(timed, [1, 2])
    timed.end_hold(retain(timed, [1, 2], 1.0))
    assert not timed.deadlines.order
    other = retain(timed, [1, 2])
    clock.now += 5
    timed.expire()
    assert not other.has_ended


def test_a_hold_of_another_cache_is_refused_and_nothing_changes(make_cache):
    ours, theirs = make_cache(), make_cache()
    for cache in (ours, theirs):
        insert(cache, [1, 2])
    kept, foreign = retain(ours, [1, 2]), retain(theirs, [1, 2])
    assert kept.hold_id == foreign.hold_id
    with pytest.raises(InvalidLease, match="another cache"):
        ours.end_hold(foreign)
    assert not foreign.has_ended
    assert ours.evict(9) == theirs.evict(9) == 0


def test_a_hold_of_nothing_keeps_nothing_but_its_namespace(cache):
    hold = retain(cache, [1, 2], namespace=A)
    assert hold.num_tokens == 0
    assert list(cache.namespaces()) == list(cache.tree.roots) == [A]
    insert(cache, [1, 2], A)
    assert cache.evict(9) == 2, "what is cached later is not held"
    assert list(cache.tree.roots) == [A]
    cache.end_hold(hold)
    assert cache.tree.roots == cache.namespaces() == {}


def test_a_hold_of_an_empty_prompt_and_in_a_cache_that_is_off_is_a_hold_of_nothing(make_cache):
    cache = make_cache(enable_prefix_cache=False)
    insert(cache, [1, 2])
    for tokens in ([], [1, 2]):
        hold = retain(cache, tokens)
        assert hold.num_tokens == 0
        cache.end_hold(hold)
    assert cache.tree.roots == {}


def test_a_stale_epoch_can_not_be_held(cache):
    insert(cache, [1, 2], A)
    cache.raise_epoch(A)
    before = cache.stats()
    with pytest.raises(StaleEpoch):
        retain(cache, [1, 2], namespace=A)
    assert cache.stats() == before


def test_a_prefix_stays_held_when_its_epoch_is_raised(cache):
    insert(cache, [1, 2], A)
    hold = retain(cache, [1, 2], namespace=A)
    following = cache.raise_epoch(A)
    assert match(cache, [1, 2], A).num_tokens == match(cache, [1, 2], following).num_tokens == 0
    assert cache.drop(A) == cache.evict(9) == 0
    assert num_owned(cache) == 2
    cache.end_hold(hold)
    assert cache.drop(A) == 2
    assert cache.namespaces() == {}


def test_a_duration_without_a_clock_is_refused_and_nothing_is_held(cache):
    insert(cache, [1, 2])
    before = (cache.stats(), cache.view())
    with pytest.raises(InvalidConfig, match="clock"):
        retain(cache, [1, 2], 1.0)
    assert (cache.stats(), cache.view()) == before


@pytest.mark.parametrize("duration", [0, -1, -0.5, float("nan"), float("inf"), True, "1", [1], 1j])
def test_a_duration_that_is_no_time_above_nothing_is_refused(timed, duration):
    insert(timed, [1, 2])
    before = (timed.stats(), timed.view())
    with pytest.raises(InvalidConfig):
        retain(timed, [1], duration)
    assert (timed.stats(), timed.view()) == before


def test_a_duration_beyond_every_float_is_refused(timed):
    with pytest.raises(InvalidConfig):
        retain(timed, [1], 10**400)


def test_a_split_above_or_inside_a_hold_keeps_all_of_it(cache):
    insert(cache, [1, 2, 3, 4])
    hold = retain(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 9])
    insert(cache, [1, 8])
    assert cache.evict(9) == 2
    assert match(cache, [1, 2, 3, 4]).num_tokens == 4
    cache.end_hold(hold)
    assert cache.evict(9) == 4


def test_a_split_below_a_hold_keeps_it_and_lets_the_rest_go(cache):
    insert(cache, [1, 2, 3, 4, 5])
    hold = retain(cache, [1, 2])
    insert(cache, [1, 2, 3, 4, 9])
    assert cache.evict(9) == 4
    assert match(cache, [1, 2, 3]).num_tokens == 2
    cache.end_hold(hold)
    assert cache.evict(9) == 2


def test_two_holds_keep_what_either_holds(cache):
    insert(cache, [1, 2, 3, 4])
    short, long = retain(cache, [1, 2]), retain(cache, [1, 2, 3])
    assert cache.evict(9) == 1
    cache.end_hold(long)
    assert cache.evict(9) == 1
    assert match(cache, [1, 2, 3]).num_tokens == 2
    cache.end_hold(short)
    assert cache.evict(9) == 2


def test_a_hold_outlives_the_lease_and_the_lease_the_hold(cache):
    lease = acquire(cache, [1, 2, 3])
    cache.commit(lease, 3)
    hold = retain(cache, [1, 2])
    cache.release(lease)
    assert cache.evict(9) == 1
    second = acquire(cache, [1, 2, 9])
    cache.end_hold(hold)
    assert cache.evict(9) == 0
    cache.release(second)
    assert cache.evict(9) == 2


def test_a_sequence_that_grows_behind_a_hold_does_not_lengthen_what_is_held(cache):
    lease = acquire(cache, [1, 2])
    cache.commit(lease, 2)
    hold = retain(cache, [1, 2])
    cache.append(lease, pack_tokens([3, 4]))
    cache.commit(lease, 4)
    cache.release(lease)
    assert (hold.num_tokens, hold.node.end) == (2, 2)
    assert cache.evict(9) == 2
    assert match(cache, [1, 2, 3]).num_tokens == 2


def test_drop_leaves_what_is_held(cache):
    insert(cache, [1, 2, 3], A)
    insert(cache, [5], A)
    retain(cache, [1, 2], namespace=A)
    assert cache.drop(A) == 2
    assert match(cache, [1, 2, 3], A).num_tokens == 2


def test_a_hold_stays_within_a_lowered_limit_and_counts_for_it(cache):
    insert(cache, [1, 2, 3, 4], A)
    retain(cache, [1, 2, 3], namespace=A)
    quota = Quota(hard_limit=2)
    assert cache.set_quota(A, quota) == 1
    with pytest.raises(OutOfBlocks) as refusal:
        acquire(cache, [9], A)
    assert (refusal.value.free, refusal.value.evictable, refusal.value.quota) == (0, 0, quota)
    assert cache.namespaces()[A].num_pinned == 3


def test_counts_of_a_namespace_whose_last_hold_has_ended_do_not_live_on(timed, clock):
    hold = retain(timed, [7], 1.0, A)  # of nothing, which is all that A has
    clock.now += 1.0
    assert A in timed.namespaces()
    assert timed.set_quota(A, None) == 0
    assert hold.has_ended
    assert A not in timed.namespaces()


def test_what_was_held_until_now_is_room_for_a_limit_that_is_lowered(timed, clock):
    insert(timed, [1, 2, 3, 4], A)
    retain(timed, [1, 2, 3], 1.0, A)
    clock.now += 1.0
    assert timed.set_quota(A, Quota(hard_limit=1)) == 3
    assert timed.namespaces()[A].num_pinned == 0


def test_a_hold_is_not_a_use(make_cache):
    cache = make_cache(3)
    for token in (1, 2, 3):
        insert(cache, [token])
    before = [node.last_access for node in cache.view().nodes]
    cache.end_hold(retain(cache, [1]))
    assert [node.last_access for node in cache.view().nodes] == before
    assert cache.stats().queries == 3
    cache.evict(1)
    assert match(cache, [1]).num_tokens == 0


def test_a_hold_says_what_it_is_when_shown(cache):
    insert(cache, [1, 2])
    assert repr(retain(cache, [1, 2])) == "Hold(2, 2 tokens)"


def test_ten_thousand_holds_that_ended_leave_nothing(timed, clock):
    insert(timed, [1, 2, 3, 4])
    for number in range(10_000):
        retain(timed, range(1, 1 + number % 5), 1 + number % 3)
        clock.now += 0.5
    clock.now += 3
    timed.expire()
    assert (timed.stats().num_holds, len(timed.deadlines.order)) == (0, 0)
    assert len(timed.view().nodes) == 4
    assert timed.evict(9) == 4
