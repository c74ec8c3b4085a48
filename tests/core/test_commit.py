"""Commit: what is published, what turns out to be a twin, and how the tree grows by it."""

from __future__ import annotations

import pytest

from radixcache import Commit, InvalidLease, pack_tokens
from tests.core.serving import acquire, insert, match, num_owned
from tests.support.content_oracle import ContentOracle


def test_one_and_a_half_blocks_publish_one_and_give_the_half_back(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, range(6))
    assert cache.commit(lease, 6) == Commit(1, 0)
    assert (cache.stats().num_pinned, cache.stats().num_private) == (1, 1)
    cache.release(lease)
    assert (cache.stats().num_evictable, cache.stats().num_free) == (1, 15)


def test_a_prompt_shorter_than_one_block_caches_nothing_and_returns_all(make_cache):
    cache = make_cache(block_size=32)
    assert insert(cache, range(29)).reused == 0
    assert cache.stats().num_free == 16
    assert match(cache, range(29)).num_tokens == 0


def test_a_commit_in_slices_publishes_each_block_once(make_cache):
    cache = make_cache(block_size=2)
    lease = acquire(cache, range(7))
    assert [cache.commit(lease, n).num_published for n in (1, 3, 3, 5, 7)] == [0, 1, 0, 1, 1]
    assert lease.num_committed == 6
    assert cache.stats().published_blocks == 3


def test_a_commit_of_less_than_before_changes_nothing(make_cache):
    cache = make_cache(block_size=2)
    lease = acquire(cache, range(6))
    cache.commit(lease, 6)
    assert cache.commit(lease, 2) == Commit(0, 0)
    assert cache.commit(lease, 0) == Commit(0, 0)
    assert lease.num_committed == 6


def test_more_tokens_than_there_are_can_not_be_committed(cache):
    lease = acquire(cache, [1, 2])
    with pytest.raises(InvalidLease, match="3 tokens committed"):
        cache.commit(lease, 3)
    assert (lease.num_committed, num_owned(cache)) == (0, 0)


def test_a_growing_sequence_stays_one_node(cache):
    lease = acquire(cache, [1])
    for token in range(2, 12):
        cache.commit(lease, lease.num_tokens)
        cache.append(lease, pack_tokens([token]))
    assert cache.stats().num_nodes == 1
    assert num_owned(cache) == 10


def test_a_leaf_on_which_another_lease_stands_is_not_lengthened(cache):
    first = acquire(cache, [1, 2, 3])
    cache.commit(first, 2)
    second = acquire(cache, [1, 2, 4])
    cache.commit(first, 3)
    assert cache.stats().num_nodes == 2
    cache.commit(second, 3)
    assert cache.stats().num_nodes == 3
    assert match(cache, [1, 2, 3]).num_tokens == match(cache, [1, 2, 4]).num_tokens == 3


def test_a_node_with_children_is_not_lengthened(cache):
    insert(cache, [1, 2, 3])
    lease = acquire(cache, [1, 2, 9])  # alone on [1, 2], but [3] hangs below
    cache.commit(lease, 3)
    assert match(cache, [1, 2, 3]).num_tokens == match(cache, [1, 2, 9]).num_tokens == 3
    assert match(cache, [1, 2, 9, 3]).num_tokens == 3


def test_of_two_equal_prompts_of_one_step_the_second_takes_over_the_blocks_of_the_first(
    make_cache,
):
    cache = make_cache(block_size=2)
    store = ContentOracle(num_blocks=16, block_size=2)
    first, second = acquire(cache, range(5)), acquire(cache, range(5))
    for lease in (first, second):
        store.compute(lease, 0, 5)
    assert cache.commit(first, 5) == Commit(2, 0)
    assert cache.commit(second, 5) == Commit(0, 2)
    assert first.block_table[:2] == second.block_table[:2]
    assert first.block_table[2] != second.block_table[2]
    assert cache.stats().num_free == 16 - 4
    stranger = acquire(cache, range(90, 98))  # would overwrite twins that a table still names
    store.compute(stranger, 0, 8)
    for lease in (first, second):
        store.check_lease(lease, 5)


def test_a_twin_is_replaced_up_to_where_the_sequences_part(cache):
    first, second = acquire(cache, [1, 2, 3]), acquire(cache, [1, 2, 9, 8])
    cache.commit(first, 3)
    assert cache.commit(second, 4) == Commit(2, 2)
    assert first.block_table[:2] == second.block_table[:2]
    assert num_owned(cache) == 5
    assert cache.stats().num_nodes == 3


def test_a_sequence_that_ends_inside_an_edge_cuts_it(cache):
    short, long = acquire(cache, [1, 2]), acquire(cache, [1, 2, 3, 4])
    cache.commit(long, 4)
    assert cache.commit(short, 2) == Commit(0, 2)
    assert [len(node.block_ids) for node in cache.view().nodes] == [2, 2]
    cache.release(long)
    assert cache.evict(16) == 2
    assert match(cache, [1, 2, 3, 4]).num_tokens == 2


def test_what_a_branch_shared_with_the_publisher_is_no_twin(cache):
    lease = acquire(cache, [1, 2, 3])
    branch = cache.fork(lease)
    assert cache.commit(lease, 3) == Commit(3, 0)
    assert cache.commit(branch, 3) == Commit(0, 0)
    assert branch.block_table == lease.block_table
    assert cache.stats().twin_blocks == 0


def test_committing_below_an_evictable_leaf_makes_it_an_inner_node(cache):
    late = acquire(cache, [1, 2, 3, 4])
    insert(cache, [1, 2])
    assert cache.commit(late, 4) == Commit(2, 2)
    assert [node.evict_order for node in cache.view().nodes] == [None, None]
    cache.release(late)
    assert [node.evict_order for node in cache.view().nodes] == [None, 0]
