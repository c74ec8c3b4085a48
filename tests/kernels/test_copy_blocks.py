"""The contract of copy_blocks, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import copy_blocks


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
