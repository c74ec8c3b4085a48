"""The interpreter computes bfloat16 as torch does.  Collected in the child process only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.support.triton_interpreter import narrow, product_of_rows, widen


@triton.jit
def arithmetic_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(a + at)
    y = tl.load(b + at)
    tl.store(out + at, x + y)
    tl.store(out + SIZE + at, x * y)
    tl.store(out + 2 * SIZE + at, x - y)
    tl.store(out + 3 * SIZE + at, -x)
    tl.store(out + 4 * SIZE + at, tl.where(x > y, x, y))
    tl.store(out + 5 * SIZE + at, (x.to(tl.float32) / 3.0).to(tl.bfloat16))


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    product = tl.dot(tl.load(a + square), tl.load(b + square), input_precision="ieee")
    tl.store(out + square, product)


@triton.jit
def reduce_kernel(a, sums, peaks, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(a + at[:, None] * SIZE + at[None, :])
    tl.store(sums + at, tl.sum(x, 1))
    tl.store(peaks + at, tl.max(x, 1))


@triton.jit
def float8_kernel(a, stored, back, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    small = tl.load(a + at).to(stored.dtype.element_ty)
    tl.store(stored + at, small)
    tl.store(back + at, small.to(tl.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_rounds_to_nearest_even_and_saturates(backend: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    halfway = torch.arange(1.0, 2.0, 1 / 32)  # between any two float8 of this size, and on them
    a = torch.cat([halfway, -halfway / 64, torch.randn(62) * 100, torch.tensor([1e6, -1e6])])
    stored, back = torch.empty(128, dtype=dtype), torch.empty(128, dtype=torch.bfloat16)
    float8_kernel[(1,)](a, stored, back, SIZE=128)
    expected = a.clamp(-most, most).to(dtype)
    assert torch.equal(stored.float(), expected.float())
    assert torch.equal(back, expected.bfloat16())


def test_rounding_is_to_nearest_even_like_torch(backend: str) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), dtype=torch.int32)
    halfway = torch.arange(2**15, dtype=torch.int32) << 16 | 0x8000
    values = torch.cat([bits, halfway, halfway + 1, halfway - 1]).view(torch.float32)
    got = torch.from_numpy(narrow(values.numpy()).view(np.int16)).view(torch.bfloat16)
    expected = values.to(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~got.isnan()])


def test_widening_is_exact(backend: str) -> None:
    bits = np.arange(2**16).astype(np.uint16)
    expected = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(widen(bits), expected, equal_nan=True)


def test_arithmetic_is_that_of_torch(backend: str) -> None:
    a, b = torch.randn(2, 64).bfloat16()
    out = torch.empty(6, 64, dtype=torch.bfloat16)
    arithmetic_kernel[(1,)](a, b, out, SIZE=64)
    expected = [a + b, a * b, a - b, -a, torch.maximum(a, b), (a.float() / 3).bfloat16()]
    assert torch.equal(out, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_product_accumulates_in_float32(backend: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).to(dtype)
    out = torch.empty(16, 16)
    product_kernel[(1,)](a, b, out, SIZE=16)
    assert torch.equal(out, (a.double() @ b.double()).float())


def test_a_row_of_a_product_has_the_same_bits_at_any_place_beside_any_rows(backend: str) -> None:
    draw = np.random.default_rng(0)
    a = draw.standard_normal((32, 48), np.float32) * np.float32(1e3)
    b = draw.standard_normal((48, 65), np.float32)
    whole = product_of_rows(a, b)
    order = draw.permutation(32)
    assert np.array_equal(product_of_rows(a[order], b), whole[order])
    for rows in (1, 2, 3, 7, 16):
        chosen = draw.permutation(32)[:rows]
        assert np.array_equal(product_of_rows(a[chosen], b), whole[chosen])
    assert np.array_equal(product_of_rows(a[None], b[None])[0], whole)


def test_reductions_see_values_and_not_bits(backend: str) -> None:
    a = torch.randn(16, 16).bfloat16()
    sums, peaks = torch.empty(2, 16, dtype=torch.bfloat16)
    reduce_kernel[(1,)](a, sums, peaks, SIZE=16)
    assert torch.equal(peaks, a.amax(1))
    assert torch.allclose(sums.float(), a.float().sum(1), rtol=2**-8, atol=2**-8)
