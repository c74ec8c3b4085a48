"""Matching: what is found, in whole blocks, and that looking changes nothing."""

from __future__ import annotations

import pytest

from radixcache import OutOfBlocks
from tests.core.serving import acquire, insert, match, num_owned


def matched(cache, token_ids):
    found = match(cache, token_ids)
    return found.num_tokens, found.block_ids


def test_a_match_returns_the_blocks_of_the_longest_cached_prefix(cache):
    served = insert(cache, [1, 2, 3])
    assert matched(cache, [1, 2, 3]) == (3, served.block_ids)
    assert matched(cache, [1, 2]) == (2, served.block_ids[:2])
    assert matched(cache, [1, 2, 9]) == (2, served.block_ids[:2])
    assert matched(cache, [9]) == (0, ())


def test_an_empty_key_matches_nothing_and_creates_nothing(cache):
    assert matched(cache, []) == (0, ())
    assert insert(cache, []).reused == 0
    assert cache.stats().num_nodes == 0
    assert num_owned(cache) == 0


def test_the_same_prompt_again_reuses_all_of_it_and_adds_nothing(cache):
    assert insert(cache, [1, 2, 3]).reused == 0
    assert (cache.stats().num_evictable, cache.stats().num_pinned) == (3, 0)
    assert insert(cache, [1, 2, 3]).reused == 3
    assert num_owned(cache) == 3


def test_a_longer_prompt_reuses_the_shorter_one_and_adds_the_rest(cache):
    first = insert(cache, [1, 2, 3, 4])
    second = insert(cache, [1, 2, 3, 4, 5, 6])
    assert second.reused == 4
    assert matched(cache, [1, 2, 3, 4, 5, 6]) == (6, first.block_ids + second.block_ids[4:])


def test_prompts_that_part_share_what_is_before_the_fork_in_the_road(cache):
    long = insert(cache, range(1, 9))
    short = insert(cache, [1, 2, 9, 10])
    assert num_owned(cache) == 10
    assert match(cache, range(1, 9)).block_ids == long.block_ids
    assert match(cache, [1, 2, 9, 10]).block_ids == short.block_ids
    assert short.block_ids[:2] == long.block_ids[:2]
    assert match(cache, [1, 2, 3, 4, 99]).num_tokens == 4
    assert num_owned(cache) == 10


def test_partial_hits_inside_an_entry_leave_it_whole(cache):
    served = insert(cache, range(8))
    for hit in (4, 6):
        assert match(cache, range(hit)).block_ids == served.block_ids[:hit]
        lease = acquire(cache, [*range(hit), 99])  # cuts the edge there
        assert lease.block_table[:hit].tolist() == list(served.block_ids[:hit])
        cache.release(lease)
    assert matched(cache, range(8)) == (8, served.block_ids)


def test_a_miss_leaves_no_trace(cache):
    insert(cache, [1, 2, 3])
    before = (cache.stats(), cache.view())
    assert match(cache, [7, 8, 9]).num_tokens == 0
    assert (cache.stats(), cache.view()) == before


def test_a_match_does_not_count_as_a_use(make_cache):
    cache = make_cache(num_blocks=2)
    insert(cache, [1])
    insert(cache, [2])
    match(cache, [1])
    cache.evict(1)
    assert match(cache, [1]).num_tokens == 0
    assert match(cache, [2]).num_tokens == 1


def test_a_disabled_cache_keeps_and_finds_nothing(make_cache):
    cache = make_cache(enable_prefix_cache=False)
    lease = acquire(cache, [1, 2, 3])
    done = cache.commit(lease, 3)
    assert (done.num_published, done.num_twins, lease.num_committed) == (0, 0, 0)
    assert cache.stats().num_private == 3
    assert match(cache, [1, 2, 3]).num_tokens == 0
    assert acquire(cache, [1, 2, 3]).num_cached == 0
    assert num_owned(cache) == 0


def test_a_disabled_cache_refuses_what_does_not_fit_and_takes_nothing(make_cache):
    cache = make_cache(num_blocks=4, enable_prefix_cache=False)
    lease = acquire(cache, [1, 2, 3])
    with pytest.raises(OutOfBlocks):
        acquire(cache, [4, 5])
    cache.release(lease)
    assert acquire(cache, [1, 2, 3, 4]).num_cached == 0


def test_what_a_match_returns_can_not_reach_the_cache(cache):
    served = insert(cache, [1, 2, 3])
    found = match(cache, [1, 2, 3])
    assert isinstance(found.block_ids, tuple)
    with pytest.raises(AttributeError):
        found.num_tokens = 0
    lease = acquire(cache, [1, 2, 3, 4])
    cache.release(lease)
    lease.block_table[0] = 99  # a released lease is the caller's to scribble on
    lease.tokens.clear()
    assert matched(cache, [1, 2, 3]) == (3, served.block_ids)


@pytest.mark.parametrize("num_tokens", range(13))
def test_every_match_ends_at_a_block_edge(make_cache, num_tokens):
    cache = make_cache(block_size=4)
    insert(cache, range(num_tokens))
    for asked in range(13):
        found = match(cache, range(asked))
        assert found.num_tokens == min(asked, num_tokens) // 4 * 4
        assert len(found.block_ids) * 4 == found.num_tokens


def test_six_tokens_in_blocks_of_four_keep_one_block(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(6))
    assert num_owned(cache) == 1
    assert match(cache, range(6)).num_tokens == 4


def test_a_prompt_shorter_than_a_block_makes_no_node(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, [1, 2, 3])
    assert match(cache, [1, 2, 3]).num_tokens == 0
    assert cache.stats().num_nodes == 0
    assert cache.stats().num_free == 16


def test_a_difference_inside_a_block_spoils_that_block_and_no_earlier_one(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(8))
    assert match(cache, [0, 1, 2, 3, 4, 99, 6, 7]).num_tokens == 4
    assert match(cache, [99, 1, 2, 3, 4, 5, 6, 7]).num_tokens == 0


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_the_last_token_of_a_prompt_is_always_left_to_compute(make_cache, block_size):
    cache = make_cache(block_size=block_size)
    insert(cache, range(6))
    for num_tokens in range(7):
        lease = acquire(cache, range(num_tokens))
        assert lease.num_cached == min(max(0, num_tokens - 1), 6 - 6 % block_size)
        cache.release(lease)


def test_a_query_that_ends_or_parts_at_each_place_of_a_split_edge_is_matched_right(make_cache):
    cache = make_cache(num_blocks=64, block_size=2)
    entries = [list(range(12)), [*range(6), 50, 51], [*range(2), 60, 61], [*range(8), 70, 71]]
    served = [insert(cache, entry) for entry in entries]
    for entry, ours in zip(entries, served, strict=True):
        for end in range(len(entry) + 1):
            assert match(cache, entry[:end]).block_ids == ours.block_ids[: end // 2]
            assert match(cache, [*entry[:end], 99, 99]).block_ids == ours.block_ids[: end // 2]
