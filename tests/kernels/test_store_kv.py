"""The contract of store_kv, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import store_kv
from tests.support.paged_attention import LAYOUTS, new_pool


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1, 4), (3, 8), (2, 5)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(LAYOUTS),
    st.data(),
)
def check_store(
    backend: str,
    num_blocks: int,
    block_size: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    layout: str,
    data: st.DataObject,
) -> None:
    slots = st.integers(-2, num_blocks * block_size - 1)
    drawn = data.draw(st.lists(slots, max_size=8, unique_by=lambda s: s if s >= 0 else object()))
    k, v = torch.randn(2, len(drawn), *heads).to(dtype)
    pools = [new_pool(num_blocks, block_size, *heads, dtype, layout) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    for token, slot in enumerate(drawn):
        if slot >= 0:
            expected[0][slot // block_size, slot % block_size] = k[token]
            expected[1][slot // block_size, slot % block_size] = v[token]
    store_kv(k, v, *pools, torch.tensor(drawn, dtype=torch.int64), backend=backend)
    for pool, want in zip(pools, expected, strict=True):
        assert torch.equal(pool.isnan(), want.isnan())
        assert torch.equal(pool.nan_to_num(), want.nan_to_num())


def test_each_token_lands_in_its_slot_and_nowhere_else(backend: str) -> None:
    check_store(backend)


def test_values_may_come_through_any_strides(backend: str) -> None:
    qkv = torch.randn(4, 7, 16)
    k, v = qkv[:, 3:5], qkv[:, 5:7]
    pools = torch.zeros(2, 2, 2, 2, 16)
    store_kv(k, v, *pools, torch.tensor([3, 0, 2, 1]), backend=backend)
    assert torch.equal(pools[0].view(4, 2, 16), k[[1, 3, 2, 0]])
    assert torch.equal(pools[1].view(4, 2, 16), v[[1, 3, 2, 0]])


@pytest.mark.parametrize("num_heads", [1, 5])
def test_a_token_wider_than_one_program_is_stored_whole(backend: str, num_heads: int) -> None:
    k, v = torch.randn(2, 1, num_heads, 256)
    pools = torch.zeros(2, 3, 2, num_heads, 256)
    store_kv(k, v, *pools, torch.tensor([5]), backend=backend)
    assert torch.equal(pools[0, 2, 1], k[0])
    assert torch.equal(pools[1, 2, 1], v[0])
    assert pools[:, :2].count_nonzero() == 0


def test_storing_nothing_is_allowed(backend: str) -> None:
    pools = torch.zeros(2, 1, 1, 1, 4)
    store_kv(*torch.zeros(2, 0, 1, 4), *pools, torch.zeros(0, dtype=torch.int64), backend=backend)
    store_kv(*torch.ones(2, 1, 1, 4), *pools, torch.tensor([-1]), backend=backend)
    assert pools.count_nonzero() == 0


def test_a_slot_past_the_pool_is_refused() -> None:
    pools = torch.zeros(2, 2, 2, 1, 4)
    with pytest.raises(IndexError):
        store_kv(*torch.ones(2, 1, 1, 4), *pools, torch.tensor([4]), backend="torch")
