"""Matrix product of token rows with a weight, the same bits for a row in any batch.

Owns: the shapes that keep the product row-invariant.  Does not know: layers or models.
Idea: CPU libraries choose their inner loops by the number of rows, and the last bits of a result
follow.  For float32 the rows come in eights here, where one loop serves all row counts; for 16-bit
numbers only a lone row takes a loop of its own, so it gets a companion.  docs/decisions/ has the
measurements.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

ROW_STEP: Final = 8
"""Rows of a float32 product on the CPU are padded to a multiple of this."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows by a weight: x · weightᵀ + bias.

    x        [T, K]
    weight   [N, K]
    bias     [N] or None
    returns  [T, N] in x.dtype; 2·T·N·K operations; on the CPU T is rounded up to a multiple of 8
             in float32, and to 2 in 16 bit

    Raises what torch raises for shapes or dtypes that don't fit.
    """
    rows = x.shape[0]
    spare = -rows % ROW_STEP if x.dtype == torch.float32 else int(rows == 1)
    if spare == 0 or x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, spare)), weight, bias)[:rows]
