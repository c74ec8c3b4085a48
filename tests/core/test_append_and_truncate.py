"""Append and truncate: room at the end of a sequence, taken and given back."""

from __future__ import annotations

import pytest

from radixcache import (
    BlockCopy,
    InvalidLease,
    InvalidTokens,
    OutOfBlocks,
    pack_tokens,
    unpack_tokens,
)
from tests.core.conftest import new_cache
from tests.core.serving import acquire, insert, match
from tests.support.content_oracle import ContentOracle


def test_a_block_is_taken_only_when_a_sequence_crosses_its_edge(make_cache):
    cache = make_cache(num_blocks=64, block_size=64)
    leases = [acquire(cache, range(number * 1000, number * 1000 + 64)) for number in range(8)]
    assert cache.stats().num_free == 56
    for lease in leases:
        assert cache.append(lease, pack_tokens([7])) == ()
    assert cache.stats().num_free == 48, "8 blocks of 64, not 8 tokens"
    for lease in leases:
        cache.append(lease, pack_tokens([7] * 63))
    assert cache.stats().num_free == 48


@pytest.mark.parametrize("tokens", [[4, 4, 4, 4], [400] * 8, [1], b"\1\0"])
def test_what_is_not_packed_tokens_is_refused_and_the_lease_is_as_it_was(tokens):
    cache = new_cache(block_size=2)
    lease = acquire(cache, [1, 2, 3])
    with pytest.raises(InvalidTokens):
        cache.append(lease, tokens)
    assert unpack_tokens(lease.tokens) == [1, 2, 3]
    cache.check()


def test_appending_nothing_changes_nothing(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, [1, 2, 3])
    branch = cache.fork(lease)
    before = cache.stats()
    assert cache.append(branch, b"") == ()
    assert cache.stats() == before


def test_a_refused_append_leaves_the_lease_as_it_was(make_cache):
    cache = make_cache(num_blocks=2, block_size=2)
    lease = acquire(cache, [1, 2, 3])
    table = lease.block_table.tolist()
    with pytest.raises(OutOfBlocks) as refusal:
        cache.append(lease, pack_tokens([4, 5]))
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (1, 0, 0)
    assert unpack_tokens(lease.tokens) == [1, 2, 3]
    assert lease.block_table.tolist() == table
    assert cache.append(lease, pack_tokens([4])) == ()


def test_a_refused_append_to_a_shared_block_keeps_the_share(make_cache):
    cache = make_cache(num_blocks=2, block_size=2)
    lease = acquire(cache, [1, 2, 3])
    branch = cache.fork(lease)
    with pytest.raises(OutOfBlocks):
        cache.append(branch, pack_tokens([4]))
    assert branch.block_table == lease.block_table
    assert branch.num_tokens == 3


def test_append_makes_room_by_evicting(make_cache):
    cache = make_cache(num_blocks=4)
    insert(cache, [1, 2])
    lease = acquire(cache, [5, 6])
    cache.append(lease, pack_tokens([7]))
    assert match(cache, [1, 2]).num_tokens == 1


def test_rejected_drafts_give_their_blocks_back(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, range(6))
    before = cache.stats()
    cache.append(lease, pack_tokens([100, 101, 102, 103, 104]))  # drafts
    assert cache.stats().num_free == before.num_free - 1
    cache.truncate(lease, 7)  # one accepted, and the edge at 8 not reached
    assert cache.stats() == before
    assert unpack_tokens(lease.tokens) == [*range(6), 100]
    cache.append(lease, pack_tokens([100, 101, 102, 103, 104]))
    cache.truncate(lease, 9)
    assert cache.stats().num_free == before.num_free - 1
    assert len(lease.block_table) == 3


def test_truncating_to_the_present_length_changes_nothing(make_cache):
    cache = make_cache(block_size=2)
    lease = acquire(cache, [1, 2, 3])
    before = cache.stats()
    cache.truncate(lease, 3)
    assert cache.stats() == before


def test_a_prompt_can_be_cut_to_nothing_but_not_below_what_is_committed(make_cache):
    cache = make_cache(block_size=2)
    lease = acquire(cache, range(5))
    cache.truncate(lease, 0)
    assert (lease.num_tokens, len(lease.block_table)) == (0, 0)
    cache.append(lease, pack_tokens(range(5)))
    cache.commit(lease, 5)
    for num_tokens in (3, 0, -1, 6):
        with pytest.raises(InvalidLease, match="can be cut to 4 … 5 tokens"):
            cache.truncate(lease, num_tokens)
    cache.truncate(lease, 4)
    assert lease.num_tokens == 4


def test_a_branch_gets_its_own_copy_of_the_part_full_block_it_writes_to(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, range(6))
    branch = cache.fork(lease)
    shared = lease.block_table[1]
    (copy,) = cache.append(branch, pack_tokens([90]))
    assert copy == BlockCopy(src=shared, dst=branch.block_table[1], num_tokens=2)
    assert branch.block_table[0] == lease.block_table[0]
    assert lease.block_table[1] == shared != branch.block_table[1]
    assert cache.append(lease, pack_tokens([91])) == (), "the other one has it to itself now"


def test_the_last_of_several_branches_writes_in_place(make_cache):
    cache = make_cache(block_size=4)
    leases = [acquire(cache, range(6))]
    leases += [cache.fork(leases[0]) for _ in range(3)]
    copies = [cache.append(lease, pack_tokens([90])) for lease in leases]
    assert [len(owed) for owed in copies] == [1, 1, 1, 0]
    assert len({lease.block_table[1] for lease in leases}) == 4


def test_a_full_block_is_shared_without_a_copy(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, range(8))
    branch = cache.fork(lease)
    assert cache.append(branch, pack_tokens([90])) == ()
    assert branch.block_table[:2] == lease.block_table


def test_cutting_back_into_a_block_that_was_published_meanwhile_copies_it(make_cache):
    cache = make_cache(block_size=4)
    store = ContentOracle(num_blocks=16, block_size=4)
    lease = acquire(cache, range(8))
    branch = cache.fork(lease)
    store.compute(lease, 0, 8)
    cache.commit(lease, 8)
    cache.release(lease)
    cache.truncate(branch, 6)
    copies = cache.append(branch, pack_tokens([90, 91]))
    assert [copy.num_tokens for copy in copies] == [2]
    store.owe(copies)
    store.compute(branch, 6, 8)
    store.check_lease(branch, 8)
    found = match(cache, range(8))
    assert found.num_tokens == 8
    store.check_match(branch.namespace, range(8), found)


def test_the_copies_of_one_step_can_chain_so_their_order_counts(make_cache):
    cache = make_cache(block_size=4)
    store = ContentOracle(num_blocks=16, block_size=4)
    lease = acquire(cache, [1, 2])
    store.compute(lease, 0, 2)
    branch = cache.fork(lease)
    (first,) = cache.append(branch, pack_tokens([3]))
    twig = cache.fork(branch)
    (second,) = cache.append(twig, pack_tokens([4]))
    assert second.src == first.dst
    store.owe([first, second])
    store.check_lease(twig, 2)
