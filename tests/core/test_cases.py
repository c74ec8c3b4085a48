"""Cases of ownership that other systems stumbled over, where no other file of the core tells them.

The number in each docstring is that of the collected case.
"""

from __future__ import annotations

import contextlib
from itertools import product

import pytest

from radixcache import (
    BlockRemoved,
    BlockStored,
    CacheConfig,
    CallerError,
    EventRecorder,
    InvalidLease,
    Namespace,
    RadixCache,
    pack_tokens,
)
from tests.core.serving import acquire, insert, match, num_owned

A, B = Namespace(salt="a"), Namespace(salt="b")


def balance(cache):
    """Blocks free, private, pinned and evictable."""
    stats = cache.stats()
    return stats.num_free, stats.num_private, stats.num_pinned, stats.num_evictable


def test_eight_sequences_that_cross_an_edge_by_one_token_need_eight_blocks(make_cache):
    """Case 20."""
    cache = make_cache(16, 64)
    leases = [acquire(cache, [n] * 64) for n in range(8)]
    assert balance(cache) == (8, 8, 0, 0)
    for lease in leases:
        cache.append(lease, pack_tokens([1]))
    assert balance(cache) == (0, 16, 0, 0)
    for lease in leases:
        cache.append(lease, pack_tokens([2] * 63))
    assert balance(cache) == (0, 16, 0, 0)


def test_a_namespace_that_is_dropped_takes_nothing_of_another(cache):
    """Case 26."""
    insert(cache, [1, 2, 3], A)
    ours = insert(cache, [1, 2, 3], B)
    assert cache.drop(A) == 3
    assert match(cache, [1, 2, 3], A).num_tokens == 0
    assert match(cache, [1, 2, 3], B).block_ids == ours.block_ids
    cache.raise_epoch(A)
    assert match(cache, [1, 2, 3], B).block_ids == ours.block_ids


def test_a_parent_that_lost_its_last_child_is_evictable_only_once_unpinned(cache):
    """Case 35."""
    insert(cache, [1, 2])
    held = acquire(cache, [1, 2, 9])
    insert(cache, [1, 2, 3, 4])
    assert balance(cache) == (11, 1, 2, 2)
    assert cache.evict(9) == 2
    assert balance(cache) == (13, 1, 2, 0)
    assert cache.evict(9) == 0
    cache.release(held)
    assert balance(cache) == (14, 0, 0, 2)
    assert cache.evict(9) == 2


STAGES = {"queued": 0, "in mid chunk": 5, "at the end of the prompt": 10, "decoding": 13}


@pytest.mark.parametrize(
    ("stage", "block_size", "is_branched"), list(product(STAGES, [1, 4, 16], [False, True]))
)
def test_an_abort_returns_exactly_what_the_request_had(make_cache, stage, block_size, is_branched):
    """Case 57."""
    cache = make_cache(48, block_size)
    insert(cache, range(3 * block_size))
    other = acquire(cache, [*range(block_size), 77])
    before = balance(cache)
    lease = acquire(cache, [*range(2 * block_size), *range(500, 510)])
    num_cached = lease.num_committed
    for token in range(max(0, STAGES[stage] - 10)):
        cache.append(lease, pack_tokens([token]))
    branches = [cache.fork(lease)] if is_branched else []
    cache.commit(lease, num_cached + STAGES[stage])
    num_published = (lease.num_committed - num_cached) // block_size
    for aborted in (lease, *branches):
        cache.release(aborted)
    free, private, pinned, evictable = before
    assert balance(cache) == (free - num_published, private, pinned, evictable + num_published)
    cache.release(other)
    cache.evict(48)
    assert balance(cache) == (48, 0, 0, 0)


def test_what_is_not_committed_returns_so_an_output_can_be_kept_out(make_cache):
    """Case 64."""
    cache = make_cache(16, 4)
    lease = acquire(cache, range(8))
    cache.commit(lease, 8)
    cache.append(lease, pack_tokens(range(100, 108)))
    cache.release(lease)
    assert match(cache, [*range(8), *range(100, 108)]).num_tokens == 8
    assert balance(cache) == (14, 0, 0, 2)


def test_what_is_told_is_told_once_and_nobody_can_change_it():
    """Cases 71, 73, 75: hashes are tuples, and the same blocks go under the same ones."""
    recorder = EventRecorder()
    config = CacheConfig(num_blocks=16, block_size=2)
    cache = RadixCache(config, observers=[recorder])
    insert(cache, [1, 2, 3, 4])
    (stored,) = recorder.take()
    assert isinstance(stored, BlockStored)
    assert stored.parent_block_hash is None
    assert isinstance(stored.block_hashes, tuple)
    assert len(stored.block_hashes) == 2
    insert(cache, [1, 2, 3, 4, 5])
    assert recorder.take() == []
    cache.evict(2)
    (removed,) = recorder.take()
    assert isinstance(removed, BlockRemoved)
    assert sorted(removed.block_hashes) == sorted(stored.block_hashes)
    cache.check()
    recorder.check(cache.tree)


def test_hashes_of_a_prefix_published_in_pieces_are_those_of_one_published_at_once():
    """Case 76: and publishing it a second time changes none."""
    told = []
    for steps in ((8,), (2, 4, 8), (2, 8)):
        recorder = EventRecorder()
        cache = RadixCache(CacheConfig(num_blocks=16, block_size=2), observers=[recorder])
        lease = acquire(cache, range(8))
        for num_tokens in (*steps, *steps):
            cache.commit(lease, num_tokens)
        insert(cache, [0, 1, 2, 3, 99, 98])  # cuts the edge
        hashes = [hash_ for event in recorder.take() for hash_ in event.block_hashes]
        told.append(hashes)
        cache.release(lease)
        cache.check()
        recorder.check(cache.tree)
    assert told[0] == told[1] == told[2]
    assert len(set(told[0])) == 5


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33])
def test_prompts_about_as_long_as_a_block_leave_their_whole_blocks_only(make_cache, num_tokens):
    """Cases 18 and 19."""
    cache = make_cache(4, 32)
    insert(cache, range(num_tokens))
    assert num_owned(cache) == num_tokens // 32
    assert balance(cache) == (4 - num_tokens // 32, 0, 0, num_tokens // 32)


def test_a_count_that_is_no_integer_is_refused_before_anything_changes():
    """The block table went on to name blocks that were free, and could be another's next."""
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=1))
    first, second = acquire(cache, [1, 2, 3]), acquire(cache, [1, 2, 3, 4])
    cache.commit(first, 3)
    with pytest.raises((TypeError, InvalidLease)):
        cache.commit(second, 4.0)
    cache.check()


def test_a_salt_that_is_no_text_does_not_swallow_the_events_of_others():
    """A lone surrogate in one namespace: the whole batch was gone, all others' events too."""
    recorder = EventRecorder()
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=1), observers=[recorder])
    insert(cache, [1, 2], A)
    with contextlib.suppress(CallerError):
        insert(cache, [1, 2], Namespace(salt="\ud800"))
    with contextlib.suppress(UnicodeEncodeError):
        assert recorder.batch(0.0)
        return
    assert recorder.num_pending
    cache.check()
