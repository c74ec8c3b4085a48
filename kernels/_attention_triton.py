"""Attention in Triton: the sizes of the kernel, its launch, and all that is shipped.

Owns: the one table of sizes that every list of work is run with.  Does not check arguments.
Idea: the sizes are part of the arithmetic, so they depend on dtype, head size and group, never on
the batch: one class of bits for a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
import triton

from kernels._attention_call import Call, Options
from kernels._attention_kernel import LOOSE, MERGE_LOOSE, attention_kernel, merge_kernel
from kernels._attention_work import SPLIT, Tiling, WorkPlan
from kernels._draft_path import on_path
from kernels._extend_cut import Heads
from kernels.backend import FLOAT8_TARGETS, FLOAT_DTYPES, QUANTISED_DTYPES, device_guard, target_of
from kernels.variant import Variant

Scales: TypeAlias = Literal["none", "head", "slot"]

HEAD_DIMS: Final = (64, 80, 96, 128, 192, 256)
TARGETS: Final = ("sm_80", "sm_90", "sm_100", "gfx942")
OPTIONAL: Final = ("lse", "sinks", "tree_mask", "k_scale", "v_scale")
MERGED: Final = 64  # numbers of a head that a program merges
AHEAD: Final = 16  # splits that it reads before it folds them
TYPES: Final = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
}


class Sizes(NamedTuple):
    """Compile-time sizes of the kernel for one model.

    A wide tile differs from a narrow one in its rows and in how far it reads ahead: warps take 16
    rows each, and the instruction that multiplies them is the same, so a row's bits are too.
    """

    rows: int
    keys: int
    split: int
    num_warps: int
    num_stages: int
    widening: int = 1  # wide rows and warps over narrow ones
    wide_stages: int | None = None  # of a wide tile, where those are others
    max_registers: int | None = None  # a thread; without a word ptxas spills to fit more programs
    wide_is_bounded: bool = True  # likewise; where False, ptxas does better without a word

    @property
    def wide(self) -> Sizes:
        """The tile of an item that takes all its splits, where queries are many."""
        return self._replace(
            rows=self.rows * self.widening,
            num_warps=self.num_warps * self.widening,
            num_stages=self.wide_stages or self.num_stages,
            max_registers=self.max_registers if self.wide_is_bounded else None,
        )


HALF: Final = {
    "sm_80": {
        64: Sizes(rows=64, keys=32, split=SPLIT, num_warps=4, num_stages=2, max_registers=240),
        128: Sizes(rows=64, keys=32, split=SPLIT, num_warps=8, num_stages=2),
        256: Sizes(rows=32, keys=32, split=SPLIT, num_warps=8, num_stages=2),
    },
    "sm_90": {
        128: Sizes(rows=64, keys=64, split=SPLIT, num_warps=4, num_stages=3, widening=2),
        256: Sizes(rows=64, keys=32, split=SPLIT, num_warps=8, num_stages=2),
    },
    "sm_100": {
        64: Sizes(rows=64, keys=64, split=SPLIT, num_warps=4, num_stages=3),
        128: Sizes(
            rows=64,
            keys=32,
            split=SPLIT,
            num_warps=4,
            num_stages=3,
            max_registers=255,
            wide_is_bounded=False,
        ),
        256: Sizes(rows=64, keys=32, split=SPLIT, num_warps=8, num_stages=2, wide_stages=1),
    },
    "gfx942": {256: Sizes(rows=64, keys=32, split=SPLIT, num_warps=4, num_stages=2)},
}
"""By target and largest head size: the largest tiles that spill no registers; a program holds two
accumulators, of the split and of those before it."""

SINGLE: Final = {
    64: Sizes(rows=32, keys=32, split=SPLIT, num_warps=8, num_stages=1, max_registers=128),
    256: Sizes(rows=16, keys=16, split=SPLIT, num_warps=8, num_stages=1, max_registers=128),
}
"""The same in float32 on every target; it is for proofs more than for speed."""


def choose_sizes(target: str, dtype: torch.dtype, head_dim: int, group: int) -> Sizes:
    """Return the tile sizes for a model on a device, by the dtype of its queries.

    Raises ValueError for heads that are larger than any tile.
    """
    table = SINGLE if dtype == torch.float32 else HALF[target]
    fitting = [sizes for largest, sizes in table.items() if head_dim <= largest]
    if not fitting:
        raise ValueError(
            f"q has heads of {head_dim} numbers; the triton backend takes up to {max(table)}"
        )
    sizes = fitting[0]
    if target == "sm_90" and group != triton.next_power_of_2(group):
        # rows are divided by it, which takes registers
        sizes = sizes._replace(num_stages=min(sizes.num_stages, 2))
    if target == "gfx942":  # its compiler needs no such word, and knows none
        sizes = sizes._replace(max_registers=None)
    return sizes._replace(rows=max(sizes.rows, triton.next_power_of_2(group)))


def tiling_of(device: torch.device, dtype: torch.dtype, heads: Heads, *, wide: bool) -> Tiling:
    """Return what a list of work needs to know of the sizes; `wide` where queries are many."""
    sizes = choose_sizes(target_of(device), dtype, heads.dim, heads.group)
    sizes = sizes.wide if wide else sizes
    return Tiling(sizes.rows // heads.group, sizes.split)


def run_triton(call: Call, work: WorkPlan, sizes: Sizes | None = None) -> None:
    """Fill `call.out` by the list, without waiting for the device.

    sizes  for measurements, and those that the list was made for; a launch that leaves it out has
           the bits of every other
    """
    num_tokens, num_heads, head_dim = call.q.shape
    tops = masses = totals = None
    if work.num_splits:
        shape = (work.num_splits, num_tokens, num_heads)
        tops, masses = work.scratch.take("tops", *shape), work.scratch.take("masses", *shape)
        totals = work.scratch.take("totals", *shape, head_dim)
    partial = (tops, masses, totals)
    with device_guard(call.q.device):
        _attend(call, work, partial, sizes)
        if work.num_splits:
            merge_splits(call, work, partial)


def merge_splits(call: Call, work: WorkPlan, partial: tuple[torch.Tensor | None, ...]) -> None:
    """Fill `call.out` from partial results of its splits."""
    num_tokens, num_heads, head_dim = call.out.shape
    options = call.options
    constants = _merge_constants(head_dim, work.tiling.split, _features(options))
    # drafts that a row does not see lengthen its window by up to 63; a split too many folds to
    # nothing
    window = (options.window or 0) + (0 if options.tree_mask is None else 63)
    merge_kernel[(num_tokens, num_heads, triton.cdiv(head_dim, constants["PART"]))](
        call.out,
        options.lse,
        *partial,
        work.positions,
        options.sinks,
        window,
        num_tokens * num_heads,
        num_heads,
        *call.out.stride()[:2],
        **constants,
        num_warps=1,
        enable_fp_fusion=True,
    )


def _attend(
    call: Call,
    work: WorkPlan,
    partial: tuple[torch.Tensor | None, ...],
    sizes: Sizes | None,
) -> None:
    q, k_pool, v_pool, options = call.q, call.k_pool, call.v_pool, call.options
    num_tokens, num_heads, head_dim = q.shape
    if sizes is None:
        sizes = choose_sizes(target_of(q.device), q.dtype, head_dim, call.heads.group)
        sizes = sizes if work.num_splits else sizes.wide
    tree_mask, seats = options.tree_mask, None
    if tree_mask is not None and options.window is not None:
        places = (work.positions, work.first_news)
        seats, tree_mask = on_path(tree_mask, *places, options.window)
    scale = options.k_scale
    scale_strides = (0, 0, 1) if scale is None or scale.dim() == 1 else scale.stride()
    attention_kernel[(work.items.shape[0], call.heads.num_kv)](
        q,
        k_pool,
        v_pool,
        call.out,
        options.lse,
        *partial,
        call.block_table,
        work.items,
        work.tokens,
        work.positions,
        work.first_news,
        seats,
        options.sinks,
        tree_mask,
        options.k_scale,
        options.v_scale,
        call.scale * math.log2(math.e),
        (options.soft_cap or 1.0) * math.log2(math.e),
        options.window or 0,
        num_tokens * num_heads,
        num_heads,
        *q.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        *scale_strides,
        *call.out.stride()[:2],
        call.block_table.stride(0),
        **_attend_constants(
            sizes,
            call.heads.group,
            head_dim,
            k_pool.shape[1],
            work.num_splits > 0,
            _features(options),
        ),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        enable_fp_fusion=True,
        **({"maxnreg": sizes.max_registers} if sizes.max_registers else {}),
    )


def _features(options: Options) -> dict[str, Any]:
    """Return the compile-time arguments that options decide."""
    scale = options.k_scale
    kind: Scales = "none" if scale is None else "head" if scale.dim() == 1 else "slot"
    return {
        "WINDOW": options.window is not None,
        "SOFT_CAP": options.soft_cap is not None,
        "TREE": options.tree_mask is not None,
        "SINKS": options.sinks is not None,
        "SCALES": kind,
        "LSE": options.lse is not None,
    }


def _attend_constants(
    sizes: Sizes,
    group: int,
    head_dim: int,
    block_size: int,
    partial: bool,
    features: dict[str, Any],
) -> dict[str, Any]:
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size,
        "ROWS": sizes.rows,
        "KEYS": sizes.keys,
        "SPLIT": sizes.split,
        "PARTIAL": partial,
        **features,
    }


def _merge_constants(head_dim: int, split: int, features: dict[str, Any]) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "PART": min(MERGED, max(16, triton.next_power_of_2(head_dim))),
        "SPLIT": split,
        "AHEAD": AHEAD,
        **{name: features[name] for name in ("WINDOW", "SINKS", "LSE")},
    }


def variants(
    target: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    options: Options,
) -> Iterator[Variant]:
    """Iterate over the kernel of one model, for extend and for decode, at blocks of 16."""
    features = _features(options)
    label = f"{TYPES[dtype]} D {head_dim} group {group}"
    label += f" K/V {TYPES[kv_dtype]}" if kv_dtype != dtype else ""
    label += "".join(f" {name}" for name in _named(options))
    types = _types(dtype, kv_dtype)
    absent = {name: None for name in OPTIONAL if getattr(options, name) is None}
    if options.tree_mask is None or options.window is None:
        absent["seats"] = None
    sizes = choose_sizes(target, dtype, head_dim, group)
    for partial, tile in ((False, sizes.wide), (True, sizes)):
        unsplit = {} if partial else dict.fromkeys(("tops", "masses", "totals"))
        yield Variant(
            kernel=attention_kernel,
            label=f"{'decode' if partial else 'extend'} {label}",
            types={name: types[name] for name in attention_kernel.arg_names if name in types},
            constants={
                **_attend_constants(tile, group, head_dim, 16, partial, features),
                **absent,
                **unsplit,
                "scale_by_head": 1,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            max_registers=tile.max_registers,
            loose=frozenset(LOOSE),
            matrix=dtype != torch.float32,
            wide_loads=True,
            targets=frozenset({target}),
        )


def merges(target: str, head_dim: int, options: Options, split: int = SPLIT) -> Iterator[Variant]:
    """Iterate over the merge of one model's decode; it writes any dtype alike."""
    types = _types(torch.bfloat16, torch.bfloat16)
    absent = {name: None for name in ("lse", "sinks") if getattr(options, name) is None}
    yield Variant(
        kernel=merge_kernel,
        label=f"D {head_dim}" + "".join(f" {name}" for name in _named(options)),
        types={name: types[name] for name in merge_kernel.arg_names if name in types},
        constants={**_merge_constants(head_dim, split, _features(options)), **absent},
        num_warps=1,
        loose=frozenset(MERGE_LOOSE),
        targets=frozenset({target}),
    )


def _named(options: Options) -> Iterator[str]:
    """Iterate over what a label says of options."""
    for name, value in _features(options).items():
        if value not in (False, "none"):
            yield name.lower() if value is True else f"scale by {value}"


def _types(dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, str]:
    query, pool = f"*{TYPES[dtype]}", f"*{TYPES[kv_dtype]}"
    numbers = ("lse", "tops", "masses", "totals", "sinks", "k_scale", "v_scale")
    places = ("block_table", "items", "tokens", "positions", "first_news", "seats")
    return {
        **dict.fromkeys(("q", "out"), query),
        **dict.fromkeys(("k_pool", "v_pool"), pool),
        **dict.fromkeys(numbers, "*fp32"),
        **dict.fromkeys(places, "*i32"),
        **dict.fromkeys(("score_scale", "soft_cap"), "fp32"),
        "tree_mask": "*i64",
    }


def shipped() -> Iterator[Variant]:
    """Iterate over what is compiled and proven before a release: each size, dtype and option."""
    for target in TARGETS:
        yield from _shipped_for(target)


def _shipped_for(target: str) -> Iterator[Variant]:
    some = torch.empty(1)
    half = torch.bfloat16
    every = Options(window=128, sinks=some, soft_cap=30.0, lse=some)
    for head_dim in HEAD_DIMS:
        for dtype in FLOAT_DTYPES:
            yield from variants(target, dtype, dtype, head_dim, 4, Options())
        yield from merges(target, head_dim, Options())
    for group in (1, 3, 8):
        yield from variants(target, half, half, 128, group, Options())
    for options in (every, Options(tree_mask=some), Options(tree_mask=some, window=128)):
        yield from variants(target, half, half, 128, 4, options)
    yield from merges(target, 128, every)
    for kv_dtype in QUANTISED_DTYPES:
        if kv_dtype.is_floating_point and target not in FLOAT8_TARGETS:
            continue
        for scale in (some, some[None, None]):
            scaled = Options(k_scale=scale, v_scale=scale)
            yield from variants(target, half, kv_dtype, 128, 4, scaled)
