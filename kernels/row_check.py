"""Whether a row's bits are its own on this machine: a check of milliseconds, on a model's shapes.

Owns: the row counts, places and company that are tried, and the layouts of products in their order.
Does not know: models, and what is done where the answer is no.
Idea: which inner loop a math library takes for how many rows is nowhere promised.  So each
operation computes the same rows again, in other numbers, at other places and beside other rows,
and one bit that differs is a fault.

    whole     | row 0 | row 1 | row 2 | row 3 | row 4 | ..
    again     | row 3 | row 0 |                              2 rows, at other places
              | row 4 | row 1 | row 3 |                      3 rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from kernels._extend_cut import TILE
from kernels.backend import Placed
from kernels.extend_attention import extend_attention
from kernels.linear import SLOWER_LAYOUTS, PackedWeight, RowLayout, default_layout, linear
from kernels.norm_rope import rms_norm, rotary, silu_and_mul

ROW_COUNTS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 31, 33, 64, 129, 512)
"""Numbers of rows that are compared with the same rows among all, the largest."""

FEW_COUNTS: Final = (1, 2, 3, 9, 64)
"""The same for a vocabulary's weight, whose rows are dear and few."""

LONE_NUMBERS: Final = 40_000
"""Numbers of lone rows that are compared: in 16 bits, one in 6,000 shows another order of sums."""

BLOCK_SIZE: Final = 16
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RowFault(NamedTuple):
    """An operation that gave a row other bits in other company.

    operation  and its sizes, such as "product 576 × 960"
    num_rows   computed together when the bits differed from those among all rows
    row        of all the rows, the first that differed
    """

    operation: str
    num_rows: int
    row: int

    def __str__(self) -> str:
        return f"{self.operation}: row {self.row} has other bits among {self.num_rows} rows"


class Product(NamedTuple):
    """A weight that a model multiplies by, and the numbers of rows to try, ascending."""

    weight: torch.Tensor | PackedWeight
    bias: torch.Tensor | None = None
    row_counts: tuple[int, ...] = ROW_COUNTS


class AttentionShape(NamedTuple):
    """Heads of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compare two tensors of one shape and dtype bit by bit; NaN equals itself, 0 is not -0.

    returns  bool, of their shape
    """
    kind = _INTEGERS[a.element_size()]
    return a.contiguous().view(kind) == b.contiguous().view(kind)


def check_products(products: Sequence[Product], layout: RowLayout | None = None) -> list[RowFault]:
    """Multiply the same rows in many companies; return one fault for each product that shows one.

    layout  of the rows; None: the default of each weight

    Weights of one shape and alignment are checked once, and row counts that the layout pads to one
    size are tried once.  Cost: 700 to 900 rows through each, a fifth of that with `FEW_COUNTS`.
    """
    distinct = {(*p.weight.shape, *_place(p.weight), p.row_counts): p for p in products}
    found = [_check_product(product, layout) for product in distinct.values()]
    return [fault for fault in found if fault]


def _place(weight: torch.Tensor | PackedWeight) -> tuple[int, ...]:
    """What a library may look at beside shapes; a packed weight lies as the library chose."""
    if isinstance(weight, PackedWeight):
        return ()
    return (*weight.stride(), weight.data_ptr() % 64)


def _check_product(product: Product, wish: RowLayout | None) -> RowFault | None:
    weight, bias, counts = product
    layout = wish or default_layout(weight)
    backend = weight.backend if isinstance(weight, PackedWeight) else None
    outputs, inputs = weight.shape
    by_size = {layout.padded(count): count for count in counts}
    return _compare(
        f"product {inputs} × {outputs}",
        lambda rows: linear(rows, weight, bias, layout=layout, backend=backend),
        _noise((counts[-1], inputs), weight),
        sorted(by_size.values()),
        lone_rows=min(64, -(-LONE_NUMBERS // outputs)),
    )


class FoundLayout(NamedTuple):
    """What keeps the rows of all products of a model their own.

    holds   whether anything does
    layout  that does; None: the default of each weight, or nothing
    faults  of the defaults
    """

    holds: bool
    layout: RowLayout | None
    faults: list[RowFault]


def find_layout(products: Sequence[Product]) -> FoundLayout:
    """Return the cheapest layout under which every product keeps its rows' bits."""
    refused = check_products(products)
    if not refused:
        return FoundLayout(True, None, [])
    for layout in SLOWER_LAYOUTS:
        if not check_products(products, layout):
            return FoundLayout(True, layout, refused)
    return FoundLayout(False, None, refused)


def check_rows(width: int, gated: int, head_dim: int, like: Placed) -> list[RowFault]:
    """Check what works on a row alone: norm, gated SiLU and rotary positions.

    width  of a row, and of what is gated; `like` gives dtype and device

    Their own widths count: a library gives each thread a share of all numbers, and where a share
    ends inside a row, its last few may go through another loop.
    """
    x, weight = _noise((256, width), like), _noise((width,), like)
    gates = _noise((521, 2 * gated), like)  # a prime: hardly a share ends with a row
    heads = _noise((256, head_dim * 3), like)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        """Take a row as the three heads of a token."""
        where = torch.cat((rows, rows), -1)[:, : head_dim // 2].float()  # an angle of its own
        return rotary(rows.view(len(rows), 3, head_dim), where.cos(), where.sin()).flatten(1)

    checks: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], ...] = (
        (f"norm of {width}", lambda rows: rms_norm(rows, weight, eps=1e-5), x),
        (f"gated SiLU of {gated}", silu_and_mul, gates),
        (f"rotary of {head_dim}", turned, heads),
        ("log-softmax", lambda rows: rows.float().log_softmax(-1), x),
    )
    found = [_compare(name, compute, rows) for name, compute, rows in checks]
    return [fault for fault in found if fault]


def check_attention(shape: AttentionShape, like: Placed) -> list[RowFault]:
    """Attend whole, in pieces and in a batch over the same keys, across two tile borders.

    `like` gives dtype and device.  Cost: that of three prompts of 520 tokens in one layer.
    """
    count = 2 * TILE + 8
    num_heads, num_kv_heads, head_dim = shape
    q = 4 * _noise((count, num_heads, head_dim), like)
    num_blocks = -(-count // BLOCK_SIZE)
    k, v = _noise((2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim), like)
    table = torch.arange(num_blocks, dtype=torch.int32, device=q.device)

    def attend(*pieces: tuple[int, int]) -> torch.Tensor:
        """Rows start … end of the one sequence, each piece as a sequence of its own."""
        rows = torch.cat([q[start:end] for start, end in pieces])
        lens = torch.tensor([end for _, end in pieces], dtype=torch.int32, device=q.device)
        sizes = torch.tensor([0] + [end - start for start, end in pieces], device=q.device)
        starts = sizes.cumsum(0).to(torch.int32)
        tables = table.expand(len(pieces), -1).contiguous()
        return extend_attention(rows, k, v, tables, lens, starts, scale=head_dim**-0.5)

    whole = attend((0, count))
    edge = 2 * TILE
    tries: tuple[tuple[tuple[int, int], ...], ...] = (
        ((count - 1, count),),  # a decode
        ((edge - 7, edge),),
        ((edge - 60, edge + 4),),  # across a border
        ((TILE, count),),
        ((0, 5), (TILE - 1, TILE), (edge - 1, edge), (count - 1, count), (TILE, TILE + 33)),
        tuple((end - 1, end) for end in range(count - 32, count + 1)),  # a batch that decodes
    )
    name = f"attention of {num_heads} heads on {num_kv_heads} of {head_dim}"
    for pieces in tries:
        expected = torch.cat([whole[start:end] for start, end in pieces])
        same = same_bits(attend(*pieces), expected).flatten(1).all(-1)
        if not bool(same.all()):
            rows = [row for start, end in pieces for row in range(start, end)]
            return [RowFault(name, len(rows), rows[int(same.logical_not().nonzero()[0])])]
    return []


def _compare(
    name: str,
    compute: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    counts: Sequence[int] = ROW_COUNTS,
    *,
    lone_rows: int = 1,
) -> RowFault | None:
    """Compute random choices of the rows and hold them to what they are among all.

    lone_rows  how many are tried where one is computed alone
    """
    whole = compute(x)
    draw = torch.Generator().manual_seed(len(x))
    tries = [count for count in counts if count < len(x)]
    for count in [1] * (lone_rows - 1) * (1 in tries) + tries:
        rows = torch.randperm(len(x), generator=draw)[:count].to(x.device)
        same = same_bits(compute(x[rows]), whole[rows]).all(-1)
        if not bool(same.all()):
            return RowFault(name, count, int(rows[same.logical_not()][0]))
    return None


def _noise(shape: tuple[int, ...], like: Placed) -> torch.Tensor:
    """Normal numbers, the same in each run."""
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(like.device, like.dtype)
