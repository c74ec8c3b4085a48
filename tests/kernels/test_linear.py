"""A row of a product has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from kernels import linear

SHAPES = [(576, 960), (576, 1536), (1536, 576), (576, 3072), (64, 96), (100, 37)]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 31, 33, 63)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_whatever_the_batch(
    dtype: torch.dtype, k: int, n: int, num_threads: int
) -> None:
    generator = torch.Generator().manual_seed(k * n)
    x = torch.randn(64, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        whole = linear(x, weight)
        for count in COUNTS:
            for start in (0, 64 - count):
                part = linear(x[start : start + count], weight)
                assert torch.equal(part, whole[start : start + count]), count
    finally:
        torch.set_num_threads(before)


def test_the_product_is_that_of_torch_with_and_without_a_bias() -> None:
    x, weight, bias = torch.randn(5, 32), torch.randn(48, 32), torch.randn(48)
    expected = x.double() @ weight.double().T + bias.double()
    assert torch.allclose(linear(x, weight, bias).double(), expected, atol=1e-4)
    assert torch.allclose(linear(x, weight).double(), expected - bias.double(), atol=1e-4)
    assert linear(x[:0], weight).shape == (0, 48)
