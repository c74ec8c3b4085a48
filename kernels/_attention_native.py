"""Attention in C, for CPUs: the plan of a step, and the call of each layer.

Owns: what the C code is given.  Does not know: the arithmetic, see native/attention_tile.h, nor how
a list of work is cut, see native/attention_plan.c.
Idea: all that is the same in each layer is written down once a step; a layer hands over pointers.
"""

from __future__ import annotations

from ctypes import addressof, byref
from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from kernels._attention_call import Call
from kernels._attention_work import SharedPrefixes
from kernels._extend_cut import Heads
from kernels._extend_plan import ExtendPlan, check_lengths
from kernels.native import DTYPES, library
from kernels.native.records import Attention, AttentionStep, Listing
from kernels.scratch import Scratch

TILE: Final = 64
"""Keys of a tile, as in native/attention_tile.h; sequences share whole tiles."""

LANES: Final = 16  # numbers of a head come in so many
MAX_HEAD_DIM: Final = 256
MAX_ROWS: Final = 96  # of an item; a token's heads stay together
ITEM_FIELDS: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan(ExtendPlan):
    """A list of work, and everything that it points to.

    lacking  a sequence with keys in no block of the pool, as a window leaves behind; -1: none
    """

    heads: Heads
    lacking: int
    pool: tuple[torch.dtype, int, int]  # dtype, blocks, slots of a block
    threads: int
    step: AttentionStep
    held: tuple[torch.Tensor, ...]


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there is a loop for this dtype of pools and queries, and for heads of this size."""
    return dtype in DTYPES and head_dim % LANES == 0 and 0 < head_dim <= MAX_HEAD_DIM


def plan_native(
    pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    heads: Heads,
    scratch: Scratch,
    prefixes: SharedPrefixes | None = None,
) -> NativePlan:
    """List the work of a step; ValueError for lengths that cannot be.

    Cost: 40 µs, and some 10 ns a token or block.
    """
    threads = torch.get_num_threads()
    listing = Listing(
        seq_lens=seq_lens.data_ptr(),
        q_start=q_start.data_ptr(),
        block_table=block_table.data_ptr(),
        num_sequences=seq_lens.shape[0],
        table_stride=block_table.stride(0),
        num_blocks=pool.shape[0],
        block_size=pool.shape[1],
        max_rows=max(MAX_ROWS, heads.group),
        num_kv_heads=heads.num_kv,
        group=heads.group,
        tile=TILE,
        room=block_table.shape[1] * pool.shape[1],
        threads=threads,
    )
    if prefixes is not None:
        listing.members, listing.num_members = prefixes.members.data_ptr(), len(prefixes.members)
        listing.lens, listing.num_groups = prefixes.lens.data_ptr(), len(prefixes.lens)
        listing.starts = prefixes.starts.data_ptr()
    num_tokens = int(q_start[-1])
    lists = _fill(listing, seq_lens, q_start, num_tokens)
    step = AttentionStep(
        items=listing.items,
        tokens=listing.tokens,
        limits=listing.limits,
        parts=listing.parts,
        block_table=block_table.data_ptr(),
        phase_ends=listing.phase_ends,
        table_stride=block_table.stride(0),
        num_kv_heads=heads.num_kv,
        group=heads.group,
        head_dim=heads.dim,
        block_size=pool.shape[1],
        max_rows=listing.max_rows,
        dtype=DTYPES[pool.dtype],
    )
    step.scratch_bytes = library().radixcache_attention_scratch(byref(step))
    num_heads = heads.num_kv * heads.group
    work = scratch.take("native", threads * step.scratch_bytes // 4)
    sums = scratch.take("part sums", listing.num_parts, num_heads, heads.dim)
    marks = scratch.take("part marks", listing.num_parts, num_heads, 2)
    step.scratch, step.part_sums, step.part_marks = (x.data_ptr() for x in (work, sums, marks))
    held = (lists, block_table, work, sums, marks)
    return NativePlan(num_tokens, heads, listing.lacking, kind_of(pool), threads, step, held)


def kind_of(pool: torch.Tensor) -> tuple[torch.dtype, int, int]:
    """Return what a plan holds for: the dtype of a pool, its blocks, and the slots of each."""
    return pool.dtype, pool.shape[0], pool.shape[1]


def _fill(
    listing: Listing, seq_lens: torch.Tensor, q_start: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Count the list, make room for it and fill it."""
    kernels = library()
    skipped = torch.empty(listing.num_sequences, dtype=torch.int32)
    listing.skipped = skipped.data_ptr()
    kernels.radixcache_attention_list(byref(listing))
    if listing.wrong >= 0:
        _refuse(seq_lens, q_start, listing.room)
    num_items = listing.phase_ends[2]
    sizes = (ITEM_FIELDS * num_items, listing.num_entries, num_tokens, num_tokens)
    lists = torch.empty(sum(sizes) + 1, dtype=torch.int32)
    at = lists.data_ptr()
    for name, size in zip(("items", "tokens", "limits", "parts"), sizes, strict=True):
        setattr(listing, name, at)
        at += 4 * size
    kernels.radixcache_attention_list(byref(listing))
    return lists


def _refuse(seq_lens: torch.Tensor, q_start: torch.Tensor, room: int) -> NoReturn:
    check_lengths(seq_lens.tolist(), q_start.tolist(), room)
    raise IndexError(
        f"prefixes.members names sequences outside 0 to {seq_lens.shape[0] - 1}, or a start in "
        "prefixes.starts is negative"
    )


def run_native(call: Call, plan: NativePlan) -> None:
    """Fill `call.out`; IndexError for keys in no block."""
    record = attention_record(call.q, call.k_pool, call.v_pool, call.out, call.scale, plan)
    library().radixcache_attention(byref(record), plan.threads)


def attention_record(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    plan: NativePlan,
) -> Attention:
    """Write down one layer's attention; IndexError for keys in no block."""
    if plan.lacking >= 0:
        raise IndexError(
            f"block_table[{plan.lacking}] names blocks outside 0 to {k_pool.shape[0] - 1}"
        )
    size = q.element_size()
    k_block, k_slot, k_head, _ = k_pool.stride()
    v_block, v_slot, v_head, _ = v_pool.stride()
    return Attention(
        addressof(plan.step),
        q.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        out.data_ptr(),
        size * q.stride(0),
        size * q.stride(1),
        size * out.stride(0),
        size * out.stride(1),
        size * k_block,
        size * k_slot,
        size * k_head,
        size * v_block,
        size * v_slot,
        size * v_head,
        scale,
    )
