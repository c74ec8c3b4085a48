"""Token ranges that are worth more than others: which goes first, and for how long."""

from __future__ import annotations

import math

import msgspec
import pytest

from radixcache import (
    LFU,
    CacheConfig,
    InvalidConfig,
    OutOfBlocks,
    PrefixKey,
    Priority,
    RadixCache,
    Retention,
    pack_tokens,
)
from tests.core.serving import insert, match
from tests.core.test_state_machine_keeping import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make_ranked(clock):
    """Makes caches that order by priority and know the time; each is checked in the end."""
    made = []

    def make(num_blocks=16, block_size=1, within=None):
        config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        made.append(RadixCache(config, policy=Priority(within), clock=clock))
        return made[-1]

    yield make
    for cache in made:
        cache.check()


@pytest.fixture
def cache(make_ranked):
    return make_ranked()


def begin(cache, token_ids, *retentions):
    return cache.acquire(PrefixKey.of(list(token_ids)), retentions=retentions)


def serve(cache, token_ids, *retentions):
    """Serve a whole request whose ranges are worth so much."""
    lease = begin(cache, token_ids, *retentions)
    cache.commit(lease, lease.num_tokens)
    cache.release(lease)


def worth(priority, start=0, end=None, duration_s=None):
    return Retention(priority=priority, start=start, end=end, duration_s=duration_s)


def priorities(cache):
    """[(tokens of the edge, priority)] of each node, parents first."""
    return [(len(node.tokens) // 4, node.priority) for node in cache.view().nodes]


def worth_of(cache, num_nodes_max=3):
    """The priority of each token of the only path, however it is cut."""
    assert len(cache.view().nodes) <= num_nodes_max
    return [priority for length, priority in priorities(cache) for _ in range(length)]


def victims(cache, entries, num_blocks=1):
    """The order in which entries of one block go, by their first token."""
    order, left = [], list(entries)
    while left:
        assert cache.evict(num_blocks) == num_blocks
        (gone,) = [token for token in left if not match(cache, [token]).num_tokens]
        left.remove(gone)
        order.append(gone)
    return order


# --- the order


def test_the_lower_priority_goes_first_and_the_older_of_equals(cache):
    for token, priority in ((1, 2), (2, 0), (3, 1), (4, 2), (5, 1), (6, 0)):
        serve(cache, [token], *([worth(priority)] if priority else []))
    assert victims(cache, range(1, 7)) == [2, 6, 3, 5, 1, 4]


def test_among_equal_priorities_another_policy_decides(make_ranked):
    cache = make_ranked(within=LFU())
    for token, priority in ((1, 1), (2, 1), (3, 0), (4, 0)):
        serve(cache, [token], *([worth(priority)] if priority else []))
    for token in (1, 3):
        cache.release(begin(cache, [token, 99]))
    assert victims(cache, range(1, 5)) == [4, 3, 2, 1]


def test_a_request_that_is_worth_more_raises_the_prefix_it_shares(cache):
    serve(cache, [1, 2, 3, 4])
    serve(cache, [1, 2, 9], worth(5))
    serve(cache, [7, 8])
    assert priorities(cache) == [(2, 5), (2, 0), (1, 5), (2, 0)]
    assert cache.evict(4) == 4
    assert match(cache, [1, 2, 9]).num_tokens == 3


def test_a_request_that_is_worth_less_lowers_nothing(cache):
    serve(cache, [1, 2, 3], worth(5))
    serve(cache, [1, 2, 3, 4], worth(2))
    serve(cache, [1, 2, 3, 5])
    assert priorities(cache) == [(3, 5), (1, 2), (1, 0)]


def test_under_a_policy_that_does_not_ask_a_priority_changes_nothing(make_cache):
    cache = make_cache()
    for token in (1, 2, 3):
        serve(cache, [token], *([worth(9)] if token == 1 else []))
    assert victims(cache, [1, 2, 3]) == [1, 2, 3]


def test_everything_can_be_evicted_whatever_it_is_worth(cache):
    serve(cache, range(10), worth(10**30))
    begin(cache, range(50, 66))
    assert match(cache, [0]).num_tokens == 0


# --- ranges


def test_a_range_that_touches_a_block_takes_all_of_it(make_ranked):
    cache = make_ranked(16, 4)
    serve(cache, range(20), worth(1, 6, 9))
    assert priorities(cache) == [(4, 0), (8, 1), (8, 0)]


def test_what_is_behind_a_range_goes_before_it(make_ranked):
    cache = make_ranked(16, 4)
    serve(cache, range(16), worth(1, 0, 5))
    serve(cache, range(100, 108))
    assert cache.evict(4) == 4
    assert match(cache, range(16)).num_tokens == 8


def test_a_range_beyond_the_sequence_takes_effect_when_it_grows_there(cache):
    lease = begin(cache, [1, 2], worth(1, 3, 5))
    for token in range(3, 8):
        cache.commit(lease, lease.num_tokens)
        cache.append(lease, pack_tokens([token]))
    cache.commit(lease, 7)
    assert priorities(cache) == [(3, 0), (2, 1), (2, 0)]


def test_a_range_to_the_end_covers_what_is_generated_and_stays_one_node(cache):
    lease = begin(cache, [1, 2], worth(3))
    for token in range(3, 12):
        cache.append(lease, pack_tokens([token]))
        cache.commit(lease, lease.num_tokens)
        assert priorities(cache) == [(lease.num_tokens, 3)]
    assert len(cache.view().nodes) == 1
    cache.release(lease)
    serve(cache, [50])
    assert cache.evict(1) == 1
    assert match(cache, range(1, 12)).num_tokens == 11


@pytest.mark.parametrize("order", [1, -1])
def test_where_two_ranges_meet_the_higher_holds(cache, order):
    serve(cache, range(8), *[worth(1, 0, 6), worth(2, 4, 8)][::order])
    assert worth_of(cache) == [1, 1, 1, 1, 2, 2, 2, 2]
    cache.evict(99)
    serve(cache, range(8), *[worth(2, 0, 6), worth(1, 2, 8)][::order])
    assert worth_of(cache) == [2, 2, 2, 2, 2, 2, 1, 1]
    assert cache.evict(2) == 2
    assert worth_of(cache) == [2] * 6


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_equal_ranges_the_longer_duration_holds(cache, clock, order):
    serve(cache, range(4), *[worth(1, 0, 3, 5.0), worth(1, 1, 4, 9.0)][::order])
    clock.now += 6
    cache.expire()
    assert worth_of(cache) == [0, 1, 1, 1]
    clock.now += 4
    cache.expire()
    assert worth_of(cache) == [0, 0, 0, 0]


def test_a_branch_inherits_what_its_sequence_is_worth(cache):
    lease = begin(cache, [1, 2], worth(4))
    branch = cache.fork(lease)
    assert branch.retentions == lease.retentions
    cache.release(lease)
    cache.append(branch, pack_tokens([3]))
    cache.commit(branch, 3)
    assert priorities(cache) == [(3, 4)]


# --- for how long


def test_a_priority_falls_to_nothing_once_idle_for_its_time(cache, clock):
    serve(cache, [1], worth(5, duration_s=10))
    serve(cache, [2])
    clock.now += 9.5
    cache.expire()
    assert priorities(cache) == [(1, 5), (1, 0)]
    clock.now += 0.5
    assert priorities(cache) == [(1, 5), (1, 0)], "noticed when somebody wants room"
    cache.expire()
    assert priorities(cache) == [(1, 0), (1, 0)]
    assert victims(cache, [1, 2]) == [1, 2]


def test_a_use_refreshes_the_time_from_its_release_on(cache, clock):
    serve(cache, [1, 2], worth(5, duration_s=10))
    clock.now += 9
    lease = begin(cache, [1, 2, 9])  # asks for nothing, but stands on it
    clock.now += 50
    cache.expire()
    assert priorities(cache) == [(2, 5)], "not while in use"
    cache.release(lease)
    clock.now += 9
    cache.expire()
    assert priorities(cache) == [(2, 5)]
    clock.now += 1
    cache.expire()
    assert priorities(cache) == [(2, 0)]


def test_of_several_users_the_last_release_counts(cache, clock):
    serve(cache, [1], worth(5, duration_s=10))
    first, second = begin(cache, [1, 8]), begin(cache, [1, 9])
    cache.release(first)
    clock.now += 30
    cache.release(second)
    clock.now += 9
    cache.expire()
    assert priorities(cache) == [(1, 5)]
    clock.now += 1
    cache.expire()
    assert priorities(cache) == [(1, 0)]


def test_the_same_range_asked_for_again_begins_anew(cache, clock):
    serve(cache, [1, 2], worth(5, duration_s=10))
    clock.now += 8
    serve(cache, [1, 2], worth(5, duration_s=10))
    clock.now += 8
    cache.expire()
    assert priorities(cache) == [(1, 5), (1, 5)], "the last token is computed anew, and cut off"


def test_a_match_refreshes_nothing(cache, clock):
    serve(cache, [1], worth(5, duration_s=10))
    clock.now += 9
    match(cache, [1])
    clock.now += 1
    cache.expire()
    assert priorities(cache) == [(1, 0)]


def test_a_cut_edge_keeps_priority_and_time_in_both_halves(cache, clock):
    serve(cache, [1, 2, 3, 4], worth(5, duration_s=10))
    clock.now += 4
    serve(cache, [1, 2, 9])
    assert priorities(cache) == [(2, 5), (2, 5), (1, 0)]
    clock.now += 6
    cache.expire()
    assert priorities(cache) == [(2, 5), (2, 0), (1, 0)], "the upper half was used since"
    clock.now += 4
    cache.expire()
    assert priorities(cache) == [(2, 0), (2, 0), (1, 0)]


def test_ten_thousand_refreshes_leave_one_end_for_each_node(cache, clock):
    serve(cache, [1, 2, 3], worth(5, duration_s=10))
    for number in range(10_000):
        cache.release(begin(cache, [1, 2, 3, 4 + number % 3], worth(5, duration_s=10)))
        clock.now += 0.001
        assert len(cache.deadlines.order) == 1
    clock.now += 10
    cache.expire()
    assert len(cache.deadlines.order) == 0
    assert cache.deadlines.num_retained == 0


def test_what_is_evicted_leaves_no_end_behind(cache):
    serve(cache, [1, 2, 3], worth(5, duration_s=10))
    serve(cache, [1, 2, 4], worth(6, 1, 3))
    cache.evict(1)
    assert len(cache.deadlines.order) >= 1
    cache.evict(99)
    assert len(cache.deadlines.order) == cache.deadlines.num_retained == 0
    serve(cache, [1], worth(1, duration_s=1))
    cache.drop(cache.view().nodes[0].namespace)
    assert len(cache.deadlines.order) == cache.deadlines.num_retained == 0


def test_a_trimmed_leaf_keeps_what_it_is_worth(cache, clock):
    serve(cache, [1, 2, 3], worth(5, duration_s=10))
    cache.evict(1)
    assert priorities(cache) == [(2, 5)]
    clock.now += 10
    cache.expire()
    assert priorities(cache) == [(2, 0)]


class StandingClock:
    """Gives the same time so often, and then no more: a loop that waits for it ends."""

    def __init__(self, times):
        self.times = times

    def __call__(self):
        self.times -= 1
        if not self.times:
            raise TimeoutError("asked for the time again and again")
        return 100.0


def test_a_time_too_short_for_the_clock_does_not_hold_up_a_call_while_in_use():
    config = CacheConfig(num_blocks=4, block_size=1)
    cache = RadixCache(config, policy=Priority(), clock=StandingClock(1000))
    lease = begin(cache, [1, 2], worth(1, duration_s=1e-15))  # 100 + 1e-15 is 100
    cache.commit(lease, 2)
    cache.expire()
    cache.check()


# --- what is refused


NONSENSE = [
    *[("priority", value) for value in (0, -1, True, 1.0, "1", None)],
    *[("start", value) for value in (-1, 1.5, False)],
    *[("end", value) for value in (0, -1, 2.0, "4", True)],
    *[("duration_s", value) for value in (0, -1.0, math.nan, math.inf, True, "1")],
]


@pytest.mark.parametrize(("name", "value"), NONSENSE)
def test_a_range_that_makes_no_sense_is_refused(name, value):
    with pytest.raises(InvalidConfig):
        Retention(**{"priority": 1, name: value})
    with pytest.raises(InvalidConfig):
        Retention(priority=1, start=3, end=3)


@pytest.mark.parametrize("start", [None, "3"])
def test_a_range_that_begins_at_no_number_is_refused(start):
    with pytest.raises(InvalidConfig):
        Retention(priority=1, start=start)


def test_a_range_from_a_message_is_held_to_the_same():
    for message in (b'{"priority":1,"start":4,"end":2}', b'{"priority":1,"length":2}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(message, type=Retention)


def test_a_time_without_a_clock_is_refused_and_nothing_is_taken(make_cache):
    cache = make_cache()
    insert(cache, [1, 2])
    before = (cache.stats(), cache.view())
    with pytest.raises(InvalidConfig, match="clock"):
        begin(cache, [1, 2, 3], worth(1), worth(1, duration_s=1.0))
    assert (cache.stats(), cache.view()) == before
    cache.release(begin(cache, [1, 2, 3], worth(1)))


def test_a_refused_request_is_worth_nothing(make_ranked):
    cache = make_ranked(4)
    serve(cache, [1, 2, 3])
    with pytest.raises(OutOfBlocks):
        begin(cache, [1, 2, 3, 4, 5], worth(7, duration_s=1.0))
    assert priorities(cache) == [(3, 0)]
    assert not cache.deadlines.order
