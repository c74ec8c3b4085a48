"""The smallest kernels that ask a GPU about its bits: one product, and sums of rows.

Owns: the kernels.  Does not know: the questions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    out,  # [T, N] float32
    INNER: tl.constexpr,  # K
    ROWS: tl.constexpr,
    COLS: tl.constexpr,  # N
    STEP: tl.constexpr,  # of K
):
    """Multiply one tile of rows, as attention and `linear` do."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    step = tl.arange(0, STEP)
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    for start in range(0, INNER, STEP):
        left = tl.load(x + row[:, None] * INNER + start + step[None, :])
        right = tl.load(weight + col[None, :] * INNER + start + step[:, None])
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + row[:, None] * COLS + col[None, :], total)


@triton.jit
def row_sum_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    out,  # [T] float32
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PRODUCT: tl.constexpr,  # sum what a product left in registers, not what was loaded
):
    """Sum exponentials along each row of a tile, as a softmax does."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inner = tl.arange(0, INNER)
    if PRODUCT:
        left = tl.load(x + row[:, None] * INNER + inner[None, :])
        right = tl.load(weight + col[None, :] * INNER + inner[:, None])
        scores = tl.dot(left, right, input_precision="ieee")
    else:
        scores = tl.load(weight + row[:, None] * COLS + col[None, :]).to(tl.float32)
    tl.store(out + row, tl.sum(tl.exp2(scores * 0.1), 1))


def product(x: torch.Tensor, weight: torch.Tensor, *, rows: int, num_warps: int) -> torch.Tensor:
    """Multiply with tiles of so many rows; [T, K] and [N, K] give [T, N] float32."""
    out = torch.full((len(x), len(weight)), float("nan"), device=x.device)
    product_kernel[(len(x) // rows,)](
        x, weight, out, x.shape[1], rows, len(weight), 64, num_warps=num_warps
    )
    return out


def row_sums(
    x: torch.Tensor, weight: torch.Tensor, *, rows: int, num_warps: int, product: bool
) -> torch.Tensor:
    """Sum rows of a product of x and weight, or of weight itself viewed as [T, N]; [T] float32."""
    out = torch.full((len(x),), float("nan"), device=x.device)
    row_sum_kernel[(len(x) // rows,)](
        x, weight, out, x.shape[1], rows, weight.shape[0], product, num_warps=num_warps
    )
    return out
