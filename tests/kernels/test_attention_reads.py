"""What attention reads: no tile that every row of an item hides, and no key outside its range.

Values and bits are in the other attention tests; here values that must not be read are NaN, which a
weight of zero does not silence, and the interpreter counts products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from kernels import SharedPrefixes
from tests.kernels.conftest import INTERPRETED
from tests.kernels.test_decode_attention import (
    HEADS,
    cascaded,
    decoded,
    extended,
    small_splits,
)
from tests.support.paged_attention import Step, Suffix, build_step, random_suffix

ROWS, KEYS = 16, 16  # of a tile with small splits
TOKENS = ROWS // HEADS[1]  # of a tile of queries


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(6)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the products of tiles that the interpreter computes."""
    from triton.runtime.interpreter import InterpreterBuilder

    products: list[int] = []
    original = InterpreterBuilder.create_dot

    def counting(self: object, *operands: object) -> object:
        products.append(1)
        return original(self, *operands)

    with mock.patch.object(InterpreterBuilder, "create_dot", counting), small_splits(ROWS):
        yield products


def num_tiles(num_queries: int, seq_len: int, window: int | None) -> int:
    """Key tiles that some row of a tile of queries sees, over all those tiles."""
    total = 0
    for start in range(seq_len - num_queries, seq_len, TOKENS):
        last = min(start + TOKENS, seq_len) - 1
        first = 0 if window is None else max(start - window + 1, 0)
        total += last // KEYS - first // KEYS + 1
    return total


@pytest.mark.parametrize("window", [None, 1, 21])
def test_no_tile_is_computed_that_no_row_sees(
    backend: str, window: int | None, generator: torch.Generator
) -> None:
    if backend != "triton":
        pytest.skip("products are counted in the interpreter")
    sizes = [(12, 61), (1, 100), (5, 5), (0, 40), (3, 33)]
    suffixes = [random_suffix(generator, *size, heads=HEADS, dtype=torch.float32) for size in sizes]
    step = build_step(suffixes, generator, block_size=4)
    expected = 2 * HEADS[0] * sum(num_tiles(*size, window) for size in sizes)
    for attention in (extended, decoded):
        with counted() as products:
            attention(step, backend, window=window)
        assert len(products) == expected


def test_a_common_prefix_is_computed_once(backend: str, generator: torch.Generator) -> None:
    if backend != "triton":
        pytest.skip("products are counted in the interpreter")
    lengths = [70, 71, 99, 80]
    suffixes = [random_suffix(generator, 1, n, heads=HEADS, dtype=torch.float32) for n in lengths]
    for suffix in suffixes[1:]:
        suffix.k[:64], suffix.v[:64] = suffixes[0].k[:64], suffixes[0].v[:64]
    step = build_step(suffixes, generator, block_size=4)
    step.block_table[1:, :16] = step.block_table[0, :16]
    prefixes = SharedPrefixes.of([([0, 1, 2, 3], 64)])
    with counted() as products:
        cascaded(step, prefixes, backend)
    own = sum(num_tiles(1, n, None) - 64 // KEYS for n in lengths)
    assert len(products) == 2 * HEADS[0] * (64 // KEYS + own)


def poison(step: Step, suffix: Suffix, keys: slice) -> None:
    """Make values of the step's one sequence NaN; a key is read where its value is."""
    at = torch.arange(suffix.k.shape[0])[keys]
    block_size = step.v_pool.shape[1]
    blocks = step.block_table[0, at // block_size].long()
    step.v_pool[blocks, at % block_size] = float("nan")


def test_a_tile_of_queries_reads_no_key_after_its_last(
    backend: str, generator: torch.Generator
) -> None:
    # the torch backend cuts queries where tiles of 256 keys end
    length, cut = (70, 7 * TOKENS) if INTERPRETED else (600, 512)
    suffix = random_suffix(generator, length, length, heads=HEADS, dtype=torch.float32)
    step = build_step([suffix], generator, block_size=4)
    with small_splits(ROWS):
        expected = extended(step, backend)
        poison(step, suffix, slice(cut, None))
        got = extended(step, backend)
    assert torch.equal(got[:cut], expected[:cut])
    assert got[cut:].isnan().all()


def test_a_tile_of_queries_reads_no_key_before_its_window(
    backend: str, generator: torch.Generator
) -> None:
    # with options the torch backend cuts queries in chunks of 64
    cut, window = (7 * TOKENS, 9) if INTERPRETED else (64, 30)
    suffix = random_suffix(generator, 2 * cut, 2 * cut, heads=HEADS, dtype=torch.float32)
    step = build_step([suffix], generator, block_size=4)
    with small_splits(ROWS):
        expected = extended(step, backend, window=window)
        poison(step, suffix, slice(0, cut - window + 1))
        got = extended(step, backend, window=window)
        assert torch.equal(got[cut:], expected[cut:])
        assert got[:TOKENS].isnan().all()
        rows = decoded(build_last(step, cut), backend, window=window)
    assert torch.equal(rows, expected[cut:])


def build_last(step: Step, cut: int) -> Step:
    """The same sequence, of which only the rows from `cut` on are asked."""
    return Step(
        step.q[cut:],
        step.k_pool,
        step.v_pool,
        step.block_table,
        step.seq_lens,
        torch.tensor([0, step.q.shape[0] - cut], dtype=torch.int32),
    )
