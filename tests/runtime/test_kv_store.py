"""The paged store: its layout, and block copies in their order."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixcache.lease import BlockCopy
from runtime.kv.store import KVStore
from runtime.plan import Difference
from tests.support.tiny_models import tiny_config

CONFIG = tiny_config(num_layers=2, num_heads=2, num_kv_heads=2, head_dim=4)
NUM_BLOCKS, BLOCK_SIZE = 5, 3


def filled_store() -> KVStore:
    store = KVStore(
        CONFIG,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    store.pool.copy_(torch.arange(store.pool.numel()).view(store.pool.shape))
    return store


@st.composite
def block_copies(draw_from) -> BlockCopy:
    src = draw_from(st.integers(0, NUM_BLOCKS - 1))
    dst = draw_from(st.integers(0, NUM_BLOCKS - 1).filter(lambda block: block != src))
    return BlockCopy(src, dst, draw_from(st.integers(0, BLOCK_SIZE)))


@given(copies=st.lists(block_copies(), max_size=8))
@example(copies=[BlockCopy(0, 1, 3), BlockCopy(1, 2, 3)])  # a chain
@example(copies=[BlockCopy(0, 1, 3), BlockCopy(2, 0, 3)])  # a source that is overwritten after
@example(copies=[BlockCopy(0, 1, 3), BlockCopy(2, 1, 1)])  # one target twice
@example(copies=[BlockCopy(0, 1, 3), BlockCopy(1, 0, 3), BlockCopy(0, 1, 2)])  # there and back
@settings(max_examples=200, deadline=None)
def test_copies_are_carried_out_in_order_in_every_layer(copies):
    store = filled_store()
    expected = store.pool.clone()
    for copy in copies:
        for layer in range(CONFIG.num_layers):
            for kind in range(2):
                for slot in range(copy.num_tokens):
                    source = expected[layer, kind, copy.src, slot].clone()
                    expected[layer, kind, copy.dst, slot] = source
    store.copy(tuple(copies))
    assert torch.equal(store.pool, expected)


def test_a_layer_is_a_window_on_the_pool():
    store = filled_store()
    k, v = store.layer(1)
    assert k.shape == v.shape == (NUM_BLOCKS, BLOCK_SIZE, CONFIG.num_kv_heads, CONFIG.head_dim)
    k[2, 1] = -1.0
    v[3, 0] = -2.0
    assert (store.pool[1, 0, 2, 1] == -1).all()
    assert (store.pool[1, 1, 3, 0] == -2).all()
    assert (store.pool[0] >= 0).all()


def test_the_store_is_as_large_as_the_config_says():
    store = filled_store()
    num_tokens = NUM_BLOCKS * BLOCK_SIZE
    assert store.num_bytes == num_tokens * CONFIG.kv_bytes_per_token(4)


def test_the_first_difference_is_told_by_block_and_then_by_layer():
    store = filled_store()
    store.pool[:, :, 3:5] = store.pool[:, :, 1:3]
    assert store.first_difference([1, 2], [3, 4], 6) is None
    store.pool[0, 1, 4, 2, 0, 0] += 1
    store.pool[1, 0, 4, 0, 1, 3] += 1
    assert store.first_difference([1, 2], [3, 4], 6) == Difference(block=1, layer=0)
    assert store.first_difference([1, 2], [3, 4], 5) == Difference(block=1, layer=1)
    assert store.first_difference([1, 2], [3, 4], 3) is None
    store.pool[1, 1, 3, 2, 1, 0] += 1
    assert store.first_difference([1, 2], [3, 4], 6) == Difference(block=0, layer=1)


def test_bits_are_compared_and_not_numbers():
    store = filled_store()
    store.pool[:, :, :2] = torch.nan
    assert store.first_difference([0], [1], 3) is None
    store.pool[:, :, :2] = 0.0
    store.pool[1, 1, 1, 2, 1, 3] = -0.0
    assert store.first_difference([0], [1], 3) == Difference(block=0, layer=1)
