"""Products with packed weights by the kernels in C.

Owns: the packed layout, and the call.  Does not know: plain weights, or row layouts.
"""

from __future__ import annotations

from ctypes import byref
from typing import Final

import torch
from torch.nn import functional

from kernels.native import DTYPES, library
from kernels.native.records import Product

PANEL: Final = 32
"""Outputs that stand side by side; linear.c has the same."""


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Lay [N, K] out as [panels, steps, PANEL, inputs of a step], zeros past N and K.

    A step is four bytes: an input of float32, two of bfloat16.
    """
    outputs, inputs = weight.shape
    together = 4 // weight.element_size()
    spare = (0, -inputs % together, 0, -outputs % PANEL)
    wide = functional.pad(weight.detach(), spare) if any(spare) else weight.detach()
    panels = wide.view(-1, PANEL, wide.shape[1] // together, together)
    return panels.transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a plain copy [N, K] of what was packed."""
    panels, steps, _, together = packed.shape
    plain = packed.transpose(1, 2).reshape(panels * PANEL, steps * together)
    return plain[: shape[0], : shape[1]].contiguous()


def take_rows(packed: torch.Tensor, shape: tuple[int, int], ids: torch.Tensor) -> torch.Tensor:
    """Return rows `ids` [R] of what was packed, [R, K]."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < shape[0]:
        raise IndexError(f"ids go from {int(ids.min())} to {int(ids.max())}, of {shape[0]} rows")
    found = packed[ids // PANEL, :, ids % PANEL]
    return found.reshape(ids.shape[0], packed.shape[1] * packed.shape[3])[:, : shape[1]]


def _may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def multiply(
    x: torch.Tensor,
    packed: torch.Tensor,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply [T, K] by what `pack` made of [N, K]; into `out` [T, N] if given."""
    outputs, inputs = shape
    if x.stride(1) != 1 and inputs > 1:
        x = x.contiguous()
    rows, size = x.shape[0], x.element_size()
    if out is None or (out.stride(1) != 1 and outputs > 1) or _may_overlap(out, x):
        result = torch.empty(rows, outputs, dtype=x.dtype)
    else:
        result = out
    bias = None if bias is None else bias.contiguous()  # held until the call returns
    product = Product(
        x=x.data_ptr(),
        packed=packed.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=result.data_ptr(),
        x_stride=x.stride(0) * size,
        out_stride=result.stride(0) * size,
        rows=rows,
        outputs=outputs,
        inputs=inputs,
        dtype=DTYPES[x.dtype],
    )
    library().radixcache_linear(byref(product), torch.get_num_threads())
    return result if out is None or result is out else out.copy_(result)
