"""RMS norm and gated SiLU against float64, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import rms_norm, silu_and_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def padded(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor, NaN between them."""
    rows = torch.full((num_rows, width + 3), float("nan"), dtype=dtype)
    rows[:, :width] = torch.randn(num_rows, width)
    return rows[:, :width]


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(0, 4), st.sampled_from([1, 5, 64, 80, 576]), st.sampled_from(DTYPES))
def check_norm(backend: str, num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = padded(num_rows, dim, dtype), torch.randn(dim).to(dtype)
    wide = x.double()
    scaled = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    got = rms_norm(x, weight, eps=1e-5, backend=backend)
    assert got.dtype == dtype
    assert torch.allclose(
        got.double(), scaled * weight.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_a_row_is_scaled_to_a_root_mean_square_of_one(backend: str) -> None:
    check_norm(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_takes_the_sum_and_the_sum_is_scaled(backend: str, dtype: torch.dtype) -> None:
    x, residual, weight = padded(3, 80, dtype), padded(3, 80, dtype), torch.randn(80).to(dtype)
    total = x + residual
    alone = rms_norm(total, weight, eps=1e-5, backend=backend)
    got = rms_norm(x, weight, eps=1e-5, residual=residual, backend=backend)
    assert torch.equal(residual, total)
    assert torch.equal(got, alone)


def test_a_row_norm_has_the_same_bits_alone_and_in_place(backend: str) -> None:
    x, weight = torch.randn(5, 96).bfloat16(), torch.randn(96).bfloat16()
    whole = rms_norm(x, weight, eps=1e-5, backend=backend)
    for row in range(5):
        assert torch.equal(
            rms_norm(x[row : row + 1], weight, eps=1e-5, backend=backend)[0], whole[row]
        )
    assert rms_norm(x, weight, eps=1e-5, out=x, backend=backend) is x
    assert torch.equal(x, whole)


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(0, 4), st.sampled_from([1, 5, 64, 1536, 2100]), st.sampled_from(DTYPES))
def check_silu(backend: str, num_rows: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = padded(num_rows, 2 * dim, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = torch.full((num_rows, dim), float("nan"), dtype=dtype)
    assert silu_and_mul(gate_up, out=out, backend=backend) is out
    expected = gate * gate.sigmoid() * up
    assert torch.allclose(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(out, silu_and_mul(gate_up, backend=backend))


def test_the_second_half_is_gated_by_silu_of_the_first(backend: str) -> None:
    check_silu(backend)


def test_extreme_gates_open_or_close_without_nan(backend: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 2.0, 3.0]])
    assert silu_and_mul(gate_up, backend=backend).tolist() == [[0.0, 600.0]]


def test_wrong_rows_are_named() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match=r"^weight has shape \[7\], expected \[8\]"):
        rms_norm(x, weight[:7], eps=1e-5)
    with pytest.raises(TypeError, match=r"^residual has dtype torch\.float64"):
        rms_norm(x, weight, eps=1e-5, residual=x.double())
    with pytest.raises(ValueError, match=r"^out has shape \[2, 7\], expected \[2, 8\]"):
        rms_norm(x, weight, eps=1e-5, out=x[:, :7])
    with pytest.raises(ValueError, match="gate_up has rows of 7"):
        silu_and_mul(x[:, :7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_a_gated_row_has_its_own_bits_wherever_threads_divide_a_batch(dtype, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for width in (37, 80, 576):
            gate_up = 3 * torch.randn(700, 2 * width).to(dtype)
            whole = silu_and_mul(gate_up)
            for count in (1, 2, 57, 410, 411, 513, 529, 699):
                for start in (0, 700 - count):
                    part = silu_and_mul(gate_up[start : start + count].clone())
                    assert torch.equal(part, whole[start : start + count]), (width, count)
    finally:
        torch.set_num_threads(before)
