"""The contract of extend_attention, on whichever backend this process has.

Values agree with a float64 reference within the tolerance of the dtype; everything said about bits
is exact.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import extend_attention
from tests.support.paged_attention import (
    LAYOUTS,
    Suffix,
    build_step,
    dense_attention,
    random_suffix,
)

# absolute, for outputs of size about one: 2 to 4 units in the last place of the dtype
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
BLOCK_SIZES = [1, 2, 4, 16]  # the Triton kernel takes powers of two only


def close(got: torch.Tensor, suffix: Suffix, scale: float) -> bool:
    error = (got.double() - dense_attention(suffix, scale)).abs().max().item()
    return error <= TOLERANCE[got.dtype]


def tiles_of(backend: str) -> tuple[tuple[int, int, int], int]:
    """Heads and a length with three key tiles, small enough for the interpreter."""
    return ((2, 3, 32), 560) if backend != "triton" else ((1, 3, 32), 140)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@st.composite
def ragged_steps(
    draw: st.DrawFn, max_prefix: int
) -> tuple[list[tuple[int, int]], dict[str, object]]:
    queries = st.integers(0, 9)
    prefix = st.integers(0, max_prefix)
    pairs = draw(st.lists(st.tuples(queries, prefix), min_size=1, max_size=4))
    sizes = [(n, max(1, n + before)) for n, before in pairs]
    options = {
        "heads": draw(st.sampled_from([(1, 1, 16), (2, 3, 16), (1, 4, 20), (3, 1, 8)])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "block_size": draw(st.sampled_from(BLOCK_SIZES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "seed": draw(st.integers(0, 99)),
    }
    return sizes, options


def test_ragged_steps_match_a_float64_reference(backend: str) -> None:
    @settings(max_examples=40, deadline=None, database=None)
    @given(ragged_steps(max_prefix=300 if backend != "triton" else 70))
    def check(drawn: tuple[list[tuple[int, int]], dict[str, object]]) -> None:
        sizes, options = drawn
        generator = torch.Generator().manual_seed(options["seed"])
        suffixes = [
            random_suffix(generator, n, length, heads=options["heads"], dtype=options["dtype"])
            for n, length in sizes
        ]
        step = build_step(
            suffixes, generator, block_size=options["block_size"], layout=options["layout"]
        )
        out = torch.full_like(step.q, float("nan"))
        got = step.run(extend_attention, scale=0.3, backend=backend, out=out)
        for rows, suffix in zip(got, suffixes, strict=True):
            assert suffix.q.shape[0] == 0 or close(rows, suffix, 0.3)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(
    backend: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    heads, length = tiles_of(backend)
    whole = random_suffix(generator, length, length, heads=heads, dtype=dtype)
    [expected] = build_step([whole], generator).run(extend_attention, scale=0.2, backend=backend)
    assert close(expected, whole, 0.2)
    for size in (7, 64):
        got = []
        for start in range(0, length, size):
            end = min(start + size, length)
            step = build_step([whole.first(end, end - start)], generator)
            got += step.run(extend_attention, scale=0.2, backend=backend)
        assert torch.equal(torch.cat(got), expected), f"chunks of {size}"


def test_a_row_has_the_same_bits_one_token_at_a_time(
    backend: str, generator: torch.Generator
) -> None:
    heads, length = tiles_of(backend)
    whole = random_suffix(generator, length, length, heads=heads, dtype=torch.float32)
    step = build_step([whole], generator)
    [expected] = step.run(extend_attention, scale=0.2, backend=backend)
    for end in range(1, length + 1, 1 if backend != "triton" else 17):
        now = step.__class__(
            whole.q[end - 1 : end],
            step.k_pool,
            step.v_pool,
            step.block_table,
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
        )
        [got] = now.run(extend_attention, scale=0.2, backend=backend)
        assert torch.equal(got[0], expected[end - 1]), f"position {end - 1}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_company(
    backend: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    heads, length = tiles_of(backend)
    whole = random_suffix(generator, length, length, heads=heads, dtype=dtype)
    [expected] = build_step([whole], generator).run(extend_attention, scale=0.2, backend=backend)
    company = [
        random_suffix(generator, n, size, heads=heads, dtype=dtype)
        for n, size in [(1, 1), (1, length // 2), (5, 9), (0, 3), (2, 2), (1, length), (30, 40)]
    ]
    for place, num_queries in ((0, 1), (3, 1), (7, 5), (4, length)):
        suffixes = [*company[:place], whole.last(num_queries), *company[place:]]
        step = build_step(suffixes, generator)
        got = step.run(extend_attention, scale=0.2, backend=backend)
        assert torch.equal(got[place], expected[length - num_queries :])
        for rows, suffix in zip(got, suffixes, strict=True):
            assert suffix.q.shape[0] == 0 or close(rows, suffix, 0.2)


def test_a_row_has_the_same_bits_for_any_block_size_and_layout(
    backend: str, generator: torch.Generator
) -> None:
    heads, length = tiles_of(backend)
    suffix = random_suffix(generator, 20, length, heads=heads, dtype=torch.float32)
    [expected] = build_step([suffix], generator).run(extend_attention, scale=0.2, backend=backend)
    for block_size in (1, 4, 32, 256):
        for layout in LAYOUTS:
            step = build_step([suffix], generator, block_size=block_size, layout=layout)
            [got] = step.run(extend_attention, scale=0.2, backend=backend)
            assert torch.equal(got, expected), (block_size, layout)


def test_sharing_blocks_with_others_leaves_the_bits_alone(
    backend: str, generator: torch.Generator
) -> None:
    heads, length = tiles_of(backend)
    shared = length // 16 * 16
    first = random_suffix(generator, 2, shared + 30, heads=heads, dtype=torch.float32)
    family = [first]
    for n, own in ((1, 1), (1, 20), (2, 40), (1, 41), (1, 7)):
        other = random_suffix(generator, n, shared + own, heads=heads, dtype=torch.float32)
        other.k[:shared] = first.k[:shared]
        other.v[:shared] = first.v[:shared]
        family.append(other)
    together = build_step(family, generator, num_shared_blocks=shared // 16)
    for got, suffix in zip(
        together.run(extend_attention, scale=0.2, backend=backend), family, strict=True
    ):
        alone = build_step([suffix], generator)
        [expected] = alone.run(extend_attention, scale=0.2, backend=backend)
        assert torch.equal(got, expected)
        assert close(got, suffix, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(3, 3, 64), (1, 4, 128), (1, 2, 80)], ids=str)
def test_shapes_of_real_models_match_the_reference(
    backend: str, heads: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    suffixes = [
        random_suffix(generator, n, length, heads=heads, dtype=dtype)
        for n, length in [(1, 90), (30, 70), (3, 3)]
    ]
    step = build_step(suffixes, generator)
    got = step.run(extend_attention, scale=heads[2] ** -0.5, backend=backend)
    for rows, suffix in zip(got, suffixes, strict=True):
        assert close(rows, suffix, heads[2] ** -0.5)


def test_large_scores_do_not_overflow(backend: str, generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 3, 40, heads=(1, 2, 16), dtype=torch.float32)
    suffix.k.mul_(100)
    [got] = build_step([suffix], generator).run(extend_attention, scale=10.0, backend=backend)
    assert close(got, suffix, 10.0)


def test_a_step_without_queries_is_empty(backend: str, generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 0, 4, heads=(1, 2, 16), dtype=torch.float32)
    [got] = build_step([suffix], generator).run(extend_attention, scale=1.0, backend=backend)
    assert got.shape == (0, 2, 16)


def test_out_is_written_and_returned_through_any_strides(
    backend: str, generator: torch.Generator
) -> None:
    suffix = random_suffix(generator, 5, 9, heads=(2, 1, 16), dtype=torch.float32)
    step = build_step([suffix], generator)
    expected = torch.cat(step.run(extend_attention, scale=0.2, backend=backend))
    buffer = torch.zeros(2, 5, 16)
    out = buffer.transpose(0, 1)
    wide = torch.zeros(5, 6, 16)
    wide[:, :2] = step.q
    step.q = wide[:, :2]
    [got] = step.run(extend_attention, scale=0.2, backend=backend, out=out)
    assert torch.equal(got, expected)
    assert torch.equal(buffer.transpose(0, 1), expected)


def test_blocks_that_the_triton_kernel_cannot_address_are_refused(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    suffix = random_suffix(generator, 1, 9, heads=(1, 2, 16), dtype=torch.float32)
    step = build_step([suffix], generator, block_size=3)
    with pytest.raises(ValueError, match="k_pool has blocks of 3 slots"):
        step.run(extend_attention, scale=1.0, backend="triton")


def test_heads_larger_than_any_tile_are_refused(backend: str, generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 1, 9, heads=(1, 2, 264), dtype=torch.bfloat16)
    step = build_step([suffix], generator)
    if backend != "triton":
        [got] = step.run(extend_attention, scale=0.1, backend=backend)
        assert close(got, suffix, 0.1)
        return
    with pytest.raises(ValueError, match="q has heads of 264 numbers; the triton backend takes up"):
        step.run(extend_attention, scale=0.1, backend=backend)
