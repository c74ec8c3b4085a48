"""Extend attention in Triton: the path on a GPU.

Owns: the kernel and the sizes it is launched with.  Does not check arguments.
Idea: one program takes one tile of queries of one sequence and one key head, with the query heads
that share it as rows of the tile, so a key is read once for all of them.  Key tiles stand at
absolute multiples of `KEYS` and fold in ascending order; a hidden score is -inf, which changes
nothing, so a row's bits do not tell which other rows or keys its program held.

The sizes depend on dtype, head size and group, never on the batch: one class of bits for a model.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard


class Sizes(NamedTuple):
    """Compile-time sizes of the kernel for one model."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_sizes(dtype: torch.dtype, head_dim: int, group: int) -> Sizes:
    """Return the tile sizes for a model; float32 products need more registers a score."""
    if dtype == torch.float32 or head_dim > 128:
        sizes = Sizes(rows=32, keys=32, num_warps=8, num_stages=2)
    else:
        sizes = Sizes(rows=64, keys=64, num_warps=4, num_stages=2)
    return sizes._replace(rows=max(sizes.rows, triton.next_power_of_2(group)))


def run_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fill `out` as `extend_attention` says, without waiting for the device."""
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    group = num_heads // num_kv_heads
    sizes = choose_sizes(q.dtype, head_dim, group)
    tokens = sizes.rows // group
    # an upper bound: a program finds out on the device whether its tile exists
    grid = (num_tokens // tokens + block_table.shape[0], num_kv_heads)
    with device_guard(q.device):
        extend_kernel[grid](
            q,
            k_pool,
            v_pool,
            out,
            block_table,
            seq_lens,
            q_start,
            block_table.shape[0],
            scale * math.log2(math.e),
            *q.stride()[:2],
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            *out.stride()[:2],
            block_table.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            DIM=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_SIZE=block_size,
            TOKENS=tokens,
            ROWS=sizes.rows,
            KEYS=sizes.keys,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            enable_fp_fusion=True,
        )


@triton.jit(do_not_specialize=["num_sequences"])
def extend_kernel(
    q,  # [T, H, D]
    k_pool,  # [N, B, Hkv, D]
    v_pool,
    out,  # [T, H, D]
    block_table,  # [S, M]
    seq_lens,  # [S]
    q_start,  # [S + 1]
    num_sequences,
    score_scale,  # times log2(e): the softmax is taken to base 2
    q_by_token,  # strides, in elements
    q_by_head,
    k_by_block,
    k_by_slot,
    k_by_head,
    v_by_block,
    v_by_slot,
    v_by_head,
    out_by_token,
    out_by_head,
    table_by_sequence,
    GROUP: tl.constexpr,  # query heads of a key head
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # of a query tile
    ROWS: tl.constexpr,  # of a query tile; row r is query head r % GROUP of token r // GROUP
    KEYS: tl.constexpr,  # of a key tile
):
    """Write the output of one query tile for one key head."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Sequence s is given the tiles from q_start[s] // TOKENS + s on, which leaves room for its
    # last, partial one; ours is the last sequence that starts at or before this tile.
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(q_start + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    row_start = tl.load(q_start + low)
    num_queries = tl.load(q_start + low + 1) - row_start
    first = (tile - row_start // TOKENS - low) * TOKENS
    if first >= num_queries:
        return
    prefix_len = tl.load(seq_lens + low) - num_queries

    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    real = (row < TOKENS * GROUP) & (token < num_queries)
    token = tl.where(real, token, first)  # a row too many repeats one that sees a key: no NaN
    position = prefix_len + token
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD_DIM
    written = real[:, None] & in_head[None, :]
    q_at = (row_start + token).to(tl.int64) * q_by_token + head * q_by_head
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=written, other=0.0)

    key_end = prefix_len + tl.minimum(first + TOKENS, num_queries)  # no row sees more
    key = tl.arange(0, KEYS)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.full((ROWS,), 0.0, tl.float32)
    total = tl.full((ROWS, DIM), 0.0, tl.float32)
    for start in range(0, key_end, KEYS):
        at = start + key
        stored = at < key_end
        block = tl.load(
            block_table + low * table_by_sequence + at // BLOCK_SIZE,
            mask=stored,
            other=0,
        ).to(tl.int64)
        slot = at % BLOCK_SIZE
        k_at = block * k_by_block + slot * k_by_slot + kv_head * k_by_head
        keys = tl.load(
            k_pool + k_at[None, :] + dim[:, None],
            mask=stored[None, :] & in_head[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * score_scale
        scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        v_at = block * v_by_block + slot * v_by_slot + kv_head * v_by_head
        values = tl.load(
            v_pool + v_at[:, None] + dim[None, :],
            mask=stored[:, None] & in_head[None, :],
            other=0.0,
        )
        mass = mass * decay + tl.sum(weights, 1)
        total = tl.dot(
            weights.to(values.dtype), values, total * decay[:, None], input_precision="ieee"
        )
        top = new_top

    out_at = (row_start + token).to(tl.int64) * out_by_token + head * out_by_head
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + dim[None, :], result, mask=written)
