"""Attention over a paged pool of latents: DeepSeek's multi-head latent attention, absorbed.

Owns: the contract of the operation and the choice of backend and list of work.  Does not know: the
projections around it.
Idea: a token is stored once, as a latent that every head shares and a rotary part.  With the key
projection multiplied into the query and the value projection into what follows, attention is that
of many query heads over one key head, whose values are the front of its keys.

    score    = (q W_UK) · latent + q_rope · k_rope           W_UK  [R, D] of a head
    output   = (weights · latents) W_UV                      W_UV  [R, D] of a head
               |------- this ------|
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels._attention_call import Call, Options, check_paged
from kernels._attention_torch import run_options
from kernels._attention_work import SharedPrefixes
from kernels._extend_plan import ExtendPlan, TorchPlan, plan_torch
from kernels._extend_torch import run_torch
from kernels._mla_work import ChunkedPlan, latent_work
from kernels.backend import (
    FLOAT_DTYPES,
    QUANTISED_DTYPES,
    check_dense,
    check_device,
    check_dtype,
    check_out,
    check_shape,
    check_unit_stride,
    choose_backend,
)
from kernels.decode_attention import longest
from kernels.extend_attention import check_for_triton
from kernels.scratch import Scratch
from kernels.shared_prefix_attention import check_prefixes


def mla_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    prefixes: SharedPrefixes | None = None,
    *,
    scale: float,
    max_seq_len: int | None = None,
    pool_scale: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
    out: torch.Tensor | None = None,
    plan: ExtendPlan | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Attend from ragged queries to every stored latent at or before their position.

    q_latent     [T, H, R]          queries without position, multiplied with W_UK of their head
    q_rope       [T, H, P]          queries with position, turned
    pool         [N, B, 1, R + P]   N blocks of B slots: a latent (normalised), then the turned key;
                                    the new tokens' own are stored already
    block_table  [S, M] int32       block ids, -1 beyond the sequence
    seq_lens     [S] int32          tokens visible to the last query of each sequence
    q_start      [S + 1] int32      sequence s owns the rows q_start[s] to q_start[s + 1]
    prefixes     groups of sequences whose common prefix is read once for all, as in
                 `shared_prefix_attention`
    scale        of the scores: (D + P) ** -0.5 of the head before absorption, and YaRN's factor
    max_seq_len  no sequence is longer; the room of block_table when None
    pool_scale   [1] float32        for pools of float8_e4m3fn or int8: value = stored * scale; q is
                                    then of any float dtype
    lse          [T, H] float32     written if given: log of the sum of exp(score)
    out          [T, H, R]          written and returned, to be multiplied with W_UV; allocated when
                                    None
    plan         of the same arguments, from `plan_mla`
    scratch      holds partial results, where no plan does; pass the same one step after step
    returns      [T, H, R] in the dtype of q_latent; accumulation in float32

    To `store_kv`, `copy_blocks`, `gather_blocks` and `scatter_blocks` the halves of a slot are K
    and V: `k_pool, v_pool = pool.chunk(2, -1)`.  Windows, sinks, soft caps and trees
    of drafts are not taken.
    Raises ValueError or TypeError for arguments that do not fit together, before anything runs.
    Cost: 2 * (2 * R + P) FLOP a head, query and key.  On Triton, which waits for nothing, a page is
    read once for a tile of 64 rows (32 where the pool is of eight bits), heads first; partial
    results take at most 512 MiB or what one tile needs, but with `prefixes`
    max_seq_len / 1024 * T * H * (R + 2) * 4 bytes.
    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 and appendix C.
    """
    options = Options(k_scale=pool_scale, v_scale=pool_scale, lse=lse)
    paged = (pool, block_table, seq_lens, q_start)
    call = _check_call(q_latent, q_rope, *paged, scale=scale, out=out, options=options)
    if prefixes is not None:
        check_prefixes(prefixes, block_table)
    num_tokens, num_heads, latent_dim = q_latent.shape
    if choose_backend(pool.device, backend) != "triton":
        _attend_torch(call, q_rope, plan, scratch or Scratch(pool.device))
        return call.out
    check_for_triton(call)
    if num_tokens:
        from kernels._mla_triton import (  # optional: not on every platform
            MAX_LATENT_DIM,
            latent_tiling_of,
            run_latents,
        )

        if latent_dim > MAX_LATENT_DIM:
            raise ValueError(
                f"q_latent has latents of {latent_dim}; the triton backend takes up to "
                f"{MAX_LATENT_DIM}: use the torch backend"
            )
        if plan is None:
            plan = plan_mla(
                *paged,
                prefixes,
                num_heads=num_heads,
                num_tokens=num_tokens,
                max_seq_len=max_seq_len,
                dtype=q_latent.dtype,
                backend=backend,
                scratch=scratch,
            )
        if not isinstance(plan, ChunkedPlan):
            raise TypeError(f"plan is a {type(plan).__name__}, not one of plan_mla for triton")
        if plan.num_tokens != num_tokens:
            raise ValueError(f"q_latent has {num_tokens} rows, but the plan has {plan.num_tokens}")
        tiling = latent_tiling_of(pool.device, q_latent.dtype, pool.dtype, num_heads)
        if plan.chunks[0].tiling != tiling:
            raise ValueError("the number of heads or the dtype is not what the plan was made for")
        run_latents(call, q_rope, plan)
    return call.out


def plan_mla(
    pool: torch.Tensor,
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
    """Prepare a step once, for the `mla_attention` of each of its layers.

    num_heads   query heads
    num_tokens  rows of q_latent
    dtype       of q_latent, where that is not the pool's
    others      as in `mla_attention`

    It holds, and costs, what `plan_extend` says.
    """
    heads = check_paged(pool, block_table, seq_lens, q_start, num_heads, "pool")
    check_shape("pool", pool, ("N", "B", 1, "R + P"))
    if prefixes is not None:
        check_prefixes(prefixes, block_table)
    scratch = scratch or Scratch(pool.device)
    if choose_backend(pool.device, backend) != "triton":
        return plan_torch(pool, block_table, seq_lens, q_start, heads, scratch)
    from kernels._mla_triton import latent_tiling_of  # optional: not on every platform

    tiling = latent_tiling_of(pool.device, dtype or pool.dtype, pool.dtype, num_heads)
    return latent_work(
        seq_lens,
        q_start,
        prefixes,
        num_tokens=num_tokens,
        token_bytes=num_heads * (pool.shape[3] + 2) * 4,
        max_seq_len=longest(pool, block_table, max_seq_len),
        tiling=tiling,
        scratch=scratch,
    )


def _check_call(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None,
    options: Options,
) -> Call:
    """Return the call, its values the front of the pool, with an output of its own if need be."""
    check_shape("q_latent", q_latent, ("T", "H", "R"))
    check_shape("q_rope", q_rope, (*q_latent.shape[:2], "P"))
    check_dtype("pool", pool, (*FLOAT_DTYPES, *QUANTISED_DTYPES))
    quantised = pool.dtype in QUANTISED_DTYPES
    check_dtype("q_latent", q_latent, FLOAT_DTYPES if quantised else (pool.dtype,))
    check_dtype("q_rope", q_rope, (q_latent.dtype,))
    latent_dim = q_latent.shape[2]
    check_shape("pool", pool, ("N", "B", 1, latent_dim + q_rope.shape[2]))
    check_paged(pool, block_table, seq_lens, q_start, q_latent.shape[1], "pool")
    check_unit_stride("pool", pool)
    for name, tensor in (("q_latent", q_latent), ("q_rope", q_rope)):
        check_device(name, tensor, pool.device)
        check_unit_stride(name, tensor)
    options.check_rows(q_latent)
    _check_scale(pool, options.k_scale)
    out = check_out(out, q_latent.shape, q_latent)
    values = pool[..., :latent_dim]
    return Call(q_latent, pool, values, block_table, seq_lens, q_start, scale, out, options)


def _check_scale(pool: torch.Tensor, pool_scale: torch.Tensor | None) -> None:
    quantised = pool.dtype in QUANTISED_DTYPES
    if pool_scale is None:
        if quantised:
            raise ValueError(f"pool_scale is None, but a pool of {pool.dtype} needs a scale")
        return
    if not quantised:
        raise ValueError(f"pool_scale is given, but a pool of {pool.dtype} is not quantised")
    check_dense("pool_scale", pool_scale, (1,), torch.float32, pool.device)


def _attend_torch(
    call: Call, q_rope: torch.Tensor, plan: ExtendPlan | None, scratch: Scratch
) -> None:
    """Attend with one head of keys, in whichever of the two torch paths serves the options."""
    num_tokens, num_heads, _ = call.q.shape
    if plan is not None and not isinstance(plan, TorchPlan):
        raise TypeError(f"plan is a {type(plan).__name__}, not one of plan_mla for torch")
    tables = (call.block_table, call.seq_lens, call.q_start)
    if not call.options.are_plain:
        _check_rows(num_tokens, int(call.q_start[-1]))
        run_options(replace(call, q=torch.cat([call.q, q_rope], -1)))
        return
    pool = call.k_pool
    if plan is None:
        plan = plan_torch(pool, *tables, check_paged(pool, *tables, num_heads, "pool"), scratch)
    _check_rows(num_tokens, plan.num_tokens)
    if plan.pool_layout != (tuple(pool.shape), pool.stride()) or plan.heads.group != num_heads:
        raise ValueError("pool or the number of heads is not what the plan was made for")
    q = plan.scratch.take("q", num_tokens, num_heads, pool.shape[3])
    latent_dim = call.q.shape[2]
    q[..., :latent_dim].copy_(call.q)
    q[..., latent_dim:].copy_(q_rope)
    run_torch(plan, q, pool, None, call.scale, call.out)


def _check_rows(num_tokens: int, end: int) -> None:
    if num_tokens != end:
        raise ValueError(f"q_latent has {num_tokens} rows, but q_start ends at {end}")
