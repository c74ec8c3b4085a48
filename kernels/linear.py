"""Matrix product of token rows with a weight, the same bits for a row in any batch.

Owns: the shapes that keep the product row-invariant, and weights laid out for it.  Does not know:
layers or models.
Idea: libraries choose their inner loops by the number of rows, and the last bits of a result
follow.  So the products that count are loops of ours: on a GPU a kernel with one tile for all, on a
CPU one in C whose every output is one chain.  Where no C compiler is, the library is kept to one
loop: with a packed weight, or 16-bit numbers, a lone row gets a companion; not even that where a
packed weight's rows are short enough to be summed in one go; with a plain weight in float32 the
rows come in eights.  docs/decisions/ has the measurements.  Where another machine's library behaves
otherwise, kernels/row_check.py says so and finds a slower layout that holds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from kernels import _linear_native, native
from kernels._linear_native import PackedMatrix
from kernels.backend import (
    FLOAT_DTYPES,
    Backend,
    check_dtype,
    check_shape,
    check_tensor,
    check_unit_stride,
    choose_backend,
)
from kernels.formats import DENSE, QuantisedWeight


class RowLayout(NamedTuple):
    """How the rows of a product on the CPU are laid out for the library.

    step   rows of a product are padded to a multiple of this
    least  and to at least so many
    most   rows of one product, more are computed in several; None: all in one
    """

    step: int = 1
    least: int = 1
    most: int | None = None

    def padded(self, num_rows: int) -> int:
        """Return how many rows a product of so many takes."""
        return max(self.least, -(-num_rows // self.step) * self.step) if num_rows else 0


SLOWER_LAYOUTS: Final = (
    RowLayout(least=2),
    RowLayout(8),
    RowLayout(16),
    RowLayout(64),
    RowLayout(64, most=64),  # one shape for all products
    RowLayout(most=1),  # not even a neighbour; reads the weight once a row
)
"""What to try where the default does not keep a row's bits its own, cheapest first.

The last one asks of the library only that it is deterministic.
"""

ONE_GO: Final = 1024
"""Numbers of a row that the library sums in one go; beyond, a lone row is cut otherwise."""

PACKED_DTYPES: Final = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in the layout that a CPU computes with; made by `pack_weight`.

    packed   opaque
    shape    (N, K) of the weight that was packed
    dtype    of the rows that it is multiplied with
    formats  how its parts are stored, one below the other
    backend  that it was packed for
    """

    packed: torch.Tensor | PackedMatrix
    shape: tuple[int, int]
    dtype: torch.dtype
    formats: tuple[str, ...]
    device: torch.device
    backend: Backend

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; the torch backend keeps that to itself, and so the plain size."""
        if isinstance(self.packed, torch.Tensor):
            return self.shape[0] * self.shape[1] * self.dtype.itemsize
        return sum(part.nbytes for part in self.packed.parts)

    def plain(self) -> torch.Tensor:
        """Return a plain copy [N, K] in `dtype`: the numbers that products multiply by."""
        if isinstance(self.packed, torch.Tensor):
            return self.packed.to_dense()
        return self.rows(torch.arange(self.shape[0]))

    @property
    def int8(self) -> bool:
        """Whether products round their rows to 8 bits."""
        return isinstance(self.packed, PackedMatrix) and bool(self.packed.record.int8)

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can read them: the torch backend's layout is its own secret."""
        return self.backend == "native"

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows, [R, K] of ids [R]: a packed table of embeddings needs no second copy.

        Raises IndexError for an id outside the N rows.  Cost: that of reading 32 rows each; ids
        that follow one another share it.
        """
        assert isinstance(self.packed, PackedMatrix)
        return _linear_native.take_rows(self.packed, ids, self.dtype)


def pack_weight(
    weight: torch.Tensor | QuantisedWeight | Sequence[torch.Tensor | QuantisedWeight],
    *,
    dtype: torch.dtype | None = None,
    int8: bool = False,
    backend: str | None = None,
) -> torch.Tensor | PackedWeight:
    """Lay a weight out once so that `linear` computes faster with it; keep only what is returned.

    weight   [N, K] float32, bfloat16, float16 or quantised; or up to three of one K, which become
             one weight, one below the other
    dtype    of the rows that it is multiplied with; None: its own.  A weight in another format
             stays in it, and gives the same bits as one that was converted to `dtype` before
    int8     whether products round their rows to 8 bits, block by block, and multiply integers;
             for quantised weights on the native backend, ignored by others
    returns  a packed copy on a CPU, where the backend packs that dtype; else the weight in `dtype`

    A packed weight gives other last bits than a plain one; products with each are batch-invariant.
    Raises TypeError for a quantised weight on a backend other than native: dequantise it first.
    Cost: a copy.  Source: for the torch backend oneDNN's blocked layouts, through torch's
    own operators for compiled models (`torch.ops.mkldnn`), which are not public and so are looked
    for.
    """
    parts = [weight] if isinstance(weight, torch.Tensor | QuantisedWeight) else list(weight)
    for part in parts:
        if isinstance(part, torch.Tensor):
            check_shape("weight", part, ("N", "K"))
            check_dtype("weight", part, FLOAT_DTYPES)
        if part.shape[1] != parts[0].shape[1]:
            raise ValueError(f"weights have rows of {parts[0].shape[1]} and {part.shape[1]}")
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    quantised = len(plain) < len(parts)
    if dtype is None:
        dtype = torch.float32 if quantised else plain[0].dtype
    device = torch.device("cpu") if quantised else plain[0].device
    chosen = choose_backend(device, backend)
    packed: torch.Tensor | PackedMatrix
    if chosen == "native" and dtype in native.DTYPES and all(map(_has_numbers, parts)):
        packed = _linear_native.pack([_stored(part, dtype) for part in parts], int8=int8)
        return PackedWeight(packed, _shape(parts), dtype, packed.formats, device, chosen)
    if quantised:
        raise TypeError(f"weight is quantised, and the {chosen} backend takes {dtype} alone here")
    whole = plain[0] if len(plain) == 1 else torch.cat(plain)
    whole = whole.to(dtype)
    if chosen != "torch" or device.type != "cpu" or not whole.numel() or not _packs(whole):
        return whole
    packed = torch.ops.mkldnn._reorder_linear_weight(whole.detach().contiguous())
    return PackedWeight(packed, _shape(parts), dtype, (DENSE[dtype],), device, chosen)


def _stored(
    part: torch.Tensor | QuantisedWeight, dtype: torch.dtype
) -> torch.Tensor | QuantisedWeight:
    """What is packed of a part: 16-bit numbers stay so; float32 is rounded where rows are."""
    return part.to(dtype) if isinstance(part, torch.Tensor) and part.dtype.itemsize == 4 else part


def _has_numbers(part: torch.Tensor | QuantisedWeight) -> bool:
    return 0 not in part.shape


def _shape(parts: Sequence[torch.Tensor | QuantisedWeight]) -> tuple[int, int]:
    return sum(part.shape[0] for part in parts), parts[0].shape[1]


def _packs(weight: torch.Tensor) -> bool:
    """Whether this torch has the operators, and the CPU the instructions that make it worth it."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_library or weight.dtype not in PACKED_DTYPES:
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in names)


def default_layout(weight: torch.Tensor | PackedWeight) -> RowLayout:
    """Return the cheapest layout that was seen to keep a row's bits its own with such a weight."""
    if isinstance(weight, PackedWeight):
        if weight.backend == "native":
            return RowLayout()
        return RowLayout(least=1 if weight.shape[1] <= ONE_GO else 2)
    return RowLayout(8) if weight.dtype == torch.float32 else RowLayout(least=2)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    layout: RowLayout | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight: x · weightᵀ + bias.

    x        [T, K]
    weight   [N, K] in x.dtype, plain or packed by `pack_weight`
    bias     [N] or None
    out      [T, N] written and returned; allocated when None
    layout   of the rows, on a CPU; None: the default of the weight
    returns  [T, N] in x.dtype; sums in float32

    Raises ValueError or TypeError for arguments that do not fit together.  Cost: 2·T·N·K
    operations; on a CPU T is rounded up as the layout says: to a multiple of 8 for a plain weight
    in float32, else to 2 at most; on Triton to a multiple of 64, or 32 in float32.  The torch
    backend on a GPU is the library's product, which is not row-invariant; nor is that on a CPU with
    a plain float32 weight of eight outputs or fewer and an odd number of inputs.
    """
    check_shape("x", x, ("T", "K"))
    check_shape("weight", weight, ("N", x.shape[1]))
    for name, tensor, shape in (
        ("weight", weight, tuple(weight.shape)),
        ("bias", bias, (weight.shape[0],)),
        ("out", out, (x.shape[0], weight.shape[0])),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, x.dtype, x.device)
    chosen = choose_backend(x.device, backend)
    if isinstance(weight, PackedWeight) and weight.backend != chosen:
        raise TypeError(
            f"weight is packed for the {weight.backend} backend: pack one for the {chosen} backend"
        )
    if chosen != "triton":
        if isinstance(weight, PackedWeight) and chosen == "native" and layout is None:
            assert isinstance(weight.packed, PackedMatrix)
            return _linear_native.multiply(x, weight.packed, bias, out)
        result = _linear_cpu(x, weight, bias, layout or default_layout(weight))
        return result if out is None else out.copy_(result)
    assert isinstance(weight, torch.Tensor)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    check_dtype("x", x, FLOAT_DTYPES)
    for name, tensor in (("x", x), ("weight", weight), ("out", out)):
        check_unit_stride(name, tensor)
    if x.shape[0]:
        from kernels._linear_triton import linear_triton  # optional: not on every platform

        linear_triton(x, weight, bias, out)
    return out


def _linear_cpu(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None,
    layout: RowLayout,
) -> torch.Tensor:
    if x.device.type != "cpu":
        return _product(x, weight, bias)
    if layout.most is None or x.shape[0] <= layout.most:
        return _padded(x, weight, bias, layout)
    return torch.cat([_padded(part, weight, bias, layout) for part in torch.split(x, layout.most)])


def _padded(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None,
    layout: RowLayout,
) -> torch.Tensor:
    rows = x.shape[0]
    spare = layout.padded(rows) - rows
    if not spare:
        return _product(x, weight, bias)
    return _product(functional.pad(x, (0, 0, 0, spare)), weight, bias)[:rows]


def _product(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    if not isinstance(weight, PackedWeight):
        return functional.linear(x, weight, bias)
    if isinstance(weight.packed, PackedMatrix):
        return _linear_native.multiply(x, weight.packed, bias, None)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, weight.packed, bias, "none", [], ""
    )
    return product
