"""Is a row's result its own, whatever surrounds it?  Every op, asked bit by bit.

Owns: the matrix of chunks, batches, companions, block sizes, splits, prefixes and options.  Does
not know: processes, tables.
Idea: the plainest way, each sequence whole and alone, is the reference; all others must give its
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch

import kernels
from benchmarks.gpu.history import History, Piece
from benchmarks.gpu.steps import HALF
from kernels.roofline import Heads


class Sizes(NamedTuple):
    """How much is asked."""

    lens: list[int]
    chunks: tuple[int, ...]
    blocks: tuple[int, ...]
    companions: tuple[int, ...]
    common: int
    heads: dict[str, Heads]
    row_counts: tuple[int, ...]
    hidden: int


FULL: Final = Sizes(
    lens=[1, 17, 70, 513, 1100],
    chunks=(1, 7, 64, 512),
    blocks=(1, 16, 64, 256),
    companions=(1, 7, 31),
    common=1024,
    heads={
        "32/8 heads of 128": Heads(32, 8, 128),
        "9/3 heads of 64": Heads(9, 3, 64),
        "9/1 heads of 128": Heads(9, 1, 128),
        "8/8 heads of 256": Heads(8, 8, 256),
    },
    row_counts=(1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 500, 1024),
    hidden=4096,
)
FEW: Final = Sizes(
    lens=[1, 9, 20],
    chunks=(7,),
    blocks=(1, 16),
    companions=(3,),
    common=512,
    heads={"2/1 heads of 16": Heads(2, 1, 16)},
    row_counts=(1, 3, 8),
    hidden=64,
)
"""For the interpreter."""

Answer = dict[str, Any]


def compare(ways: Iterator[tuple[str, torch.Tensor, torch.Tensor]]) -> Answer:
    """Compare each way with its reference; name those that differ, and by how much."""
    compared, differing = 0, []
    for name, got, want in ways:
        compared += 1
        if not torch.equal(got, want):
            apart = (got.float() - want.float()).abs().max()
            differing.append(f"{name} (by {float(apart):.2g})")
    return {"answer": not differing and compared > 0, "compared": compared, "differ": differing}


def attention_ways(
    device: torch.device, sizes: Sizes, heads: Heads, dtype: torch.dtype, **options: Any
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each way to the same rows: chunks, ops, company, blocks, rows of no sequence."""
    kv = options.pop("kv", None)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads.num_heads, device=device)
    history = History(device, sizes.lens, heads=heads, dtype=dtype, kv=kv, options=options)
    stored = history.stored(16)
    whole = torch.full_like(history.q, float("nan"))
    every = [Piece(s, 0, length) for s, length in enumerate(sizes.lens)]
    for piece in every:
        stored.place(whole, [piece], stored.attend([piece]))
    for chunk in sizes.chunks:
        yield f"chunks of {chunk}", stored.in_chunks(chunk), whole
    yield "one token at a time, by split decode", stored.in_chunks(1, "decode"), whole
    for op in ("extend", "decode"):
        out = torch.full_like(whole, float("nan"))
        stored.place(out, every[::-1], stored.attend(every[::-1], op))
        yield f"all in one batch, backwards, by {op}", out, whole
    for block_size in sizes.blocks:
        other = history.stored(block_size)
        out = torch.full_like(whole, float("nan"))
        other.place(out, every, other.attend(every))
        yield f"blocks of {block_size}", out, whole
    last = len(sizes.lens) - 1
    row = whole[-1:]
    alone = Piece(last, sizes.lens[last] - 1, sizes.lens[last])
    for count in sizes.companions:
        company = [every[i % len(every)] for i in range(count)]
        yield f"the last row after {count} others", stored.attend([*company, alone])[-1:], row
        yield f"the last row before {count} others", stored.attend([alone, *company])[:1], row
    if kernels.choose_backend(device) == "triton":
        yield "rows of no sequence behind", stored.attend([alone], spare_rows=70), row


def cascade_ways(
    device: torch.device, sizes: Sizes, heads: Heads, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield decode of sequences behind a common prefix, read once or by each."""
    lens = [sizes.common + own for own in (40, 1, 70)]
    history = History(device, lens, heads=heads, dtype=dtype, common=sizes.common)
    stored = history.stored(16)
    ends = [Piece(s, length - 1, length) for s, length in enumerate(lens)]
    alone = torch.cat([stored.attend([piece]) for piece in ends])
    yield "cascade", stored.attend(ends, "cascade"), alone
    yield "plain decode", stored.attend(ends, "decode"), alone
    more = [
        Piece(s, length - 2, length) for s, length in enumerate(lens) if length > sizes.common + 1
    ]
    apart = torch.cat([stored.attend([piece]) for piece in more])
    yield "cascade of two queries each", stored.attend(more, "cascade"), apart


def row_ways(
    device: torch.device,
    sizes: Sizes,
    make: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    dtype: torch.dtype,
    *,
    nan: bool = True,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield rows in batches of each size, first, last and among NaN, beside the whole batch's."""
    most = sizes.row_counts[-1]
    x = torch.randn(most, width, device=device, dtype=dtype)
    whole = make(x.clone())
    for count in sizes.row_counts:
        yield f"the first {count}", make(x[:count].clone()), whole[:count]
        yield f"the last {count}", make(x[-count:].clone()), whole[-count:]
    if nan:
        lonely = torch.full_like(x, float("nan"))
        place = most // 2
        lonely[place] = x[place]
        yield "one among NaN", make(lonely)[place], whole[place]


def linear_question(
    device: torch.device, sizes: Sizes, dtype: torch.dtype, inner: int, num_cols: int, bias: bool
) -> Answer:
    weight = torch.randn(num_cols, inner, device=device, dtype=dtype)
    added = torch.randn(num_cols, device=device, dtype=dtype) if bias else None
    ways = row_ways(device, sizes, lambda x: kernels.linear(x, weight, added), inner, dtype)
    return compare(ways)


def row_op_question(device: torch.device, sizes: Sizes, op: str, dtype: torch.dtype) -> Answer:
    width = sizes.hidden
    weight = torch.randn(width, device=device, dtype=dtype)
    angles = torch.randn(1, width // 4, device=device)

    def turned(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (t.expand(len(x), -1).contiguous() for t in (angles.cos(), angles.sin()))
        return kernels.rotary(x.view(len(x), 2, -1), cos, sin).flatten(1)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(x), device=device)
        seeds = x[:, 0].float().view(torch.int32).long()  # a row's noise is its own
        limits = {"temperature": ones, "top_k": ones.long() * 40, "top_p": ones * 0.9}
        logits = x.float()
        return kernels.sample(logits, seeds=seeds, positions=seeds, min_p=ones * 0.01, **limits)

    ops: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "norm": lambda x: kernels.rms_norm(x, weight, eps=1e-5),
        "silu": kernels.silu_and_mul,
        "rotary": turned,
        "sample": drawn,
    }
    return compare(row_ways(device, sizes, ops[op], width, dtype, nan=op != "sample"))


def questions(device: torch.device) -> dict[str, Callable[[], Answer]]:
    """Return every question about the ops, by name."""
    sizes = FULL if device.type == "cuda" else FEW
    found: dict[str, Callable[[], Answer]] = {}
    dtypes = {"bfloat16": HALF, "float16": torch.float16, "float32": torch.float32}
    first, *others = sizes.heads.items()
    some = sizes._replace(blocks=sizes.blocks[1:3])  # each block size is compiled for
    for name, heads in (first, *others):
        found[f"attention, {name}, bfloat16"] = partial(
            _attention_question, device, sizes, heads, HALF, {}
        )
    for name, heads in (first, *others[:1]):
        for dtype_name in ("float16", "float32"):
            found[f"attention, {name}, {dtype_name}"] = partial(
                _attention_question, device, some, heads, dtypes[dtype_name], {}
            )
    asked: dict[str, dict[str, Any]] = {
        "a window": {"window": 40},
        "sinks and a soft cap": {"sinks": True, "soft_cap": 20.0},
        "float8 K/V": {"kv": torch.float8_e4m3fn},
        "int8 K/V": {"kv": torch.int8},
    }
    for what, options in asked.items():
        found[f"attention, {first[0]}, bfloat16, {what}"] = partial(
            _attention_question, device, some, first[1], HALF, options
        )
    for name, heads in sizes.heads.items():
        found[f"cascade, {name}, bfloat16"] = lambda heads=heads: compare(
            cascade_ways(device, sizes, heads, HALF)
        )
    hidden = sizes.hidden
    products = {
        "qkv": (hidden, hidden * 3 // 2, True),
        "gate_up": (hidden, hidden * 7, False),
        "down": (hidden * 7 // 2, hidden, False),
    }
    products |= {"small": (576, 960, True)} if hidden > 576 else {}
    for name, (inner, num_cols, bias) in products.items():
        for dtype_name in ("bfloat16", "float32"):
            found[f"linear, {name}, {dtype_name}"] = partial(
                linear_question, device, sizes, dtypes[dtype_name], inner, num_cols, bias
            )
    for op in ("norm", "silu", "rotary", "sample"):
        found[op] = partial(row_op_question, device, sizes, op, HALF)
    return found


def _attention_question(
    device: torch.device, sizes: Sizes, heads: Heads, dtype: torch.dtype, options: dict[str, Any]
) -> Answer:
    return compare(attention_ways(device, sizes, heads, dtype, **options))
