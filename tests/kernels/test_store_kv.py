"""The contract of store_kv, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import store_kv
from kernels.backend import QUANTISED_DTYPES
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


MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def slots_by_token(pool: torch.Tensor) -> torch.Tensor:
    return pool.flatten(0, 1).float()


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_by_slot_is_chosen_so_that_the_largest_value_fits(
    backend: str, dtype: torch.dtype, head_dim: int, source: torch.dtype
) -> None:
    k, v = (torch.randn(2, 5, 3, head_dim) * 7).to(source)
    k[2, 1] = 0  # a head of zeros divides nothing by zero
    pools = torch.zeros(2, 3, 2, 3, head_dim).to(dtype)
    scales = torch.full((2, 3, 2, 3), float("nan"))
    slots = torch.tensor([4, 0, -1, 3, 1])
    store_kv(k, v, *pools, slots, k_scale=scales[0], v_scale=scales[1], backend=backend)
    written = slots[slots >= 0]
    most = MOST[dtype]
    steps = torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.5 / most
    for x, pool, scale in zip((k, v), pools, scales, strict=True):
        wide = x[slots >= 0].float()
        found = scale.flatten(0, 1)
        assert torch.equal(found[written], (wide.abs().amax(-1) / most).clamp_min(1e-12))
        assert found.isnan().sum() == (6 - len(written)) * 3  # no other scale was written
        back = slots_by_token(pool)[written] * found[written][..., None]
        error = (back - wide).abs()
        allowed = wide.abs() if dtype.is_floating_point else wide.abs().amax(-1, keepdim=True)
        smallest = found[written][..., None] * 2**-9  # below it float8 has no more exponents
        assert (error <= allowed * steps * 1.01 + smallest).all()


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
def test_a_scale_by_head_is_read_and_values_beyond_it_saturate(
    backend: str, dtype: torch.dtype
) -> None:
    k = torch.tensor([[[1.0, -2.5, 3.5, 1e9], [0.5, 1.0, 1.5, -1e9]]])
    pools = torch.zeros(2, 1, 1, 2, 4).to(dtype)
    scale = torch.tensor([1.0, 0.5])
    store_kv(k, k, *pools, torch.tensor([0]), k_scale=scale, v_scale=scale, backend=backend)
    most = MOST[dtype]
    expected = [[1, -2.5, 3.5, most], [1, 2, 3, -most]]
    if dtype == torch.int8:
        expected[0][1:3] = [-2, 4]  # halves go to the even side
    for pool in pools:
        assert torch.equal(pool[0, 0].float(), torch.tensor(expected))


def test_scales_come_with_quantised_pools_and_only_with_them() -> None:
    k, plain = torch.zeros(1, 1, 4), torch.zeros(2, 1, 1, 1, 4)
    small, scale, slot = plain.to(torch.int8), torch.ones(1), torch.tensor([0])
    with pytest.raises(ValueError, match=r"k_scale is None, but pools of torch\.int8 need"):
        store_kv(k, k, *small, slot)
    with pytest.raises(ValueError, match=r"k_scale is given, but pools of torch\.float32"):
        store_kv(k, k, *plain, slot, k_scale=scale, v_scale=scale)
    with pytest.raises(ValueError, match="scale both by head, or both by slot and head"):
        store_kv(k, k, *small, slot, k_scale=scale, v_scale=torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match=r"v_scale has shape \[2\], expected \[1\]"):
        store_kv(k, k, *small, slot, k_scale=scale, v_scale=torch.ones(2))


def test_debugging_looks_at_the_slots_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS_DEBUG", "1")
    pools = torch.zeros(2, 2, 2, 1, 4)
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] is 4, expected .* to 3"):
        store_kv(*torch.ones(2, 2, 1, 4), *pools, torch.tensor([0, 4]))
    assert pools.count_nonzero() == 0
