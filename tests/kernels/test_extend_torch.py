"""The torch backend of extend_attention: what the contract suite does not reach.

The sizes of the real model, both thread counts, plans, and the cut into products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import (
    ExtendPlan,
    Scratch,
    _extend_cut,
    _extend_plan,
    _extend_torch,
    extend_attention,
    plan_extend,
)
from tests.support.paged_attention import Step, Suffix, build_step, dense_attention, random_suffix

SMOL = (3, 3, 64)
LENGTH = 2 * _extend_cut.TILE + 90


def attend(step: Step, **keywords: object) -> list[torch.Tensor]:
    return step.run(extend_attention, scale=0.125, backend="torch", **keywords)


def plan_of(step: Step, scratch: Scratch | None = None) -> ExtendPlan:
    plan = plan_extend(
        step.k_pool,
        step.block_table,
        step.seq_lens,
        step.q_start,
        num_heads=step.q.shape[1],
        backend="torch",
        scratch=scratch,
    )
    assert plan is not None
    return plan


@contextmanager
def tile_of(size: int, **budgets: int) -> Iterator[None]:
    """Shrink the key tile, to meet many tiles with few tokens."""
    with (
        mock.patch.multiple(_extend_cut, TILE=size, **budgets),
        mock.patch.object(_extend_plan, "TILE", size),
        mock.patch.object(_extend_torch, "TILE", size),
    ):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def check_cuts(generator: torch.Generator, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    whole = random_suffix(generator, LENGTH, LENGTH, heads=heads, dtype=dtype)
    [expected] = attend(build_step([whole], generator))
    cuts = [range(0, LENGTH, 64), range(0, LENGTH, 200), [0, 1, 3, 10, 255, 256, 300, 511, 513]]
    for starts in cuts:
        for start, end in pairwise([*starts, LENGTH]):
            [got] = attend(build_step([whole.first(end, end - start)], generator, block_size=24))
            assert torch.equal(got, expected[start:end]), (start, end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_shape_of_smollm_is_exact_at_any_cut(
    dtype: torch.dtype, num_threads: int, generator: torch.Generator
) -> None:
    check_cuts(generator, SMOL, dtype)


@pytest.mark.parametrize("heads", [(2, 4, 128), (1, 8, 80), (2, 1, 16), (1, 2, 256)], ids=str)
def test_other_shapes_are_exact_at_any_cut(
    heads: tuple[int, int, int], generator: torch.Generator
) -> None:
    check_cuts(generator, heads, torch.float32)


@pytest.mark.parametrize("num_queries", [1, 2, 5, 10])
def test_decode_in_a_batch_is_exact(
    num_queries: int, num_threads: int, generator: torch.Generator
) -> None:
    lengths = [LENGTH, 10, 256, 257, 300, 40, 512, 513]
    batch = [
        random_suffix(generator, num_queries, n, heads=SMOL, dtype=torch.float32) for n in lengths
    ]
    together = attend(build_step(batch, generator))
    for got, suffix in zip(together, batch, strict=True):
        [alone] = attend(build_step([suffix], generator))
        assert torch.equal(got, alone)


def family(generator: torch.Generator, shared: int, owns: list[int]) -> list[Suffix]:
    """Sequences of one query each that begin alike."""
    prefix = random_suffix(generator, 0, shared, heads=SMOL, dtype=torch.float32)
    members = []
    for own in owns:
        member = random_suffix(generator, 1, shared + own, heads=SMOL, dtype=torch.float32)
        member.k[:shared], member.v[:shared] = prefix.k, prefix.v
        members.append(member)
    return members


def test_shared_tiles_are_gathered_once_and_change_nothing(
    num_threads: int, generator: torch.Generator
) -> None:
    members = family(generator, 528, [1, 30, 300, 7, 250, 12])
    step = build_step(members, generator, num_shared_blocks=528 // 16)
    [gather] = plan_of(step).gathers
    assert gather.products[0].num_shared == 2
    assert gather.num_tiles == 2 + sum(
        math.ceil((528 + n) / 256) - 2 for n in [1, 30, 300, 7, 250, 12]
    )
    for got, suffix in zip(attend(step), members, strict=True):
        [alone] = attend(build_step([suffix], generator))
        assert torch.equal(got, alone)


def test_two_families_are_found_among_strangers(generator: torch.Generator) -> None:
    members = family(generator, 768, [5] * 6)
    step = build_step(members, generator, num_shared_blocks=48)
    # make the table of the odd rows another family: blocks of their own, copied
    other = step.block_table[1].clone()
    fresh = torch.arange(step.k_pool.shape[0], step.k_pool.shape[0] + 48, dtype=torch.int32)
    for name in ("k_pool", "v_pool"):
        pool = getattr(step, name)
        setattr(step, name, torch.cat([pool, pool[other[:48].long()]]))
    step.block_table[1::2, :48] = fresh
    plan = plan_of(step)
    assert sorted(p.num_shared for g in plan.gathers for p in g.products) == [3, 3]
    for got, suffix in zip(attend(step), members, strict=True):
        [alone] = attend(build_step([suffix], generator))
        assert torch.equal(got, alone)


@st.composite
def families(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    pairs = st.tuples(st.integers(0, 12), st.integers(1, 30))
    members = draw(st.lists(pairs, min_size=1, max_size=6))
    return members, draw(st.integers(0, 12)), draw(st.sampled_from([1, 3, 4, 8, 12]))


@settings(max_examples=60, deadline=None, database=None)
@given(families(), st.integers(0, 99), st.sampled_from([64, 1 << 12, 1 << 20]))
def test_any_cut_of_any_step_gives_each_sequence_what_it_gets_alone(
    drawn: tuple[list[tuple[int, int]], int, int], seed: int, budget: int
) -> None:
    members, num_shared_blocks, block_size = drawn
    shared = num_shared_blocks * block_size
    generator = torch.Generator().manual_seed(seed)
    heads = (2, 3, 8)
    suffixes = [
        random_suffix(generator, min(n, own), shared + own, heads=heads, dtype=torch.float32)
        for n, own in members
    ]
    for suffix in suffixes:
        suffix.k[:shared], suffix.v[:shared] = suffixes[0].k[:shared], suffixes[0].v[:shared]
    with tile_of(16, SCORE_BUDGET=budget, GATHER_BUDGET=budget, SHARED_GAIN=1):
        step = build_step(
            suffixes, generator, block_size=block_size, num_shared_blocks=num_shared_blocks
        )
        for got, suffix in zip(attend(step), suffixes, strict=True):
            if suffix.q.shape[0]:
                [alone] = attend(build_step([suffix], generator))
                assert torch.equal(got, alone)
                assert (got - dense_attention(suffix, 0.125)).abs().max() < 2e-6


def test_a_plan_changes_the_time_and_not_the_bits(generator: torch.Generator) -> None:
    batch = [
        random_suffix(generator, n, length, heads=SMOL, dtype=torch.float32)
        for n, length in [(1, 300), (70, 270), (1, 9)]
    ]
    step = build_step(batch, generator)
    scratch = Scratch(torch.device("cpu"))
    scratch.take("scores", 10).fill_(math.nan)  # what is left in a buffer must not matter
    plan = plan_of(step, scratch)
    expected = attend(step)
    for _ in range(2):
        assert all(map(torch.equal, attend(step, plan=plan), expected))
    assert scratch.num_bytes > 0


@pytest.mark.parametrize("block_size", [3, 24, 100])
def test_blocks_need_not_be_powers_of_two(block_size: int, generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 9, LENGTH, heads=SMOL, dtype=torch.float32)
    [expected] = attend(build_step([suffix], generator))
    [got] = attend(build_step([suffix], generator, block_size=block_size))
    assert torch.equal(got, expected)


def test_the_tile_is_part_of_the_arithmetic(generator: torch.Generator) -> None:
    """Planted: were tiles to move with the batch, the tests of bits above would see it."""
    suffix = random_suffix(generator, 4, LENGTH, heads=SMOL, dtype=torch.float32)
    step = build_step([suffix], generator)
    [expected] = attend(step)
    with tile_of(128):
        [got] = attend(step)
    assert not torch.equal(got, expected)
    assert torch.allclose(got, expected, atol=2e-6)


def test_a_plan_for_another_step_is_refused(generator: torch.Generator) -> None:
    def step(n: int, heads: tuple[int, int, int] = SMOL, layout: str = "plain") -> Step:
        suffix = random_suffix(generator, n, 9, heads=heads, dtype=torch.float32)
        return build_step([suffix], generator, layout=layout)

    with pytest.raises(ValueError, match="q has 3 rows, but q_start ends at 4"):
        attend(step(3), plan=plan_of(step(4)))
    with pytest.raises(ValueError, match="k_pool"):
        attend(step(3), plan=plan_of(step(3, layout="head_major")))
    with pytest.raises(ValueError, match="number of heads"):
        attend(step(3, heads=(3, 2, 64)), plan=plan_of(step(3)))


@pytest.mark.parametrize(
    ("seq_lens", "q_start"), [([1], [0, 2]), ([99], [0, 1]), ([4], [0, -1])], ids=str
)
def test_lengths_that_cannot_be_are_refused(
    seq_lens: list[int], q_start: list[int], generator: torch.Generator
) -> None:
    step = build_step([random_suffix(generator, 2, 9, heads=SMOL, dtype=torch.float32)], generator)
    step.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
    step.q_start = torch.tensor(q_start, dtype=torch.int32)
    with pytest.raises(ValueError, match="sequence 0 has seq_lens"):
        plan_of(step)
