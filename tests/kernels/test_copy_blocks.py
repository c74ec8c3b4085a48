"""The contract of copy_blocks, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import copy_blocks, gather_blocks, scatter_blocks
from kernels.backend import QUANTISED_DTYPES


def table(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.permutations(range(6)),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def check_copy(
    backend: str, blocks: list[int], counts: list[int], dtype: torch.dtype, stacked: bool
) -> None:
    if stacked:  # as K and V of one tensor [layers, 2, ...]
        k_pools, v_pools = torch.randn(2, 2, 6, 4, 3, 5).to(dtype).unbind(1)
    else:
        k_pools, v_pools = torch.randn(2, 2, 6, 4, 3, 5).to(dtype)
    src, dst = blocks[: len(counts)], blocks[3 : 3 + len(counts)]
    expected = [k_pools.clone(), v_pools.clone()]
    for pools in expected:
        for source, target, count in zip(src, dst, counts, strict=True):
            pools[:, target, :count] = pools[:, source, :count]
    copy_blocks(k_pools, v_pools, table(*src), table(*dst), table(*counts), backend=backend)
    assert torch.equal(k_pools, expected[0])
    assert torch.equal(v_pools, expected[1])


def test_the_first_slots_of_each_source_reach_its_target_in_every_layer(backend: str) -> None:
    check_copy(backend)


def test_one_source_may_have_many_targets(backend: str) -> None:
    pools = torch.randn(2, 1, 4, 2, 1, 8)
    copy_blocks(*pools, table(0, 0), table(1, 3), table(2, 1), backend=backend)
    assert torch.equal(pools[:, :, 1], pools[:, :, 0])
    assert torch.equal(pools[:, :, 3, 0], pools[:, :, 0, 0])
    assert not torch.equal(pools[:, :, 3, 1], pools[:, :, 0, 1])


def test_a_count_past_the_block_is_refused() -> None:
    pools = torch.zeros(2, 1, 2, 4, 1, 8)
    with pytest.raises(ValueError, match=r"num_slots\[0\] is 5"):
        copy_blocks(*pools, table(0), table(1), table(5), backend="torch")


@settings(max_examples=30, deadline=None, database=None)
@given(
    st.permutations(range(5)),
    st.integers(0, 4),
    st.sampled_from([torch.float32, torch.bfloat16, *QUANTISED_DTYPES]),
    st.sampled_from([(1, 4), (3, 5), (2, 16)]),
    st.booleans(),
)
def check_staging(
    backend: str,
    blocks: list[int],
    count: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    stacked: bool,
) -> None:
    shape = (3, 2, 5, 4, *heads) if stacked else (2, 3, 5, 4, *heads)
    k_pools, v_pools = (torch.randn(shape) * 20).to(dtype).unbind(1 if stacked else 0)
    out, back = table(*blocks[:count]), table(*reversed(blocks[:count]))
    before = [pools.float().clone() for pools in (k_pools, v_pools)]
    staging = torch.zeros(count, 2, 3, 4, *heads).to(dtype)
    gather_blocks(k_pools, v_pools, out, staging, backend=backend)
    for part, pools in enumerate(before):
        assert torch.equal(staging[:, part].float(), pools[:, out].transpose(0, 1))
    scatter_blocks(staging, k_pools, v_pools, back, backend=backend)
    for pools, old in zip((k_pools, v_pools), before, strict=True):
        expected = old.clone()
        expected[:, back] = old[:, out]
        assert torch.equal(pools.float(), expected)


def test_blocks_travel_through_a_staging_buffer_unchanged(backend: str) -> None:
    check_staging(backend)


def test_a_staging_buffer_with_gaps_or_of_another_size_is_refused() -> None:
    pools = torch.zeros(2, 1, 2, 4, 1, 8)
    with pytest.raises(ValueError, match=r"staging has shape .* expected \[1, 2, 1, 4, 1, 8\]"):
        gather_blocks(*pools, table(0), torch.zeros(2, 2, 1, 4, 1, 8))
    gaps = torch.zeros(1, 2, 1, 4, 1, 16)[..., ::2]
    with pytest.raises(ValueError, match="staging has strides"):
        scatter_blocks(gaps, *pools, table(0))


def test_debugging_looks_at_the_blocks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS_DEBUG", "1")
    pools = torch.zeros(2, 1, 2, 4, 1, 8)
    with pytest.raises(IndexError, match=r"dst\[0\] is 2, expected 0 to 1"):
        copy_blocks(*pools, table(0), table(2), table(1))
    with pytest.raises(IndexError, match=r"blocks\[0\] is -1, expected 0 to 1"):
        gather_blocks(*pools, table(-1), torch.zeros(1, 2, 1, 4, 1, 8))
