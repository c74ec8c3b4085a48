"""Attention in C: what the contract suite does not reach.

Every head size and group, both thread counts, lists of every kind, and what is refused.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import (
    Scratch,
    SharedPrefixes,
    decode_attention,
    extend_attention,
    native,
    plan_extend,
    plan_shared_prefix,
    shared_prefix_attention,
    shared_unit,
)
from kernels._attention_native import TILE, NativePlan
from tests.kernels.test_decode_attention import PoisonedScratch
from tests.support.paged_attention import Step, Suffix, build_step, dense_attention, random_suffix

pytestmark = pytest.mark.skipif(not native.available(), reason=native.build().reason)

SMOL = (3, 3, 64)
SCALE = 0.125
LENGTH = 3 * TILE + 41
SHAPES = [(3, 3, 64), (1, 1, 16), (2, 5, 48), (1, 9, 80), (2, 8, 128), (1, 2, 256)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
CPU = torch.device("cpu")
WHOLE, STATE, RESUME, APART, MERGE = range(5)


def attend(step: Step, scale: float = SCALE, **keywords: object) -> list[torch.Tensor]:
    out = torch.full_like(step.q, float("nan"))
    return step.run(extend_attention, scale=scale, backend="native", out=out, **keywords)


def alone(suffix: Suffix, generator: torch.Generator, scale: float = SCALE) -> torch.Tensor:
    [rows] = attend(build_step([suffix], generator), scale)
    return rows


def cascade(step: Step, prefixes: SharedPrefixes) -> list[torch.Tensor]:
    tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
    sizes = {"num_heads": step.q.shape[1], "num_tokens": step.q.shape[0], "backend": "native"}
    plan = plan_shared_prefix(*tables, prefixes, **sizes, scratch=PoisonedScratch(CPU))
    out = torch.full_like(step.q, float("nan"))
    shared_prefix_attention(
        step.q,
        step.k_pool,
        step.v_pool,
        *tables[1:],
        prefixes,
        scale=SCALE,
        backend="native",
        out=out,
        plan=plan,
    )
    return list(out.split(step.q_start.diff().tolist()))


def items_of(plan: object) -> list[list[int]]:
    """Mode, sequence, tiles, tokens and heads of each item: first and end, or first and number."""
    assert isinstance(plan, NativePlan)
    count = plan.step.phase_ends[2]
    return plan.held[0][: 8 * count].view(count, 8).tolist()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_every_shape_matches_the_reference_and_is_exact_at_any_cut(
    heads: tuple[int, int, int], dtype: torch.dtype, num_threads: int, generator: torch.Generator
) -> None:
    whole = random_suffix(generator, LENGTH, LENGTH, heads=heads, dtype=dtype)
    scale = heads[2] ** -0.5
    expected = alone(whole, generator, scale)
    error = (expected.double() - dense_attention(whole, scale)).abs().max()
    assert error < TOLERANCE[dtype]
    for starts in ([0, 1, 3, 63, 64, 65, 128, 200], range(0, LENGTH, 50)):
        for start, end in pairwise([*starts, LENGTH]):
            step = build_step([whole.first(end, end - start)], generator, block_size=24)
            [got] = attend(step, scale)
            assert torch.equal(got, expected[start:end]), (start, end)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_the_number_of_threads_changes_no_bit(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    suffix = random_suffix(generator, 20, LENGTH, heads=SMOL, dtype=dtype)
    batch = [suffix, suffix.last(1), suffix.first(LENGTH - 20, 0), suffix.last(7)]
    step = build_step(batch, generator, block_size=1)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(torch.cat(attend(step)))
        expected = alone(suffix, generator)
        assert torch.equal(results[-1][:20], expected)
        assert torch.equal(results[-1][-7:], expected[-7:])
    assert all(torch.equal(results[0], other) for other in results)


@st.composite
def families(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], list[int]]:
    member = st.tuples(st.integers(0, 9), st.integers(1, 90))
    groups = draw(st.lists(st.lists(member, min_size=1, max_size=5), min_size=1, max_size=3))
    return groups, [draw(st.integers(0, 5)) * 32 for _ in groups]


@settings(max_examples=40, deadline=None, database=None)
@given(families(), st.sampled_from(list(TOLERANCE)), st.sampled_from([1, 2, 8]))
def test_any_cascade_gives_each_sequence_what_it_gets_alone(
    drawn: tuple[list[list[tuple[int, int]]], list[int]], dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(5)
    suffixes: list[Suffix] = []
    groups = []
    for members, shared in zip(*drawn, strict=True):
        first = len(suffixes)
        for count, own in members:
            suffix = random_suffix(
                generator, min(count, own), shared + own, heads=(2, 3, 32), dtype=dtype
            )
            suffixes.append(suffix)
            suffix.k[:shared], suffix.v[:shared] = (
                suffixes[first].k[:shared],
                suffixes[first].v[:shared],
            )
        groups.append(([*range(first, len(suffixes))], shared))
    step = build_step(suffixes, generator, block_size=4)
    for members, shared in groups:
        step.block_table[members, : shared // 4] = step.block_table[members[:1], : shared // 4]
    for got, suffix in zip(cascade(step, SharedPrefixes.of(groups)), suffixes, strict=True):
        if suffix.q.shape[0]:
            assert torch.equal(got, alone(suffix, generator))


def test_what_a_group_shares_is_on_the_list_once(
    num_threads: int, generator: torch.Generator
) -> None:
    shared, owns = 5 * TILE, [70, 3, 10]
    sizes = [random_suffix(generator, 1, shared + n, heads=SMOL, dtype=torch.float32) for n in owns]
    step = build_step(sizes, generator, num_shared_blocks=shared // 16)
    tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
    prefixes = SharedPrefixes.of([([0, 1, 2], shared)])
    plan = plan_shared_prefix(*tables, prefixes, num_heads=9, num_tokens=3, backend="native")
    items = items_of(plan)
    computed = sum((end - first) * n for mode, _, first, end, *_, n in items if mode != MERGE)
    assert computed == 3 * (5 + 2 + 1 + 1)
    modes = {mode for mode, *_ in items}
    assert modes == ({STATE, RESUME} if num_threads == 1 else {APART, MERGE})


def test_rows_fold_at_once_where_they_keep_the_threads_busy(generator: torch.Generator) -> None:
    def modes(count: int) -> set[int]:
        suffix = random_suffix(generator, 1, LENGTH, heads=SMOL, dtype=torch.float32)
        step = build_step([suffix] * count, generator)
        tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
        return {mode for mode, *_ in items_of(plan_extend(*tables, num_heads=9, backend="native"))}

    torch.set_num_threads(2)
    assert modes(1) == {APART, MERGE}
    assert modes(8) == {WHOLE}
    torch.set_num_threads(1)
    assert modes(1) == {WHOLE}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("limit", [1, 64, 90, 91])
def test_no_row_reads_a_key_after_its_own(
    dtype: torch.dtype, limit: int, generator: torch.Generator
) -> None:
    suffix = random_suffix(generator, 130, 130, heads=SMOL, dtype=dtype)
    expected = alone(suffix, generator)
    suffix.k[limit:] = suffix.v[limit:] = float("nan")
    got = alone(suffix, generator)
    assert torch.equal(got[:limit], expected[:limit])
    assert got[limit:].isnan().all()


def test_options_and_other_dtypes_are_left_to_torch(generator: torch.Generator) -> None:
    for heads, dtype, options in (
        ((1, 2, 16), torch.float16, {}),
        ((1, 2, 20), torch.float32, {}),
        ((1, 2, 272), torch.bfloat16, {}),
        ((1, 2, 16), torch.float32, {"window": 9}),
    ):
        suffix = random_suffix(generator, 5, 90, heads=heads, dtype=dtype)
        step = build_step([suffix], generator)
        tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
        plan = plan_extend(*tables, num_heads=2, backend="native")
        expected = step.run(extend_attention, scale=SCALE, backend="torch", **options)
        assert torch.equal(attend(step, plan=plan, **options)[0], expected[0])


def test_blocks_and_members_that_are_nowhere_are_refused(generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 2, 90, heads=SMOL, dtype=torch.float32)
    step = build_step([suffix, suffix], generator)
    with pytest.raises(IndexError, match="members names sequences outside 0 to 1"):
        cascade(step, SharedPrefixes.of([([0, 2], 64)]))
    for block in (-1, step.k_pool.shape[0]):
        step.block_table[1, 3] = block
        with pytest.raises(IndexError, match=r"block_table\[1\] names blocks outside 0 to 13"):
            step.run(decode_attention, scale=1.0, backend="native")


def test_a_plan_for_another_step_is_refused(generator: torch.Generator) -> None:
    def step(count: int, **sizes: object) -> Step:
        shape = {"heads": SMOL, "dtype": torch.float32}
        return build_step([random_suffix(generator, count, 9, **shape)], generator, **sizes)

    def plan(step: Step, backend: str = "native") -> object:
        tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
        return plan_extend(*tables, num_heads=9, backend=backend, scratch=Scratch(CPU))

    with pytest.raises(ValueError, match="q has 3 rows, but q_start ends at 4"):
        attend(step(3), plan=plan(step(4)))
    with pytest.raises(ValueError, match="k_pool or the number of heads is not what"):
        attend(step(3), plan=plan(step(3, block_size=4)))
    with pytest.raises(TypeError, match="TorchPlan, made for another backend than native"):
        attend(step(3), plan=plan(step(3), "torch"))
    wrong = step(3)
    wrong.seq_lens[0] = 1
    with pytest.raises(ValueError, match="sequence 0 has seq_lens 1 and 3 queries"):
        plan(wrong)


def test_sequences_are_grouped_by_what_the_backend_reads_once() -> None:
    assert shared_unit(CPU, "native") == TILE
    assert shared_unit(CPU, "torch") == 512
    found = SharedPrefixes.among([3, 0, 2], [0, 200, 130], unit=TILE)
    assert found.members.tolist() == [3, 0, 2]
    assert found.lens.tolist() == [128]
