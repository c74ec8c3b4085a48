"""RMS norm and gated SiLU in Triton: one program computes whole rows.

A row is summed by one program in one order, and its shape alone chooses the sizes.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard
from kernels.variant import Variant

MAX_WIDTH: Final = 2048  # elements of a row that a program of silu_and_mul takes


def choose_warps(width: int) -> int:
    """Return the warps of a program that holds a row of `width` numbers: 16 a thread, if it can."""
    return min(16, max(1, width // 512))


def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fill `out` as `rms_norm` says, without waiting for the device."""
    num_rows, dim = x.shape
    width = triton.next_power_of_2(dim)
    with device_guard(x.device):
        rms_norm_kernel[(num_rows,)](
            x,
            weight,
            residual,
            out,
            eps,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            DIM=dim,
            WIDTH=width,
            num_warps=choose_warps(width),
            enable_fp_fusion=True,
        )


def silu_and_mul_triton(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` as `silu_and_mul` says, without waiting for the device."""
    num_rows, dim = out.shape
    width = min(MAX_WIDTH, triton.next_power_of_2(dim))
    with device_guard(out.device):
        silu_and_mul_kernel[(num_rows, triton.cdiv(dim, width))](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            DIM=dim,
            WIDTH=width,
            num_warps=choose_warps(width),
            enable_fp_fusion=True,
        )


@triton.jit
def rms_norm_kernel(
    x,  # [T, D]
    weight,  # [D]
    residual,  # [T, D] or None
    out,  # [T, D]
    eps,
    x_by_row,  # strides, in elements
    residual_by_row,
    out_by_row,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM rounded up to a power of two
):
    """Normalise one row, after adding it to its residual where there is one."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, WIDTH)
    inside = dim < DIM
    kind = x.dtype.element_ty
    wide = tl.load(x + row * x_by_row + dim, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        at = residual + row * residual_by_row + dim
        total = (wide + tl.load(at, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(at, total, mask=inside)
        wide = total.to(tl.float32)  # the sum as stored is what is normalised
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    scaled = (wide * scale).to(kind).to(tl.float32)
    weights = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_by_row + dim, (scaled * weights).to(kind), mask=inside)


@triton.jit
def silu_and_mul_kernel(
    gate_up,  # [T, 2 * F]
    out,  # [T, F]
    gate_up_by_row,  # strides, in elements
    out_by_row,
    DIM: tl.constexpr,  # F
    WIDTH: tl.constexpr,
):
    """Compute `WIDTH` numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = dim < DIM
    kind = out.dtype.element_ty
    at = gate_up + row * gate_up_by_row + dim
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + DIM, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never overflows
    opened = gate * tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    opened = opened.to(kind).to(tl.float32)
    tl.store(out + row * out_by_row + dim, (opened * up).to(kind), mask=inside)


def shipped() -> Iterator[Variant]:
    """Iterate over what launches choose for the widths of usual models."""
    for dim in (576, 4096, 8192):
        width = int(triton.next_power_of_2(dim))
        for residual in (None, "*bf16"):
            names = (
                ("x", "weight", "out") if residual is None else ("x", "weight", "residual", "out")
            )
            constants: dict[str, Any] = {"DIM": dim, "WIDTH": width}
            if residual is None:
                constants["residual"] = None
            yield Variant(
                rms_norm_kernel,
                f"D {dim}{', residual' if residual else ''}",
                {**dict.fromkeys(names, "*bf16"), "eps": "fp32"},
                constants,
                num_warps=choose_warps(width),
                wide_loads=True,
            )
    for dim in (1536, 14336):
        width = min(MAX_WIDTH, int(triton.next_power_of_2(dim)))
        yield Variant(
            silu_and_mul_kernel,
            f"F {dim}",
            dict.fromkeys(("gate_up", "out"), "*bf16"),
            {"DIM": dim, "WIDTH": width},
            num_warps=choose_warps(width),
            wide_loads=True,
        )
