"""Causal attention of new tokens over a paged prefix and over each other.

Owns: the contract of the operation and the choice of backend.  Does not know: requests or phases:
prefill, chunked prefill, decode and draft verification are all this one call.
Idea: keys are cut into tiles at fixed absolute positions and folded in ascending order, so the bits
of a row depend on its own query, its position and the keys before it, never on the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels._attention_call import Call, Options, check_call, check_paged
from kernels._attention_native import NativePlan, kind_of, plan_native, run_native, takes
from kernels._attention_torch import run_options
from kernels._attention_work import SharedPrefixes, WorkPlan, extend_work
from kernels._extend_cut import Heads
from kernels._extend_plan import ExtendPlan, TorchPlan, plan_torch
from kernels._extend_torch import run_torch
from kernels.backend import check_float8, check_ids, check_power_of_two_blocks, choose_backend
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
) -> torch.Tensor:
    """Attend from ragged suffix queries to every stored key at or before their position.

    q               [T, H, D]        queries of all sequences, end to end
    k_pool, v_pool  [N, B, Hkv, D]   N blocks of B slots, the suffix already stored; Hkv divides H
    block_table     [S, M] int32     block ids, -1 beyond the sequence
    seq_lens        [S] int32        keys visible to the last query of each sequence
    q_start         [S + 1] int32    sequence s owns the rows q_start[s] to q_start[s + 1] of q
    window          a row sees the last `window` keys only, its own included, of those that it would
                    see without; keys before those of the first row are not read, so their blocks
                    may be gone
    sinks           [H] float32      a score that takes weight and gives no value, once a row
    soft_cap        scores become soft_cap * tanh(score / soft_cap)
    tree_mask       [T] int64        bit j clear hides the j-th new token of the row's sequence; -1
                                     hides none; tokens from the 64th on are never hidden, and
                                     windows of their rows count positions
    k_scale, v_scale  float32        [Hkv] or [N, B, Hkv], for pools of float8 or int8:
                                     value = stored * scale; q is then of any float dtype
    lse             [T, H] float32   written if given: log of the sum of exp(score), sinks included
    out             [T, H, D]        written and returned; allocated when None
    plan            of the same block_table, seq_lens and q_start, from `plan_extend`
    returns         [T, H, D] in q.dtype; accumulation in float32; zeros, and -inf in lse, for a row
                    from which tree_mask and window hide every key, its own included

        0                 seq_lens[s] - n          seq_lens[s]
        |--- prefix, only read ---|--- n queries ---|

    Raises ValueError or TypeError for arguments that do not fit together, before anything runs.
    Cost: two products of T * H * seq_len * D multiply-adds, halved where a prompt attends to
    itself; the torch backend copies the keys of each sequence once, and is slower with options.
    Source: Dao 2023 (FlashAttention-2) tiling; paged layout as in Kwon et al. 2023; sinks as in
    Xiao et al. 2023.
    """
    options = Options(window, sinks, soft_cap, tree_mask, k_scale, v_scale, lse)
    paged = (k_pool, v_pool, block_table, seq_lens, q_start)
    call = check_call(q, *paged, scale=scale, out=out, options=options)
    return attend(call, plan, plan_extend, backend)


def attend(
    call: Call,
    plan: ExtendPlan | None,
    planner: Callable[..., ExtendPlan | None],
    backend: str | None,
    **wishes: Any,
) -> torch.Tensor:
    """Run an attention operation on the backend that is to run it.

    planner  makes the list of work where no plan is given, from the call's arguments and `wishes`
    """
    chosen = choose_backend(call.k_pool.device, backend)
    if chosen == "native" and takes(call.k_pool.dtype, call.q.shape[2]):
        if call.options.are_plain:
            return attend_native(call, plan, planner, **wishes)
        plan = None  # the path with options plans nothing
    if chosen != "triton":
        return attend_torch(call, plan)
    check_for_triton(call)
    num_tokens, num_heads, _ = call.q.shape
    if num_tokens:
        from kernels._attention_triton import run_triton  # optional: not on every platform

        if plan is None:
            plan = planner(
                call.k_pool,
                call.block_table,
                call.seq_lens,
                call.q_start,
                num_heads=num_heads,
                num_tokens=num_tokens,
                dtype=call.q.dtype,
                backend=backend,
                **wishes,
            )
        run_triton(call, work_of(plan, call.q))
    return call.out


def attend_torch(call: Call, plan: ExtendPlan | None) -> torch.Tensor:
    """Run any attention operation in torch, where all of them are the same."""
    if plan is not None and not isinstance(plan, TorchPlan):
        raise TypeError(f"plan is a {type(plan).__name__}, made for another backend than torch")
    if not call.options.are_plain:
        if call.q.shape[0] != int(call.q_start[-1]):
            raise ValueError(
                f"q has {call.q.shape[0]} rows, but q_start ends at {int(call.q_start[-1])}"
            )
        run_options(call)
        return call.out
    if plan is None:
        scratch = Scratch(call.q.device)
        tables = (call.block_table, call.seq_lens, call.q_start)
        plan = plan_torch(call.k_pool, *tables, call.heads, scratch)
    if plan.num_tokens != call.q.shape[0]:
        raise ValueError(f"q has {call.q.shape[0]} rows, but q_start ends at {plan.num_tokens}")
    for name, pool in (("k_pool", call.k_pool), ("v_pool", call.v_pool)):
        if plan.pool_layout != (tuple(pool.shape), pool.stride()) or plan.heads != call.heads:
            raise ValueError(f"{name} or the number of heads is not what the plan was made for")
    run_torch(plan, call.q, call.k_pool, call.v_pool, call.scale, call.out)
    return call.out


def attend_native(
    call: Call, plan: ExtendPlan | None, planner: Callable[..., ExtendPlan | None], **wishes: Any
) -> torch.Tensor:
    """Run any plain attention operation in C, where all of them are the same."""
    num_tokens, num_heads, _ = call.q.shape
    if plan is None:
        tables = (call.block_table, call.seq_lens, call.q_start)
        sizes = {"num_heads": num_heads, "num_tokens": num_tokens}
        plan = planner(call.k_pool, *tables, **sizes, backend="native", **wishes)
    if not isinstance(plan, NativePlan):
        raise TypeError(f"plan is a {type(plan).__name__}, made for another backend than native")
    if plan.num_tokens != num_tokens:
        raise ValueError(f"q has {num_tokens} rows, but q_start ends at {plan.num_tokens}")
    if (plan.heads, plan.pool) != (call.heads, kind_of(call.k_pool)):
        raise ValueError("k_pool or the number of heads is not what the plan was made for")
    run_native(call, plan)
    return call.out


def plan_on_cpu(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    heads: Heads,
    scratch: Scratch,
    chosen: str,
    prefixes: SharedPrefixes | None = None,
) -> ExtendPlan:
    """Plan any attention operation for the backend that was chosen, torch or native."""
    tables = (block_table, seq_lens, q_start)
    if chosen == "native" and takes(k_pool.dtype, heads.dim):
        return plan_native(k_pool, *tables, heads, scratch, prefixes)
    return plan_torch(k_pool, *tables, heads, scratch)


def check_for_triton(call: Call) -> None:
    """Raise for what the Triton kernels cannot address; look at ids where debugging."""
    check_power_of_two_blocks("k_pool", call.k_pool.shape[1])
    check_float8("k_pool", call.k_pool)
    check_ids("block_table", call.block_table, -1, call.k_pool.shape[0])
    room = call.block_table.shape[1] * call.k_pool.shape[1]
    check_ids("seq_lens", call.seq_lens, 0, room + 1)
    check_ids("q_start", call.q_start, 0, call.q.shape[0] + 1)


def work_of(plan: ExtendPlan | None, q: torch.Tensor) -> WorkPlan:
    """Return the plan as a list of work, having checked that it is one and fits q."""
    if not isinstance(plan, WorkPlan):
        raise TypeError(f"plan is a {type(plan).__name__}, made for another backend than triton")
    if plan.num_tokens != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, but the plan has {plan.num_tokens}")
    return plan


def plan_extend(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    num_heads: int,
    num_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    scratch: Scratch | None = None,
) -> ExtendPlan | None:
    """Prepare a step once, for the `extend_attention` of each of its layers.

    num_heads   query heads; the other arguments as in `extend_attention`
    num_tokens  rows of q; the Triton backend plans nothing without it
    dtype       of q, where that is not the pools'
    scratch     buffers to work in; pass the same one step after step
    returns     None where nothing was prepared

    The plan holds for pools of the shape and strides of k_pool, and while the three index tensors
    keep their values.  It changes the time of a call and never its bits.  Cost: 0.2 to 0.8 ms on a
    CPU, where sequences that share their leading blocks are found; the Triton backend launches some
    twenty small operations and waits for nothing.
    """
    heads = check_paged(k_pool, block_table, seq_lens, q_start, num_heads)
    if scratch is None:
        scratch = Scratch(k_pool.device)
    chosen = choose_backend(k_pool.device, backend)
    if chosen != "triton":
        return plan_on_cpu(k_pool, block_table, seq_lens, q_start, heads, scratch, chosen)
    if num_tokens is None:
        return None
    from kernels._attention_triton import tiling_of  # optional: not on every platform

    tiling = tiling_of(k_pool.device, dtype or k_pool.dtype, heads, wide=True)
    return extend_work(seq_lens, q_start, num_tokens=num_tokens, tiling=tiling, scratch=scratch)
