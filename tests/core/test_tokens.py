"""Packed tokens: the door where ids come in, and how packed runs compare."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixcache import (
    DEFAULT_NAMESPACE,
    CallerError,
    InvalidTokens,
    PrefixKey,
    pack_tokens,
    unpack_tokens,
)
from radixcache.tokens import common_prefix_len, num_tokens

LARGEST = 2**31 - 1


def test_packing_and_unpacking_give_the_same_ids_back():
    ids = [0, 1, 128_255, LARGEST]
    assert unpack_tokens(pack_tokens(ids)) == ids
    assert unpack_tokens(bytearray(pack_tokens(ids))) == ids
    assert unpack_tokens(b"") == []


def test_any_iterable_of_integers_can_be_packed():
    expected = pack_tokens([3, 4, 5])
    assert pack_tokens(range(3, 6)) == expected
    assert pack_tokens(token for token in (3, 4, 5)) == expected
    assert pack_tokens(np.array([3, 4, 5], np.int64)) == expected


@pytest.mark.parametrize(
    "ids", [[-1], [LARGEST + 1], [1.0], ["1"], [None], "12", [[1]], 5, [1, 2, -(2**31)]]
)
def test_anything_but_ids_from_0_to_the_largest_int32_is_the_callers_mistake(ids):
    with pytest.raises(InvalidTokens, match="token ids must") as mistake:
        pack_tokens(ids)
    assert isinstance(mistake.value, CallerError)
    assert isinstance(mistake.value, ValueError)


@pytest.mark.parametrize("ids", [b"abcd", bytearray(b"abc"), pack_tokens([1, 2])])
def test_bytes_are_not_mistaken_for_ids(ids):
    with pytest.raises(InvalidTokens):
        pack_tokens(ids)


def test_a_key_that_is_not_whole_tokens_is_refused():
    with pytest.raises(InvalidTokens):
        PrefixKey(DEFAULT_NAMESPACE, b"abcde")


def test_a_key_counts_its_tokens():
    key = PrefixKey.of([5, 6, 7])
    assert key.num_tokens == num_tokens(key.tokens) == 3
    assert key == PrefixKey.of([5, 6, 7])
    with pytest.raises(InvalidTokens):
        PrefixKey.of([-5])


def naive_common_prefix(key: list[int], offset: int, edge: list[int], limit: int) -> int:
    same = 0
    while same < min(limit, len(edge)) and offset + same < len(key):
        if key[offset + same] != edge[same]:
            break
        same += 1
    return same


def test_the_common_prefix_is_what_a_loop_over_tokens_finds():
    rng = random.Random(0)
    for _ in range(500):
        key = [rng.choice([0, 1, 256]) for _ in range(rng.randrange(12))]
        offset = rng.randrange(len(key) + 1)
        edge = key[offset : offset + rng.randrange(12)] + [rng.choice([0, 1]) for _ in range(3)]
        limit = rng.randrange(14)
        found = common_prefix_len(pack_tokens(key), offset, bytearray(pack_tokens(edge)), limit)
        assert found == naive_common_prefix(key, offset, edge, limit)


def test_ids_that_share_bytes_but_not_their_place_do_not_match():
    key, edge = pack_tokens([0, 256, 65536]), pack_tokens([1, 0, 0])
    assert common_prefix_len(key, 0, edge, 3) == 0
    assert common_prefix_len(pack_tokens([256, 256]), 0, pack_tokens([256, 65536]), 2) == 1


def test_a_growing_sequence_can_still_grow_after_it_was_compared():
    edge = bytearray(pack_tokens([1, 2, 3]))
    assert common_prefix_len(pack_tokens([1, 2, 9]), 0, edge, 3) == 2
    edge.extend(pack_tokens([4]))  # a comparison that still looked at the buffer would forbid it
    del edge[4:]
    assert unpack_tokens(edge) == [1]
