"""Pins: what a lease stands on stays, and nothing more."""

from __future__ import annotations

import random

import pytest

from radixcache import InvariantViolation, Namespace, OutOfBlocks, PrefixKey
from tests.core.serving import acquire, insert, match


def pinned_and_evictable(cache):
    stats = cache.stats()
    return stats.num_pinned, stats.num_evictable


def test_a_lease_turns_its_prefix_from_evictable_to_pinned_and_back(cache):
    insert(cache, [1, 2, 3])
    assert pinned_and_evictable(cache) == (0, 3)
    lease = acquire(cache, [1, 2, 3, 4])
    assert pinned_and_evictable(cache) == (3, 0)
    cache.release(lease)
    assert pinned_and_evictable(cache) == (0, 3)


def test_a_lease_pins_only_the_part_that_it_uses(cache):
    insert(cache, [1, 2, 3, 4, 5])
    acquire(cache, [1, 2, 9])
    assert pinned_and_evictable(cache) == (2, 3)


def test_a_pinned_leaf_protects_everything_above_it(cache):
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5, 6])
    insert(cache, [7, 8])
    lease = acquire(cache, [1, 2, 3, 4, 0])
    assert cache.evict(16) == 4
    assert match(cache, [1, 2, 3, 4]).num_tokens == 4
    assert match(cache, [1, 2, 5, 6]).num_tokens == 2
    assert match(cache, [7, 8]).num_tokens == 0
    assert lease.block_table[:4].tolist() == list(match(cache, [1, 2, 3, 4]).block_ids)


def test_of_two_holders_only_the_last_to_leave_frees_the_prefix(cache):
    insert(cache, [1, 2, 3])
    first, second = acquire(cache, [1, 2, 3, 4]), acquire(cache, [1, 2, 3, 5])
    cache.release(first)
    assert pinned_and_evictable(cache) == (3, 0)
    assert cache.evict(3) == 0
    cache.release(second)
    assert pinned_and_evictable(cache) == (0, 3)
    assert cache.evict(3) == 3


def test_with_everything_pinned_eviction_gives_up_and_a_call_is_refused(make_cache):
    cache = make_cache(num_blocks=4)
    lease = acquire(cache, [1, 2, 3, 4])
    cache.commit(lease, 4)
    assert cache.evict(4) == 0
    with pytest.raises(OutOfBlocks) as refusal:
        acquire(cache, [5])
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (1, 0, 0)


def test_a_child_below_a_pinned_node_changes_no_pin_above_it(cache):
    holder = acquire(cache, [1, 2])
    cache.commit(holder, 2)
    insert(cache, [1, 2, 3])
    (parent, child) = cache.view().nodes
    assert (parent.lock_ref, child.lock_ref) == (1, 0)
    assert pinned_and_evictable(cache) == (2, 1)
    assert cache.evict(16) == 1
    assert [node.evict_order for node in cache.view().nodes] == [None]
    cache.release(holder)
    assert [node.evict_order for node in cache.view().nodes] == [0]
    assert cache.evict(16) == 2


def test_a_node_counts_one_pin_for_each_lease_that_ends_there_and_each_pinned_child(cache):
    insert(cache, [1, 2])
    here = [acquire(cache, [1, 2, 9]) for _ in range(3)]
    below = [acquire(cache, [1, 2, 3]) for _ in range(2)]
    for lease in below:
        cache.commit(lease, 3)
    assert [node.lock_ref for node in cache.view().nodes] == [3 + 1, 2]
    for lease in here + below:
        cache.release(lease)
    assert [node.lock_ref for node in cache.view().nodes] == [0, 0]


def test_a_split_below_a_lease_keeps_both_halves_pinned(cache):
    holder = acquire(cache, [1, 2, 3, 4])
    cache.commit(holder, 4)
    visitor = acquire(cache, [1, 2, 9])  # cuts the edge that `holder` stands on
    assert pinned_and_evictable(cache) == (4, 0)
    cache.release(visitor)
    assert pinned_and_evictable(cache) == (4, 0)
    assert cache.evict(16) == 0
    cache.release(holder)
    assert pinned_and_evictable(cache) == (0, 4)


def test_a_pin_taken_back_once_too_often_is_refused(cache):
    insert(cache, [1, 2])
    (leaf,) = cache.tree.roots[next(iter(cache.tree.roots))].children.values()
    with pytest.raises(InvariantViolation, match="unpinned more often"):
        cache.pins.unlock(leaf)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_evictable_on_prefixes_is_what_acquiring_them_all_pins(make_cache, seed: int):
    rng = random.Random(seed)
    cache = make_cache(num_blocks=400, block_size=rng.choice((1, 2, 3)))
    spaces = [Namespace(salt=salt) for salt in ("", "", "a", "never used")]

    def prompt() -> list[int]:
        return [rng.randrange(2) for _ in range(3)] + [2] * rng.randrange(14)

    for _ in range(8):
        insert(cache, prompt(), rng.choice(spaces[:3]))
    for _ in range(rng.randrange(4)):
        acquire(cache, prompt(), rng.choice(spaces[:3]))
    keys = [PrefixKey.of([*prompt(), 7], rng.choice(spaces)) for _ in range(rng.randrange(7))]
    before = cache.stats()
    counted = cache.num_evictable_on(keys)
    assert cache.stats() == before
    for key in keys:
        cache.acquire(key)
    assert counted == before.num_evictable - cache.stats().num_evictable
    cache.check()
