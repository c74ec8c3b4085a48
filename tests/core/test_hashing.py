"""Block hashes: those of vLLM where it has them, and never the same for two namespaces."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import CacheConfig, InvariantViolation, Namespace, RadixCache, pack_tokens
from radixcache.hashing import (
    DIGEST_BYTES,
    ROOT_HASH,
    BlockHasher,
    ChainTable,
    encode_cbor,
    wire_int,
)
from tests.core.serving import insert
from tests.support.indexer import plain_cbor, plain_hash

PLAIN = Namespace()
GOLDEN_ROOT = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
GOLDEN_BLOCKS = [
    "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749",
    "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c",
]
GOLDEN_SALTED = "4e31e1ced73eb044a95997f0109d0ddab3d9145878214f1a0ee37c048b397859"
GOLDEN_ADAPTED = "8197107baf430f7cae998e7d0478285e7ffc745b2972fac1fddad421bc54a1d2"
"""Computed by vLLM 0.32's own `sha256_cbor` for blocks of 16: tokens 0 … 15, then 16 … 31."""

ANY_TOKEN = st.one_of(
    st.sampled_from((0, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1)),
    st.integers(0, 300),
    st.integers(0, 2**31 - 1),
)


def hashed(namespace: Namespace, num_tokens: int, hasher: BlockHasher | None = None) -> list[str]:
    hasher = hasher or BlockHasher()
    tokens = pack_tokens(range(num_tokens))
    return [digest.hex() for digest in hasher.hashes(namespace, tokens, block_size=16)]


def test_the_root_is_that_of_vllm():
    assert ROOT_HASH.hex() == GOLDEN_ROOT


def test_plain_blocks_hash_as_in_vllm():
    assert hashed(PLAIN, 32) == GOLDEN_BLOCKS


def test_a_salted_block_hashes_as_in_vllm():
    assert hashed(Namespace(salt="tenant-a"), 16) == [GOLDEN_SALTED]


def test_an_adapted_block_hashes_as_in_vllm():
    hasher = BlockHasher(adapter_paths={"sql": "/adapters/sql"})
    assert hashed(Namespace(adapter="sql"), 16, hasher) == [GOLDEN_ADAPTED]


def test_tokens_left_over_are_no_block():
    assert hashed(PLAIN, 47) == GOLDEN_BLOCKS
    assert hashed(PLAIN, 15) == []


def test_a_chain_that_is_taken_up_again_is_the_same_chain():
    hasher, tokens = BlockHasher(), pack_tokens(range(200))
    for namespace in (PLAIN, Namespace(adapter="a", salt="b", epoch=1)):
        whole = hasher.hashes(namespace, tokens, block_size=4)
        for cut in (1, 3, 40):
            tail = tokens[cut * 16 :]
            rest = hasher.hashes(namespace, tail, block_size=4, parent=whole[cut - 1])
            assert rest == whole[cut:]


def test_the_wire_takes_the_low_64_bits_big_endian_and_unsigned():
    digest = bytes.fromhex(GOLDEN_BLOCKS[1])
    assert wire_int(digest) == 0xF892553BEF84EF0C
    assert wire_int(b"\xff" * 32) == 2**64 - 1


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(ids=st.lists(ANY_TOKEN, max_size=90), block_size=st.sampled_from((1, 2, 3, 16)))
def test_any_run_hashes_as_it_does_item_by_item(ids, block_size):
    namespace = Namespace(adapter="é", salt="s" * 300, epoch=2)
    hashes = BlockHasher().hashes(namespace, pack_tokens(ids), block_size=block_size)
    ends = range(block_size, len(ids) + 1, block_size)
    assert hashes == [plain_hash(namespace, tuple(ids[:end]), block_size) for end in ends]


def test_a_long_run_is_encoded_as_a_short_one():
    rng = random.Random(0)
    ids = [rng.randrange(2 ** rng.randrange(1, 32)) for _ in range(4096)]
    hasher = BlockHasher()
    parent, one_by_one = b"", []
    for start in range(0, len(ids), 16):
        block = pack_tokens(ids[start : start + 16])
        parent = hasher.hashes(PLAIN, block, block_size=16, parent=parent)[0]
        one_by_one.append(parent)
    assert hasher.hashes(PLAIN, pack_tokens(ids), block_size=16) == one_by_one


NUMBERS = st.one_of(st.integers(0, 70_000), st.integers(0, 2**64 - 1))
ITEMS = st.recursive(
    st.one_of(st.none(), NUMBERS, st.binary(max_size=300), st.text(max_size=300)),
    lambda items: st.lists(items, max_size=30).map(tuple),
    max_leaves=30,
)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(item=ITEMS)
def test_cbor_is_as_when_written_item_by_item(item):
    assert encode_cbor(item) == plain_cbor(item)


@pytest.mark.parametrize(
    ("item", "encoded"),
    [
        (23, "17"),
        (24, "1818"),
        (1000, "1903e8"),
        (1_000_000, "1a000f4240"),
        (2**64 - 1, "1bffffffffffffffff"),
        (b"\x01\x02\x03\x04", "4401020304"),
        ("\u00fc", "62c3bc"),
        ((1, (2, 3)), "8201820203"),
        (None, "f6"),
    ],
)
def test_cbor_is_as_in_the_examples_of_rfc_8949(item, encoded):
    assert encode_cbor(item).hex() == encoded


def test_no_two_namespaces_share_a_hash():
    names = ("", "a", "lora", "cache_salt", "é")
    spaces = [
        Namespace(model=model, adapter=adapter, salt=salt, epoch=epoch)
        for model, adapter, salt, epoch in product(names, names, names, (0, 1, 97))
    ]
    tokens = pack_tokens(range(4))
    for hasher in (
        BlockHasher(),
        BlockHasher(model="a"),
        BlockHasher(adapter_paths={"a": "", "lora": "cache_salt"}),
    ):
        hashes = [hasher.hashes(space, tokens, block_size=2) for space in spaces]
        assert len({digest for pair in hashes for digest in pair}) == 2 * len(spaces)


def test_the_model_of_the_engine_leaves_no_mark():
    hasher = BlockHasher(model="llama")
    assert hashed(Namespace(model="llama"), 32, hasher) == GOLDEN_BLOCKS
    assert hashed(PLAIN, 32, hasher) != GOLDEN_BLOCKS


def test_salt_model_and_epoch_mark_the_first_block_and_an_adapter_every_block():
    first, later = BlockHasher().extra_keys(Namespace(model="m", adapter="a", salt="s", epoch=3))
    assert first == (("lora", "a"), ("cache_salt", "s"), ("model", "m"), ("epoch", 3))
    assert later == (("lora", "a"),)
    assert BlockHasher().extra_keys(PLAIN) == ((), ())


def test_an_adapter_may_be_loaded_after_the_hasher_is_made():
    paths: dict[str, str] = {}
    hasher = BlockHasher(adapter_paths=paths)
    paths["sql"] = "/adapters/sql"
    assert hashed(Namespace(adapter="sql"), 16, hasher) == [GOLDEN_ADAPTED]


@pytest.fixture
def table() -> ChainTable:
    return ChainTable(BlockHasher().hashes, DIGEST_BYTES)


def spoiled(table: ChainTable) -> RadixCache:
    """A cache with a prompt of its own and two that part after a block, in the table."""
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=2), observers=[table])
    for ids in ([1, 2, 3, 4], [1, 2, 5, 6, 7, 8], [9, 9]):
        insert(cache, ids)
    table.check(cache.tree)
    return cache


def test_the_check_of_a_table_finds_a_node_that_is_gone(table):
    cache = spoiled(table)
    cache.room.observers = ()
    cache.evict(1)
    with pytest.raises(InvariantViolation, match=r"off the tree|not those"):
        table.check(cache.tree)


def test_the_check_of_a_table_finds_a_wrong_hash(table):
    cache = spoiled(table)
    node = next(node for node in cache.tree.walk() if node.is_leaf)
    node.edge = bytes([node.edge[0] ^ 1]) + node.edge[1:]
    with pytest.raises(InvariantViolation, match="not those"):
        table.check(cache.tree)


def test_the_check_of_a_table_finds_a_node_whose_parent_is_not_known(table):
    cache = spoiled(table)
    inner = next(node for node in cache.tree.walk() if node.parent and node.children)
    table.removed(inner, len(inner.block_ids))
    with pytest.raises(InvariantViolation, match="parent"):
        table.check(cache.tree)


def test_a_cleared_table_lists_every_block_before_its_parent(table):
    spoiled(table)
    hasher = BlockHasher()
    listed = [digest for run in table.clear() for digest in run]
    assert len(listed) == 5
    for ids in ([1, 2, 3, 4], [1, 2, 5, 6, 7, 8], [9, 9]):
        chain = hasher.hashes(PLAIN, pack_tokens(ids), block_size=2)
        places = [listed.index(digest) for digest in chain]
        assert places == sorted(places, reverse=True)
    assert table.clear() == []
