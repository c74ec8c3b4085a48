"""The pool: what is free, and that nothing is freed that is not owned."""

from __future__ import annotations

from array import array

import pytest

from radixcache import InvariantViolation
from radixcache.pool import BlockPool


def state(pool: BlockPool) -> tuple[list[int], list[int]]:
    return pool.free_ids(), [pool.refcount(block) for block in range(pool.capacity)]


def test_blocks_are_handed_out_from_the_lowest_id_on():
    pool = BlockPool(4)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    assert pool.allocate(0).tolist() == []
    assert pool.num_free == 1


def test_a_block_comes_free_with_its_last_owner():
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.share(ids)
    assert pool.release(ids) == 0
    assert pool.release(ids) == 2
    assert pool.num_free == 4


def test_some_of_the_blocks_named_may_come_free_and_others_not():
    pool = BlockPool(4)
    pool.allocate(3)
    pool.share([1])
    assert pool.release([0, 1, 2]) == 2
    assert sorted(pool.free_ids()) == [0, 2, 3]
    assert pool.refcount(1) == 1


@pytest.mark.parametrize("verb", ["share", "release"])
@pytest.mark.parametrize(
    ("block_ids", "complaint"),
    [
        ([0, 1, 0], "named twice"),
        ([0, 4], "no such block"),
        ([-1, 0], "no such block"),
        ([0, 3], "a free block"),
    ],
)
def test_a_wrong_id_is_refused_before_anything_changes(verb, block_ids, complaint):
    pool = BlockPool(4)
    pool.allocate(3)
    before = state(pool)
    with pytest.raises(InvariantViolation, match=complaint):
        getattr(pool, verb)(block_ids)
    assert state(pool) == before


def test_a_block_freed_twice_is_refused():
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.release(ids)
    with pytest.raises(InvariantViolation, match="a free block"):
        pool.release(ids[:1])
    assert sorted(pool.free_ids()) == [0, 1, 2, 3]


def test_more_blocks_than_are_free_are_refused():
    pool = BlockPool(4)
    pool.allocate(3)
    before = state(pool)
    with pytest.raises(InvariantViolation, match="2 blocks taken, but only 1 are free"):
        pool.allocate(2)
    assert state(pool) == before


@pytest.mark.parametrize(
    "pieces", [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[3, 4], [0, 1, 2]]]
)
def test_freeing_in_pieces_or_at_once_gives_the_same_free_blocks(pieces):
    pool = BlockPool(6)
    pool.allocate(5)
    assert sum(pool.release(array("i", piece)) for piece in pieces) == 5
    assert sorted(pool.free_ids()) == list(range(6))
    assert sorted(pool.allocate(6)) == list(range(6))


def test_what_was_handed_out_can_be_changed_without_touching_the_pool():
    pool = BlockPool(4)
    ids = pool.allocate(2)
    ids[0] = 3
    assert [pool.refcount(block) for block in range(4)] == [1, 1, 0, 0]
    assert sorted(pool.free_ids()) == [2, 3]
