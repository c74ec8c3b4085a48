"""Causal attention of new tokens over a paged prefix and over each other.

Owns: the contract of the operation, its argument checks and the choice of backend.  Does not know:
requests or phases: prefill, chunked prefill, decode and draft verification are all this one call.
Idea: keys are cut into tiles at fixed absolute positions and folded in ascending order, so the bits
of a row depend on its own query, its position and the keys before it, never on the rest.
"""

from __future__ import annotations

import torch

from kernels._extend_cut import Heads
from kernels._extend_plan import ExtendPlan, plan_torch
from kernels._extend_torch import run_torch
from kernels.backend import (
    check_device,
    check_dtype,
    check_pools,
    check_power_of_two_blocks,
    check_shape,
    check_unit_stride,
    choose_backend,
)
from kernels.scratch import Scratch


def extend_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    scale: float,
    backend: str | None = None,
    out: torch.Tensor | None = None,
    plan: ExtendPlan | None = None,
) -> torch.Tensor:
    """Attend from ragged suffix queries to every stored key at or before their position.

    q               [T, H, D]        queries of all sequences, end to end
    k_pool, v_pool  [N, B, Hkv, D]   N blocks of B slots, the suffix already stored; Hkv divides H
    block_table     [S, M] int32     block ids, -1 beyond the sequence
    seq_lens        [S] int32        keys visible to the last query of each sequence
    q_start         [S + 1] int32    sequence s owns the rows q_start[s] to q_start[s + 1] of q
    out             [T, H, D]        written and returned; allocated when None
    plan            of the same block_table, seq_lens and q_start, from `plan_extend`
    returns         [T, H, D] in q.dtype; accumulation in float32

        0                 seq_lens[s] - n          seq_lens[s]
        |--- prefix, only read ---|--- n queries ---|

    Raises ValueError or TypeError for arguments that do not fit together, before anything runs.
    Cost: two products of T * H * seq_len * D multiply-adds, halved where a prompt attends to
    itself; the torch backend copies the keys of each sequence once.
    Source: Dao 2023 (FlashAttention-2) tiling; paged layout as in Kwon et al. 2023.
    """
    check_shape("q", q, ("T", "H", "D"))
    check_dtype("q", q, (k_pool.dtype,))
    check_device("q", q, k_pool.device)
    check_unit_stride("q", q)
    heads = _check_paged(k_pool, block_table, seq_lens, q_start, q.shape[1])
    check_pools("k_pool", k_pool, "v_pool", v_pool)
    check_shape("k_pool", k_pool, ("N", "B", "Hkv", q.shape[2]))
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    check_shape("out", out, tuple(q.shape))
    check_dtype("out", out, (q.dtype,))
    check_device("out", out, q.device)
    check_unit_stride("out", out)
    if choose_backend(k_pool.device, backend) == "triton":
        check_power_of_two_blocks("k_pool", k_pool.shape[1])
        if q.shape[0]:
            from kernels._extend_triton import run_triton  # optional: not on every platform

            run_triton(q, k_pool, v_pool, block_table, seq_lens, q_start, scale, out)
        return out
    if plan is None:
        plan = plan_torch(k_pool, block_table, seq_lens, q_start, heads, Scratch(q.device))
    if plan.num_tokens != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, but q_start ends at {plan.num_tokens}")
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if plan.pool_layout != (tuple(pool.shape), pool.stride()) or plan.heads != heads:
            raise ValueError(f"{name} or the number of heads is not what the plan was made for")
    run_torch(plan, q, k_pool, v_pool, scale, out)
    return out


def plan_extend(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    num_heads: int,
    backend: str | None = None,
    scratch: Scratch | None = None,
) -> ExtendPlan | None:
    """Prepare a step once, for the `extend_attention` of each of its layers.

    num_heads  query heads; the other arguments as in `extend_attention`
    scratch    buffers to work in; pass the same one step after step
    returns    None where the backend has nothing to prepare

    The plan holds for pools of the shape and strides of k_pool, and while the three index tensors
    keep their values.  It changes the time of a call and never its bits.  Cost: 0.2 to 0.8 ms, and
    on a GPU a wait for the device; sequences that share their leading blocks are found here.
    """
    heads = _check_paged(k_pool, block_table, seq_lens, q_start, num_heads)
    if choose_backend(k_pool.device, backend) == "triton":
        return None
    if scratch is None:
        scratch = Scratch(k_pool.device)
    return plan_torch(k_pool, block_table, seq_lens, q_start, heads, scratch)


def _check_paged(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    num_heads: int,
) -> Heads:
    check_shape("k_pool", k_pool, ("N", "B", "Hkv", "D"))
    num_kv_heads, head_dim = k_pool.shape[2:]
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, not a multiple of the {num_kv_heads} of k_pool")
    check_shape("block_table", block_table, ("S", "M"))
    check_shape("seq_lens", seq_lens, (block_table.shape[0],))
    check_shape("q_start", q_start, (block_table.shape[0] + 1,))
    for name, tensor in (
        ("block_table", block_table),
        ("seq_lens", seq_lens),
        ("q_start", q_start),
    ):
        check_dtype(name, tensor, (torch.int32,))
        check_device(name, tensor, k_pool.device)
        check_unit_stride(name, tensor)
    return Heads(num_kv_heads, num_heads // num_kv_heads, head_dim)
