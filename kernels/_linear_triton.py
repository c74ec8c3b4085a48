"""Matrix products in Triton: one program computes one tile of the result over the whole inner size.

Inner tiles are added in ascending order and never split between programs, and the sizes depend on
the dtype alone, so a row meets the same instructions in the same order in any batch.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard
from kernels.variant import Variant


class Sizes(NamedTuple):
    """Compile-time sizes of the kernel."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int


HALF: Final = Sizes(rows=64, cols=128, inner=64, num_warps=4, num_stages=3)
"""16-bit products; 64 rows is the least that one warp group of sm_90 multiplies at a time."""

SINGLE: Final = Sizes(rows=32, cols=64, inner=32, num_warps=4, num_stages=2)
"""float32 products, which no tensor core computes exactly."""

ROW_TILES_IN_TURN: Final = 8
"""Programs in a row of the grid that read the same columns of the weight, which then stay in L2."""


def choose_sizes(dtype: torch.dtype) -> Sizes:
    """Return the tile sizes for a dtype."""
    return SINGLE if dtype == torch.float32 else HALF


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    sizes: Sizes | None = None,
) -> None:
    """Fill `out` as `linear` says, without waiting for the device.

    sizes  for measurements; a launch that leaves it out has the bits of every other
    """
    num_rows, inner = x.shape
    num_cols = weight.shape[0]
    sizes = sizes or choose_sizes(x.dtype)
    grid = (triton.cdiv(num_rows, sizes.rows) * triton.cdiv(num_cols, sizes.cols),)
    with device_guard(x.device):
        linear_kernel[grid](
            x,
            weight,
            bias,
            out,
            num_rows,
            num_cols,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            INNER=inner,
            ROWS=sizes.rows,
            COLS=sizes.cols,
            STEP=sizes.inner,
            IN_TURN=ROW_TILES_IN_TURN,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            enable_fp_fusion=True,
        )


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N] or None
    out,  # [T, N]
    num_rows,
    num_cols,
    x_by_row,  # strides, in elements
    weight_by_row,
    out_by_row,
    INNER: tl.constexpr,  # K
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,  # of K
    IN_TURN: tl.constexpr,
):
    """Compute one tile of `ROWS` rows and `COLS` columns."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    col_tiles = tl.cdiv(num_cols, COLS)
    first = tile // (IN_TURN * col_tiles) * IN_TURN
    beside = tl.minimum(row_tiles - first, IN_TURN)
    row_tile = first + tile % (IN_TURN * col_tiles) % beside
    col_tile = tile % (IN_TURN * col_tiles) // beside

    row = row_tile * ROWS + tl.arange(0, ROWS)
    col = col_tile * COLS + tl.arange(0, COLS)
    step = tl.arange(0, STEP)
    in_rows = row < num_rows
    in_cols = col < num_cols
    x_at = x + row.to(tl.int64)[:, None] * x_by_row + step[None, :]
    weight_at = weight + col.to(tl.int64)[None, :] * weight_by_row + step[:, None]
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    for start in range(0, INNER, STEP):
        inside = start + step < INNER
        left = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0.0)
        right = tl.load(weight_at, mask=in_cols[None, :] & inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_at += STEP
        weight_at += STEP
    if bias is not None:
        total += tl.load(bias + col, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * out_by_row + col[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])


def shipped() -> Iterator[Variant]:
    """Iterate over what launches choose for the inner sizes of usual models."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        sizes = choose_sizes(dtype)
        for inner in (576, 4096):
            for bias in (False, True) if inner == 576 else (False,):
                names = ("x", "weight", "bias", "out") if bias else ("x", "weight", "out")
                constants: dict[str, Any] = {
                    "INNER": inner,
                    "ROWS": sizes.rows,
                    "COLS": sizes.cols,
                    "STEP": sizes.inner,
                    "IN_TURN": ROW_TILES_IN_TURN,
                }
                if not bias:
                    constants["bias"] = None
                yield Variant(
                    linear_kernel,
                    f"{name}, K {inner}{', bias' if bias else ''}",
                    dict.fromkeys(names, f"*{name}"),
                    constants,
                    num_warps=sizes.num_warps,
                    num_stages=sizes.num_stages,
                    loose=frozenset({"num_rows"}),
                    matrix=dtype != torch.float32,
                    wide_loads=True,
                )
