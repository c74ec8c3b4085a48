"""A manifest brings the whole tree back, or is refused whole."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import (
    CacheConfig,
    InvalidSnapshot,
    Namespace,
    PrefixKey,
    RadixCache,
    dump_tree,
    load_tree,
)
from radixcache.snapshot import _HEADER_BYTES, MAGIC, VERSION
from tests.core.serving import acquire, insert

TENANT = Namespace(salt="tenant")


def filled(block_size: int = 2) -> RadixCache:
    cache = RadixCache(CacheConfig(num_blocks=32, block_size=block_size))
    insert(cache, range(8))
    insert(cache, [*range(4), 50, 51, 52, 53])
    insert(cache, [7, 7, 7, 7], TENANT)
    return cache


def empty(num_blocks: int = 32, block_size: int = 2) -> RadixCache:
    return RadixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))


def sealed(body: object) -> bytes:
    """A manifest whose header is right, whatever the body says."""
    packed = msgspec.msgpack.encode(body)
    return MAGIC + VERSION.to_bytes(2, "big") + sha256(packed).digest() + packed


def test_what_was_cached_is_cached_again_under_other_block_ids() -> None:
    old, new = filled(), empty()
    insert(new, [1, 2])
    new.evict(9)  # the free list of the new pool is in another order
    mapping = load_tree(new, dump_tree(old))
    for tokens, namespace in (
        (list(range(8)), Namespace()),
        ([*range(4), 50, 51, 52, 53], Namespace()),
        ([7, 7, 7, 7], TENANT),
    ):
        before = old.match(PrefixKey.of(tokens, namespace))
        after = new.match(PrefixKey.of(tokens, namespace))
        assert after.num_tokens == before.num_tokens == len(tokens)
        assert after.block_ids == tuple(mapping[block] for block in before.block_ids)
    new.check()
    assert new.stats().num_evictable == old.stats().num_evictable


def test_the_order_of_eviction_is_kept() -> None:
    old, new = filled(), empty()
    load_tree(new, dump_tree(old))
    for _ in range(8):
        old.evict(1)
        new.evict(1)
        assert {n.tokens for n in old.view().nodes} == {n.tokens for n in new.view().nodes}
        new.check()


def test_what_nobody_comes_back_to_goes_first_after_loading_too() -> None:
    old, new = filled(), empty()
    insert(old, [7, 7, 7, 7, 8, 8], TENANT)
    assert old.abandon(PrefixKey.of([7, 7, 7, 7, 8, 8], TENANT)) == 3
    load_tree(new, dump_tree(old))
    new.check()
    assert new.evict(3) == 3
    assert new.match_len(PrefixKey.of([7, 7], TENANT)) == 0
    assert new.match_len(PrefixKey.of(list(range(8)))) == 8


def test_what_is_used_after_loading_is_newer_than_all_that_was_loaded() -> None:
    new = empty()
    load_tree(new, dump_tree(filled()))
    new.release(acquire(new, [*range(8), 9]))
    new.evict(4)
    assert new.match(PrefixKey.of(list(range(8)))).num_tokens == 8


def test_blocks_that_are_not_published_are_left_out() -> None:
    old, new = filled(), empty()
    lease = acquire(old, [90, 91, 92])
    assert len(load_tree(new, dump_tree(old))) == old.stats().num_evictable
    old.release(lease)


def test_an_empty_tree_is_a_manifest_too() -> None:
    assert load_tree(empty(), dump_tree(empty())) == {}


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 400), flip=st.integers(1, 255))
def test_a_flipped_byte_is_refused_whole(place: int, flip: int) -> None:
    manifest = bytearray(dump_tree(filled()))
    manifest[place % len(manifest)] ^= flip
    cache = empty()
    with pytest.raises(InvalidSnapshot):
        load_tree(cache, bytes(manifest))
    assert cache.stats().num_free == 32
    cache.check()


@pytest.mark.parametrize("length", [0, 3, 6, 8, 39, 40, 41, 100])
def test_a_manifest_cut_short_is_refused(length: int) -> None:
    with pytest.raises(InvalidSnapshot):
        load_tree(empty(), dump_tree(filled())[:length])


def node(**changes: object) -> list[object]:
    fields = {
        "parent": -1,
        "namespace": {"model": "", "adapter": "", "salt": "", "epoch": 0},
        "edge": bytes(8),
        "block_ids": [0],
        "last_access": 1,
        "created": 1,
        "num_hits": 0,
        "is_abandoned": False,
    }
    return list((fields | changes).values())


WRONG = {
    "another block size": [3, []],
    "a parent that comes later": [2, [node(parent=0)]],
    "a parent before the first": [2, [node(parent=-2)]],
    "a block named twice": [2, [node(), node(edge=bytes([1] * 8))]],
    "an edge of half a block": [2, [node(edge=bytes(4))]],
    "an edge without blocks": [2, [node(edge=b"", block_ids=[])]],
    "siblings that begin alike": [2, [node(), node(block_ids=[1])]],
    "a child in another namespace": [
        2,
        [node(), node(parent=0, block_ids=[1], namespace={"salt": "x"})],
    ],
    "a child in use below what is abandoned": [
        2,
        [node(is_abandoned=True), node(parent=0, block_ids=[1])],
    ],
    "more blocks than the pool has": [2, [node(edge=bytes(8 * 33), block_ids=list(range(33)))]],
    "another form": {"nodes": []},
    "a field too many": [2, [], 5],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_that_is_no_tree_for_this_cache_is_refused(name: str) -> None:
    cache = empty()
    with pytest.raises(InvalidSnapshot):
        load_tree(cache, sealed(WRONG[name]))
    assert cache.stats().num_free == 32
    cache.check()


def test_the_body_used_above_is_taken_when_nothing_is_wrong_with_it() -> None:
    assert load_tree(empty(), sealed([2, [node()]])) == {0: 0}


def test_another_version_and_a_full_cache_are_refused() -> None:
    manifest = bytearray(dump_tree(filled()))
    manifest[len(MAGIC) + 1] = 9
    with pytest.raises(InvalidSnapshot, match="version 9"):
        load_tree(empty(), bytes(manifest))
    with pytest.raises(InvalidSnapshot, match="empty"):
        load_tree(filled(), dump_tree(filled()))
    assert _HEADER_BYTES == 40
