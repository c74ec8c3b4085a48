"""The attention kernel in Triton, and the one that merges its partial results.

Owns: the arithmetic of a work item.  Does not know: who made the list of items, see
_attention_work.py, nor the sizes it is compiled with, see _attention_triton.py.
Idea: an item is a tile of query rows against a range of splits.  Splits and key tiles stand at
absolute multiples of `SPLIT` and `KEYS`; each split starts from nothing, and splits fold in
ascending order, here or in `merge_kernel`, by the same function.  A hidden score is -inf, so that
hidden work changes nothing.  A row's bits then do not tell which list its item was on.

    keys of a sequence   |     split 0     |     split 1     | split 2 ..
    key tiles            | 0 | 1 | 2 | 3   | 4 | 5 | 6 | 7   | 8 ..
    one item             |<---- all splits of its rows, or exactly one ---->|

`tl.fma` is written out where a product meets a sum: a compiler free to choose would round the
fold of one kernel otherwise than that of the other.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))

# Arguments that differ from step to step or model to model: compiled for any value, or a request
# would wait for a compiler whenever one became a multiple of 16.
LOOSE = ("window", "num_rows", "num_heads", "scale_by_slot", "table_by_sequence")
MERGE_LOOSE = ("window", "num_rows", "num_heads")


@triton.jit
def attend_split(
    queries,  # [ROWS, DIM]
    k_pool,
    v_pool,
    table,  # block ids of the sequence
    position,  # [ROWS]
    first_new,  # [ROWS] position of the first new token of the row's sequence
    seen_bits,  # [ROWS] int64
    seat,  # [ROWS] position on the row's own path, from which its window counts
    kv_head,
    low,  # the keys from `low`, a multiple of KEYS, to before `high`
    high,
    first_key,  # no row sees a key before it
    score_scale,
    soft_cap,
    window,
    k_scale,
    v_scale,
    k_by_block,
    k_by_slot,
    k_by_head,
    v_by_block,
    v_by_slot,
    v_by_head,
    scale_by_block,
    scale_by_slot,
    scale_by_head,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TREE: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Attend to one split from nothing: the top score, the mass above it, the unnormalised sum."""
    key = tl.arange(0, KEYS)
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD_DIM
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.full((ROWS,), 0.0, tl.float32)
    total = tl.full((ROWS, DIM), 0.0, tl.float32)
    if SCALES == "head":
        score_scale = score_scale * tl.load(k_scale + kv_head * scale_by_head)
    for start in range(low, high, KEYS):
        at = start + key
        # keys outside the range stand for its first and its last: seen by no row, and finite
        stored = tl.minimum(tl.maximum(at, first_key), high - 1)
        block = tl.load(table + stored // BLOCK_SIZE).to(tl.int64)
        slot = stored % BLOCK_SIZE
        scale_at = block * scale_by_block + slot * scale_by_slot + kv_head * scale_by_head
        k_at = k_pool + block * k_by_block + slot * k_by_slot + kv_head * k_by_head
        k_at = k_at[None, :] + dim[:, None]
        if HEAD_DIM == DIM:
            keys = tl.load(k_at).to(queries.dtype)
        else:
            keys = tl.load(k_at, mask=in_head[:, None], other=0.0).to(queries.dtype)
        scores = tl.dot(queries, keys, input_precision="ieee") * score_scale
        if SCALES == "slot":
            scores = scores * tl.load(k_scale + scale_at)[None, :]
        if SOFT_CAP:  # tanh, to base 2
            raised = tl.exp2(scores * (2.0 * LOG2_E / soft_cap))
            scores = soft_cap * (1.0 - 2.0 / (raised + 1.0))
        # a distance below zero is a large one without a sign: one comparison tells both ends
        distance = (position[:, None] - at[None, :]).to(tl.uint32, bitcast=True)
        visible = distance < 0x80000000
        if TREE:
            visible = visible & in_tree(at, first_new, seen_bits)
            if WINDOW:
                visible = visible & (at[None, :] > seat[:, None] - window)
        elif WINDOW:
            visible = distance < window.to(tl.uint32)
        top, weights, decay = weigh(tl.where(visible, scores, float("-inf")), top)
        v_at = v_pool + block * v_by_block + slot * v_by_slot + kv_head * v_by_head
        v_at = v_at[:, None] + dim[None, :]
        if HEAD_DIM == DIM:
            values = tl.load(v_at).to(queries.dtype)
        else:
            values = tl.load(v_at, mask=in_head[None, :], other=0.0).to(queries.dtype)
        mass = tl.fma(mass, decay, tl.sum(weights, 1))
        if SCALES == "slot":
            weights = weights * tl.load(v_scale + scale_at)[None, :]
        total = tl.dot(
            weights.to(queries.dtype), values, total * decay[:, None], input_precision="ieee"
        )
    if SCALES == "head":
        total = total * tl.load(v_scale + kv_head * scale_by_head)
    return top, mass, total


@triton.jit
def in_tree(at, first_new, seen_bits):
    """Tell which keys a tree of drafts lets each row see: those before it, and its ancestors."""
    new = (at[None, :] - first_new[:, None]).to(tl.uint32, bitcast=True)
    bit = (seen_bits[:, None] >> (new & 63)).to(tl.uint32) & 1
    return (bit | (new >> 6)) != 0  # keys before the new ones are far without a sign


@triton.jit
def weigh(scores, top):
    """Raise the top by a tile's scores; return it, their weights, and what older ones decay by."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(scores - base[:, None]), tl.exp2(top - base)


@triton.jit
def fold(top, mass, total, next_top, next_mass, next_total):
    """Join a later split to earlier ones; joining to nothing is exact."""
    peak = tl.maximum(top, next_top)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    decay = tl.exp2(top - base)
    share = tl.exp2(next_top - base)
    joined = tl.fma(
        total, tl.broadcast_to(decay[:, None], total.shape), next_total * share[:, None]
    )
    return peak, tl.fma(mass, decay, next_mass * share), joined


@triton.jit
def finish(
    out,
    lse,
    sinks,
    token,  # [ROWS] int64, rows of q
    head,  # [ROWS]
    dim,  # [DIM]
    real,  # [ROWS] whether a row is one of the item's
    top,
    mass,
    total,  # [ROWS, DIM]
    out_by_token,
    out_by_head,
    num_heads,
    HEAD_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Count the sinks, once a row; normalise; write."""
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2_E
        peak = tl.maximum(top, sink)
        decay = tl.exp2(top - peak)
        mass = tl.fma(mass, decay, tl.exp2(sink - peak))
        total = total * decay[:, None]
        top = peak
    mass = tl.where(mass == 0.0, 1.0, mass)  # a row that sees nothing, or one too many
    at = token * out_by_token + head * out_by_head
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + at[:, None] + dim[None, :], result, mask=real[:, None] & (dim < HEAD_DIM)[None, :]
    )
    if LSE:
        tl.store(lse + token * num_heads + head, (top + tl.log2(mass)) / LOG2_E, mask=real)


@triton.jit(do_not_specialize=LOOSE)
def attention_kernel(
    q,  # [T, H, D]
    k_pool,  # [N, B, Hkv, D]
    v_pool,
    out,  # [T, H, D]
    lse,  # [T, H]
    tops,  # [splits, T, H], partial results
    masses,
    totals,  # [splits, T, H, D]
    block_table,  # [S, M]
    items,  # [items, 6]
    tokens,  # rows of q, in the order of the items
    positions,  # [T]
    first_news,  # [T]
    seats,  # [T] where a window counts from, in a tree
    sinks,  # [H]
    tree_mask,  # [T]
    k_scale,  # [Hkv] or [N, B, Hkv]
    v_scale,
    score_scale,  # times log2(e): the softmax is taken to base 2
    soft_cap,  # likewise
    window,
    num_rows,  # T * H
    num_heads,
    q_by_token,  # strides, in elements
    q_by_head,
    k_by_block,
    k_by_slot,
    k_by_head,
    v_by_block,
    v_by_slot,
    v_by_head,
    scale_by_block,
    scale_by_slot,
    scale_by_head,
    out_by_token,
    out_by_head,
    table_by_sequence,
    GROUP: tl.constexpr,  # query heads of a key head
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a query tile; row r is query head r % GROUP of token r // GROUP
    KEYS: tl.constexpr,  # of a key tile
    SPLIT: tl.constexpr,  # keys of a split
    PARTIAL: tl.constexpr,  # whether an item is one split, whose result is merged later
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TREE: tl.constexpr,
    SINKS: tl.constexpr,
    SCALES: tl.constexpr,  # "none", "head" or "slot": what a scale belongs to
    LSE: tl.constexpr,
):
    """Compute one work item for one key head."""
    item = items + tl.program_id(0) * 6
    num_tokens = tl.load(item + 4)
    if num_tokens == 0:  # the list is as long as it could have been
        return
    kv_head = tl.program_id(1)
    first_split = tl.load(item + 1)
    end_split = tl.load(item + 2)
    key_end = tl.load(item + 5)
    table = block_table + tl.load(item).to(tl.int64) * table_by_sequence

    row = tl.arange(0, ROWS)
    real = row < num_tokens * GROUP
    token = tl.load(tokens + tl.load(item + 3) + row // GROUP, mask=real, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=real, other=-1)
    head = kv_head * GROUP + row % GROUP
    first_new, seen_bits, seat = position, token, position
    if TREE:
        first_new = tl.load(first_news + token, mask=real, other=0)
        seen_bits = tl.load(tree_mask + token, mask=real, other=0)
        if WINDOW:
            seat = tl.load(seats + token, mask=real, other=-1)
    dim = tl.arange(0, DIM)
    q_at = token * q_by_token + head * q_by_head
    in_queries = real[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=in_queries, other=0.0)

    first_key = 0
    if WINDOW:
        lowest = tl.min(tl.where(real, seat, key_end), 0)
        first_key = tl.maximum(lowest - window + 1, 0)
    first_tile = first_key // KEYS * KEYS  # the first that any row sees

    # fmt: off
    if PARTIAL:
        # a split before the window has no keys here, and no row's merge asks for it
        top, mass, total = attend_split(
            queries, k_pool, v_pool, table, position, first_new, seen_bits, seat, kv_head,
            tl.maximum(first_split * SPLIT, first_tile),
            tl.minimum(first_split * SPLIT + SPLIT, key_end), first_key,
            score_scale, soft_cap, window, k_scale, v_scale, k_by_block, k_by_slot, k_by_head,
            v_by_block, v_by_slot, v_by_head, scale_by_block, scale_by_slot, scale_by_head,
            ROWS, KEYS, HEAD_DIM, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, TREE, SCALES,
        )
        at = token * num_heads + head + first_split * num_rows
        tl.store(tops + at, top, mask=real)
        tl.store(masses + at, mass, mask=real)
        tl.store(totals + at[:, None] * HEAD_DIM + dim[None, :], total, mask=in_queries)
    else:
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        mass = tl.full((ROWS,), 0.0, tl.float32)
        total = tl.full((ROWS, DIM), 0.0, tl.float32)
        for split in range(tl.maximum(first_split, first_key // SPLIT), end_split):
            next_top, next_mass, next_total = attend_split(
                queries, k_pool, v_pool, table, position, first_new, seen_bits, seat, kv_head,
                tl.maximum(split * SPLIT, first_tile),
                tl.minimum(split * SPLIT + SPLIT, key_end), first_key,
                score_scale, soft_cap, window, k_scale, v_scale, k_by_block, k_by_slot, k_by_head,
                v_by_block, v_by_slot, v_by_head, scale_by_block, scale_by_slot, scale_by_head,
                ROWS, KEYS, HEAD_DIM, DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, TREE, SCALES,
            )
            top, mass, total = fold(top, mass, total, next_top, next_mass, next_total)
        finish(
            out, lse, sinks, token, head, dim, real, top, mass, total, out_by_token, out_by_head,
            num_heads, HEAD_DIM, SINKS, LSE,
        )
    # fmt: on


@triton.jit(do_not_specialize=MERGE_LOOSE)
def merge_kernel(
    out,  # [T, H, D]
    lse,  # [T, H]
    tops,  # [splits, T, H]
    masses,
    totals,  # [splits, T, H, D]
    positions,  # [T]
    sinks,  # [H]
    window,
    num_rows,  # T * H
    num_heads,
    out_by_token,
    out_by_head,
    HEAD_DIM: tl.constexpr,
    PART: tl.constexpr,  # numbers of a head that a program takes
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,  # splits that are read before the first of them is folded
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Fold the splits of a part of one head of one token, in ascending order."""
    position = tl.load(positions + tl.program_id(0))
    if position < 0:  # a row of no sequence
        return
    row = tl.arange(0, 1)
    head = tl.program_id(1) + row
    token = tl.program_id(0).to(tl.int64) + row
    dim = tl.program_id(2) * PART + tl.arange(0, PART)
    first_split = 0
    if WINDOW:
        first_split = tl.maximum(position - window + 1, 0) // SPLIT
    top = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.full((1,), 0.0, tl.float32)
    total = tl.full((1, PART), 0.0, tl.float32)
    # the fold is one long chain: what hides the memory's latency is reading ahead of it
    for split in tl.range(first_split, position // SPLIT + 1, loop_unroll_factor=AHEAD):
        at = token * num_heads + head + split * num_rows
        in_head = dim[None, :] < HEAD_DIM
        next_total = tl.load(
            totals + at[:, None] * HEAD_DIM + dim[None, :], mask=in_head, other=0.0
        )
        next_top, next_mass = tl.load(tops + at), tl.load(masses + at)
        top, mass, total = fold(top, mass, total, next_top, next_mass, next_total)
    # fmt: off
    finish(
        out, lse, sinks, token, head, dim, row == 0, top, mass, total, out_by_token, out_by_head,
        num_heads, HEAD_DIM, SINKS, LSE,
    )
    # fmt: on
