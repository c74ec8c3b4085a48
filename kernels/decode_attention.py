"""Attention of one or a few new tokens a sequence over long paged keys.

Owns: the contract of the operation.  Does not know: the arithmetic, that of `extend_attention`.
Idea: a step of few queries has too few tiles to fill a GPU, so each sequence's keys are dealt out
by splits at fixed positions, and merged in fixed order.  The extend kernel folds the same splits in
the same order by itself, so the bits are the same and the choice is a matter of speed alone.
"""

from __future__ import annotations

import torch

from kernels._attention_call import Options, check_call, check_paged
from kernels._attention_work import SharedPrefixes, decode_work
from kernels._extend_plan import ExtendPlan
from kernels.backend import choose_backend
from kernels.extend_attention import attend, plan_on_cpu
from kernels.scratch import Scratch


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    scale: float,
    max_seq_len: int | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    tree_mask: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
    out: torch.Tensor | None = None,
    plan: ExtendPlan | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Attend as `extend_attention` does, bit for bit, laid out for few queries and many keys.

    max_seq_len  no sequence is longer; the room of block_table when None.  Partial results take
                 max_seq_len / 512 * T * H * (D + 2) * 4 bytes, and empty splits a little time
    plan         of the same arguments, from `plan_decode`
    scratch      holds partial results, where no plan does; pass the same one step after step
    others       as in `extend_attention`
    returns      [T, H, D] in q.dtype

    Raises as `extend_attention` does.  Cost: every visible key and value is read once for all the
    heads that share it and for every 64 / group queries; nothing waits for the device.
    Source: Dao et al. 2023 (Flash-Decoding), with splits at absolute positions.
    """
    options = Options(window, sinks, soft_cap, tree_mask, k_scale, v_scale, lse)
    paged = (k_pool, v_pool, block_table, seq_lens, q_start)
    call = check_call(q, *paged, scale=scale, out=out, options=options)
    return attend(call, plan, plan_decode, backend, max_seq_len=max_seq_len, scratch=scratch)


def plan_decode(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    prefixes: SharedPrefixes | None = None,
    *,
    num_heads: int,
    num_tokens: int,
    max_seq_len: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    scratch: Scratch | None = None,
) -> ExtendPlan:
    """Prepare a step once, for the `decode_attention` of each of its layers.

    prefixes    None, but for `plan_shared_prefix`
    num_heads   query heads
    num_tokens  rows of q
    dtype       of q, where that is not the pools'
    others      as in `decode_attention`

    It holds, and costs, what `plan_extend` says.
    """
    heads = check_paged(k_pool, block_table, seq_lens, q_start, num_heads)
    scratch = scratch or Scratch(k_pool.device)
    chosen = choose_backend(k_pool.device, backend)
    if chosen != "triton":
        tables = (block_table, seq_lens, q_start)
        return plan_on_cpu(k_pool, *tables, heads, scratch, chosen, prefixes)
    from kernels._attention_triton import tiling_of  # optional: not on every platform

    return decode_work(
        seq_lens,
        q_start,
        prefixes,
        num_tokens=num_tokens,
        max_seq_len=longest(k_pool, block_table, max_seq_len),
        tiling=tiling_of(k_pool.device, dtype or k_pool.dtype, heads, wide=False),
        scratch=scratch,
    )


def longest(k_pool: torch.Tensor, block_table: torch.Tensor, max_seq_len: int | None) -> int:
    """Return the bound on lengths that a plan is made for."""
    room = block_table.shape[1] * k_pool.shape[1]
    if max_seq_len is None:
        return room
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len is {max_seq_len}, expected at least 1, or None")
    return min(max_seq_len, room)
