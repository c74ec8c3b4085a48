"""Products with packed weights by the kernels in C.

Owns: packing, and the calls.  Does not know: plain weights, or row layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from kernels.formats import DENSE, FORMATS, QuantisedWeight
from kernels.native import DTYPES, library
from kernels.native.records import Matrix, Packing, Product, Taking

PANEL: Final = 32
"""Outputs that stand side by side; native/kernels.h has the same."""

MAX_PARTS: Final = 3
"""Parts of a matrix, at most; native/kernels.h has the same."""


class PackedMatrix(NamedTuple):
    """A weight as the kernels read it.

    record   what they are given
    parts    the memory that it points to, a tensor a part
    formats  of the parts
    """

    record: Matrix
    parts: tuple[torch.Tensor, ...]
    formats: tuple[str, ...]


def pack(weights: Sequence[torch.Tensor | QuantisedWeight], *, int8: bool) -> PackedMatrix:
    """Pack weights [N, K] of one K, one below the other; each keeps its format.

    int8  whether products round their rows to 8 bits

    Cost: a copy, by torch's threads.
    """
    parts = tuple(map(_pack_part, weights))
    formats = tuple(w.format if isinstance(w, QuantisedWeight) else DENSE[w.dtype] for w in weights)
    record = Matrix(
        num_parts=len(parts),
        outputs=sum(w.shape[0] for w in weights),
        inputs=weights[0].shape[1],
        int8=int8,
    )
    for place, (part, name, weight) in enumerate(zip(parts, formats, weights, strict=True)):
        at = record.parts[place]
        at.packed, at.format, at.outputs = part.data_ptr(), FORMATS.index(name), weight.shape[0]
    return PackedMatrix(record, parts, formats)


def _pack_part(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    outputs, inputs = weight.shape
    if not isinstance(weight, QuantisedWeight):
        together = 4 // weight.element_size()  # 16-bit numbers stand in pairs
        spare = (0, -inputs % together, 0, -outputs % PANEL)
        wide = functional.pad(weight.detach(), spare) if any(spare) else weight.detach()
        panels = wide.view(-1, PANEL, wide.shape[1] // together, together)
        return panels.transpose(1, 2).contiguous()
    kernels, raw = library(), weight.raw.contiguous()
    kind = FORMATS.index(weight.format)
    size = kernels.radixcache_panel_bytes(kind, inputs)
    packed = torch.empty(-(-outputs // PANEL) * size, dtype=torch.uint8)
    packing = Packing(
        raw=raw.data_ptr(), packed=packed.data_ptr(), format=kind, outputs=outputs, inputs=inputs
    )
    kernels.radixcache_pack(byref(packing), torch.get_num_threads())
    return packed


def take_rows(matrix: PackedMatrix, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows `ids` [R] of what was packed, [R, K] in a dtype."""
    record = matrix.record
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < record.outputs:
        raise IndexError(
            f"ids go from {int(ids.min())} to {int(ids.max())}, of {record.outputs} rows"
        )
    ids = ids.to(torch.int64).contiguous()
    out = torch.empty(ids.shape[0], record.inputs, dtype=dtype)
    taking = Taking(out=out.data_ptr(), ids=ids.data_ptr(), count=len(ids), dtype=DTYPES[dtype])
    taking.matrix.contents = record
    library().radixcache_take_rows(byref(taking))
    return out


def rounded_bytes(inputs: int) -> int:
    """Return how many bytes a row takes that is rounded to 8 bits."""
    return int(library().radixcache_rounded_bytes(inputs))


def _may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def multiply(
    x: torch.Tensor,
    matrix: PackedMatrix,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply [T, K] by what `pack` made of [N, K]; into `out` [T, N] if given."""
    outputs, inputs = matrix.record.outputs, matrix.record.inputs
    if x.stride(1) != 1 and inputs > 1:
        x = x.contiguous()
    rows, size = x.shape[0], x.element_size()
    if out is None or (out.stride(1) != 1 and outputs > 1) or _may_overlap(out, x):
        result = torch.empty(rows, outputs, dtype=x.dtype)
    else:
        result = out
    bias = None if bias is None else bias.contiguous()  # held until the call returns
    is_rounded = bool(matrix.record.int8)
    room = torch.empty(rows * rounded_bytes(inputs) if is_rounded else 0, dtype=torch.uint8)
    product = Product(
        x=x.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=result.data_ptr(),
        rounded=room.data_ptr() if is_rounded else None,
        x_stride=x.stride(0) * size,
        out_stride=result.stride(0) * size,
        rows=rows,
        dtype=DTYPES[x.dtype],
    )
    product.matrix.contents = matrix.record
    library().radixcache_linear(byref(product), torch.get_num_threads())
    return result if out is None or result is out else out.copy_(result)
