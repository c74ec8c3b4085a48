"""Attention over latents in Triton: the kernel of `mla_attention`.

Owns: the arithmetic of a work item over a latent pool.  Does not know: who made the list of items,
see _attention_work.py, nor the sizes it is compiled with, see _mla_triton.py.
Idea: a slot of the pool is key and value at once, so a tile of it is read once, multiplied with the
queries, and multiplied again with the weights.  The sum is as wide as the latent and takes half of
a multiprocessor's registers, so there is none to fold it into: every item is one split, and
`merge_kernel` folds them.  It is kept in two halves, whose way to memory takes less room.

    a slot of the pool       |            latent            | turned |
    key                      |<------------------------------------->|
    value                    |<---------------------------->|
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels._attention_kernel import weigh

LOOSE = ("num_rows", "num_heads", "table_by_sequence")  # as those of attention_kernel


@triton.jit
def columns(slot, stored, dtype: tl.constexpr, NUM: tl.constexpr, WIDTH: tl.constexpr):
    """Load the first `NUM` numbers of each stored slot, and zeros elsewhere: [KEYS, WIDTH]."""
    column = tl.arange(0, WIDTH)[None, :]
    mask = stored[:, None]
    if NUM < WIDTH:
        mask = mask & (column < NUM)
    return tl.load(slot + column, mask=mask, other=0.0).to(dtype)


@triton.jit
def attend_latents(
    left_queries,  # [ROWS, DIM / 2]
    right_queries,
    turned_queries,  # [ROWS, TURNED]
    pool,
    table,  # block ids of the sequence
    position,  # [ROWS]
    low,  # the keys from `low`, a multiple of KEYS, to before `high`
    high,
    score_scale,
    pool_scale,
    by_block,
    by_slot,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Attend to one split from nothing: the top score, the mass above it, the unnormalised sum."""
    key = tl.arange(0, KEYS)
    HALF: tl.constexpr = DIM // 2
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.full((ROWS,), 0.0, tl.float32)
    left = tl.full((ROWS, HALF), 0.0, tl.float32)
    right = tl.full((ROWS, HALF), 0.0, tl.float32)
    if SCALED:
        score_scale = score_scale * tl.load(pool_scale)
    for start in range(low, high, KEYS):
        at = start + key
        stored = at < high
        block = tl.load(table + at // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        slot = pool + (block * by_block + at % BLOCK_SIZE * by_slot)[:, None]
        left_latents = columns(slot, stored, left_queries.dtype, LATENT_DIM, HALF)
        right_latents = columns(slot + HALF, stored, left_queries.dtype, LATENT_DIM - HALF, HALF)
        turned = columns(slot + LATENT_DIM, stored, left_queries.dtype, ROPE_DIM, TURNED)
        scores = tl.dot(turned_queries, tl.trans(turned), input_precision="ieee")
        scores = tl.dot(left_queries, tl.trans(left_latents), scores, input_precision="ieee")
        scores = tl.dot(right_queries, tl.trans(right_latents), scores, input_precision="ieee")
        scores = scores * score_scale
        visible = at[None, :] <= position[:, None]  # and before `high`, as every position is
        top, weights, decay = weigh(tl.where(visible, scores, float("-inf")), top)
        mass = tl.fma(mass, decay, tl.sum(weights, 1))
        weights = weights.to(left_queries.dtype)
        left = tl.dot(weights, left_latents, left * decay[:, None], input_precision="ieee")
        right = tl.dot(weights, right_latents, right * decay[:, None], input_precision="ieee")
    if SCALED:
        scale = tl.load(pool_scale)
        left = left * scale
        right = right * scale
    return top, mass, left, right


@triton.jit
def rows_of(item, tokens, num_heads, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Token and head of each row of a tile, and whether it is one of the item's."""
    # the item is read anew each time: places of results would else be worked out before the keys
    # are met, and kept in registers, of which the sum leaves none
    first = tl.load(item + 3, volatile=True)
    num_tokens = tl.load(item + 4, volatile=True)
    row = tl.arange(0, ROWS)
    head = tl.program_id(1) * GROUP + row % GROUP
    real = (row < num_tokens * GROUP) & (head < num_heads)
    token = tl.load(tokens + first + row // GROUP, mask=real, other=0).to(tl.int64)
    return token, head, real


@triton.jit(do_not_specialize=LOOSE)
def mla_kernel(
    q_latent,  # [T, H, R]
    q_rope,  # [T, H, P]
    pool,  # [N, B, 1, R + P]
    tops,  # [splits, T, H], for `merge_kernel`
    masses,
    totals,  # [splits, T, H, R]
    block_table,  # [S, M]
    items,  # [items, 6]
    tokens,  # rows of q, in the order of the items
    positions,  # [T]
    pool_scale,  # [1]
    score_scale,  # times log2(e): the softmax is taken to base 2
    num_rows,  # T * H
    num_heads,
    latent_by_token,  # strides, in elements
    latent_by_head,
    rope_by_token,
    rope_by_head,
    by_block,
    by_slot,
    table_by_sequence,
    GROUP: tl.constexpr,  # query heads of a tile
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    DIM: tl.constexpr,  # LATENT_DIM rounded up to a power of two
    TURNED: tl.constexpr,  # ROPE_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a query tile; row r is head r % GROUP of token r // GROUP
    KEYS: tl.constexpr,  # of a key tile
    SPLIT: tl.constexpr,  # keys of a split
    SCALED: tl.constexpr,
):
    """Compute one work item for the heads of one tile."""
    item = items + tl.program_id(0) * 6
    if tl.load(item + 4) == 0:  # the list is as long as it could have been
        return
    split = tl.load(item + 1)
    key_end = tl.load(item + 5)
    table = block_table + tl.load(item).to(tl.int64) * table_by_sequence

    token, head, real = rows_of(item, tokens, num_heads, GROUP, ROWS)
    position = tl.load(positions + token, mask=real, other=-1)
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, HALF)
    turn = tl.arange(0, TURNED)
    latent = (q_latent + token * latent_by_token + head * latent_by_head)[:, None] + dim[None, :]
    left_queries = tl.load(latent, mask=real[:, None] & (dim < LATENT_DIM)[None, :], other=0.0)
    right_queries = tl.load(
        latent + HALF, mask=real[:, None] & (HALF + dim < LATENT_DIM)[None, :], other=0.0
    )
    turned_queries = tl.load(
        (q_rope + token * rope_by_token + head * rope_by_head)[:, None] + turn[None, :],
        mask=real[:, None] & (turn < ROPE_DIM)[None, :],
        other=0.0,
    )
    # fmt: off
    top, mass, left, right = attend_latents(
        left_queries, right_queries, turned_queries, pool, table, position,
        split * SPLIT, tl.minimum(split * SPLIT + SPLIT, key_end),
        score_scale, pool_scale, by_block, by_slot,
        ROWS, KEYS, LATENT_DIM, ROPE_DIM, DIM, TURNED, BLOCK_SIZE, SCALED,
    )
    # fmt: on
    token, head, real = rows_of(item, tokens, num_heads, GROUP, ROWS)
    at = token * num_heads + head + tl.load(item + 1, volatile=True) * num_rows
    tl.store(tops + at, top, mask=real)
    tl.store(masses + at, mass, mask=real)
    total_at = totals + at[:, None] * LATENT_DIM + dim[None, :]
    tl.store(total_at, left, mask=real[:, None] & (dim < LATENT_DIM)[None, :])
    tl.store(total_at + HALF, right, mask=real[:, None] & (HALF + dim < LATENT_DIM)[None, :])
