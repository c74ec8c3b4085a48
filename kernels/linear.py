"""Matrix product of token rows with a weight, the same bits for a row in any batch.

Owns: the shapes that keep the product row-invariant.  Does not know: layers or models.
Idea: libraries choose their inner loops by the number of rows, and the last bits of a result
follow.  On a GPU the product is a kernel of ours with one tile for all.  On a CPU the library is
kept to one loop: for float32 the rows come in eights, where one loop serves all row counts; for
16-bit numbers only a lone row takes a loop of its own, so it gets a companion.  docs/decisions/ has
the measurements.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from kernels.backend import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_shape,
    check_unit_stride,
    choose_backend,
)

ROW_STEP: Final = 8
"""Rows of a float32 product on the CPU are padded to a multiple of this."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight: x · weightᵀ + bias.

    x        [T, K]
    weight   [N, K] in x.dtype
    bias     [N] or None
    out      [T, N] written and returned; allocated when None
    returns  [T, N] in x.dtype; sums in float32

    Raises ValueError or TypeError for arguments that do not fit together.  Cost: 2·T·N·K
    operations; on a CPU T is rounded up to a multiple of 8 in float32, and to 2 in 16 bit; on
    Triton to a multiple of 64, or 32 in float32.  The torch backend on a GPU is the library's
    product, which is not row-invariant.
    """
    check_shape("x", x, ("T", "K"))
    check_shape("weight", weight, ("N", x.shape[1]))
    for name, tensor, shape in (
        ("weight", weight, tuple(weight.shape)),
        ("bias", bias, (weight.shape[0],)),
        ("out", out, (x.shape[0], weight.shape[0])),
    ):
        if tensor is not None:
            check_shape(name, tensor, shape)
            check_dtype(name, tensor, (x.dtype,))
            check_device(name, tensor, x.device)
    if choose_backend(x.device, backend) == "torch":
        result = _linear_torch(x, weight, bias)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    check_dtype("x", x, FLOAT_DTYPES)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        check_unit_stride(name, tensor)
    if x.shape[0]:
        from kernels._linear_triton import linear_triton  # optional: not on every platform

        linear_triton(x, weight, bias, out)
    return out


def _linear_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.shape[0]
    spare = -rows % ROW_STEP if x.dtype == torch.float32 else int(rows == 1)
    if spare == 0 or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, spare)), weight, bias)[:rows]
