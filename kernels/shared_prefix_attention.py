"""Attention of sequences that begin alike, reading the common prefix once: a cascade.

Owns: the contract of the operation.  Does not know: who shares what; the caller's tree does.
Idea: the splits that a group has in common become work items of their own, whose rows are the
queries of the whole group.  The rest is decode attention: the same splits, merged in the same
order, so the bits are those of every sequence alone.

    group of 3     | split 0 | split 1 |- - common - -|
    sequence a     |         |         | split 2 | split 3 |      what is common beyond the last
    sequence b     |         |         | split 2 |                whole split is read by each
    sequence c     |         |         | split 2 | split 3 |
"""

from __future__ import annotations

from functools import partial

import torch

from kernels._attention_call import Options, check_call
from kernels._attention_native import TILE
from kernels._attention_work import SPLIT, SharedPrefixes
from kernels._extend_plan import ExtendPlan
from kernels.backend import check_dense, check_ids, choose_backend
from kernels.decode_attention import plan_decode
from kernels.extend_attention import attend
from kernels.scratch import Scratch


def shared_prefix_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    prefixes: SharedPrefixes,
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
    """Attend as `decode_attention` does, bit for bit, reading a group's common prefix once.

    prefixes  the groups; a sequence of no group is decoded alone
    plan      of the same arguments, from `plan_shared_prefix`
    others    as in `decode_attention`
    returns   [T, H, D] in q.dtype

    Raises as `extend_attention` does.  Cost: whole units of keys (`shared_unit`: 512, or 64 on the
    native backend) at the front of a group are read once for every 64 / group queries of all its
    members together, everything else as in `decode_attention`.  The torch backend finds shared
    prefixes by itself.
    Source: Juravsky et al. 2024 (Hydragen); Ye et al. 2024 (cascade inference).
    """
    options = Options(window, sinks, soft_cap, tree_mask, k_scale, v_scale, lse)
    paged = (k_pool, v_pool, block_table, seq_lens, q_start)
    call = check_call(q, *paged, scale=scale, out=out, options=options)
    check_prefixes(prefixes, block_table)
    planner = partial(plan_shared_prefix, prefixes=prefixes)
    return attend(call, plan, planner, backend, max_seq_len=max_seq_len, scratch=scratch)


def plan_shared_prefix(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    prefixes: SharedPrefixes,
    *,
    num_heads: int,
    num_tokens: int,
    max_seq_len: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    scratch: Scratch | None = None,
) -> ExtendPlan:
    """Prepare a step once, for the `shared_prefix_attention` of each of its layers.

    num_heads   query heads
    num_tokens  rows of q
    dtype       of q, where that is not the pools'
    others      as in `shared_prefix_attention`

    It holds, and costs, what `plan_extend` says.
    """
    check_prefixes(prefixes, block_table)
    return plan_decode(
        k_pool,
        block_table,
        seq_lens,
        q_start,
        prefixes,
        num_heads=num_heads,
        num_tokens=num_tokens,
        max_seq_len=max_seq_len,
        dtype=dtype,
        backend=backend,
        scratch=scratch,
    )


def shared_unit(device: torch.device, backend: str | None = None) -> int:
    """Return how many tokens a group must have in common for a backend to read them once.

    Longer prefixes count in multiples of it.
    """
    return TILE if choose_backend(device, backend) == "native" else SPLIT


def check_prefixes(prefixes: SharedPrefixes, block_table: torch.Tensor) -> None:
    """Raise unless the groups are what a launch can address; look at ids where debugging."""
    device, num_groups = block_table.device, prefixes.lens.shape[0]
    check_dense("prefixes.members", prefixes.members, ("P",), torch.int32, device)
    check_dense("prefixes.lens", prefixes.lens, ("G",), torch.int32, device)
    check_dense("prefixes.starts", prefixes.starts, (num_groups + 1,), torch.int32, device)
    check_ids("prefixes.members", prefixes.members, 0, block_table.shape[0])
    check_ids("prefixes.starts", prefixes.starts, 0, prefixes.members.shape[0] + 1)
