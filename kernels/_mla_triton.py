"""Attention over latents in Triton: the sizes of the kernel, its launch, and all that is shipped.

Owns: the one table of sizes that every list of work is run with.  Does not check arguments.
Idea: a latent has no heads, so the query heads are rows of a tile however many they are; what does
not fit one tile is the next one's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
import triton

from kernels._attention_call import Call, Options
from kernels._attention_triton import TYPES, merge_splits, merges
from kernels._attention_work import Tiling, WorkPlan
from kernels._mla_kernel import LOOSE, mla_kernel
from kernels._mla_work import ChunkedPlan
from kernels.backend import FLOAT8_TARGETS, FLOAT_DTYPES, device_guard, target_of
from kernels.variant import Variant

TARGETS: Final = ("sm_80", "sm_90", "sm_100", "gfx942")
SPLIT: Final = 1024  # keys; a partial result is as wide as a latent, so it is worth more of them
MAX_LATENT_DIM: Final = 512  # the sum of a tile of more does not fit registers


class LatentSizes(NamedTuple):
    """Compile-time sizes of the kernel, the same for each list of work."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_latent_sizes(target: str, dtype: torch.dtype, pool_dtype: torch.dtype) -> LatentSizes:
    """Return the tile sizes on a device, by the dtype of the queries and of the pool.

    The largest that spill no registers: the sum alone takes half of them, and numbers of eight bits
    take some on their way to a tile.  64 rows are what wgmma multiplies; on sm_100 so many would
    put more into tensor memory than it holds.
    """
    amd = target == "gfx942"
    if dtype == torch.float32:
        return LatentSizes(16, 16, num_warps=4 if amd else 8, num_stages=1 if amd else 2)
    if pool_dtype != dtype:
        narrow = target == "sm_100" or (target == "sm_90" and pool_dtype == torch.int8)
        return LatentSizes(
            32, 16 if narrow else 32, num_warps=4 if amd else 8, num_stages=1 if amd else 2
        )
    if amd:
        return LatentSizes(64, 16, num_warps=8, num_stages=1)
    return LatentSizes(*((32, 64) if target == "sm_100" else (64, 32)), num_warps=8, num_stages=2)


def latent_tiling_of(
    device: torch.device, dtype: torch.dtype, pool_dtype: torch.dtype, num_heads: int
) -> Tiling:
    """Return what a list of work needs to know of the sizes."""
    rows = choose_latent_sizes(target_of(device), dtype, pool_dtype).rows
    return Tiling(rows // min(num_heads, rows), SPLIT)


def run_latents(call: Call, q_rope: torch.Tensor, plan: ChunkedPlan) -> None:
    """Fill `call.out` by the lists, one after another, without waiting for the device."""
    options, row = call.options, 0
    with device_guard(call.q.device):
        for work in plan.chunks:
            rows = slice(row, row + work.num_tokens)
            chunk = replace(
                call,
                q=call.q[rows],
                out=call.out[rows],
                options=replace(options, lse=None if options.lse is None else options.lse[rows]),
            )
            _run_chunk(chunk, q_rope[rows], work)
            row += work.num_tokens


def _run_chunk(call: Call, q_rope: torch.Tensor, work: WorkPlan) -> None:
    num_tokens, num_heads, latent_dim = call.q.shape
    shape = (work.num_splits, num_tokens, num_heads)
    tops, masses = work.scratch.take("tops", *shape), work.scratch.take("masses", *shape)
    partial = (tops, masses, work.scratch.take("totals", *shape, latent_dim))
    pool, options = call.k_pool, call.options
    sizes = choose_latent_sizes(target_of(call.q.device), call.q.dtype, pool.dtype)
    constants = _constants(sizes, num_heads, (latent_dim, q_rope.shape[2]), pool.shape[1], options)
    mla_kernel[(work.items.shape[0], triton.cdiv(num_heads, sizes.rows))](
        call.q,
        q_rope,
        pool,
        *partial,
        call.block_table,
        work.items,
        work.tokens,
        work.positions,
        options.k_scale,
        call.scale * math.log2(math.e),
        num_tokens * num_heads,
        num_heads,
        *call.q.stride()[:2],
        *q_rope.stride()[:2],
        *pool.stride()[:2],
        call.block_table.stride(0),
        **{**constants, "SPLIT": work.tiling.split},
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        enable_fp_fusion=True,
    )
    merge_splits(call, work, partial)


def _constants(
    sizes: LatentSizes, num_heads: int, dims: tuple[int, int], block_size: int, options: Options
) -> dict[str, Any]:
    latent_dim, rope_dim = dims
    return {
        "GROUP": min(num_heads, sizes.rows),
        "LATENT_DIM": latent_dim,
        "ROPE_DIM": rope_dim,
        "DIM": max(32, triton.next_power_of_2(latent_dim)),
        "TURNED": max(16, triton.next_power_of_2(rope_dim)),
        "BLOCK_SIZE": block_size,
        "ROWS": sizes.rows,
        "KEYS": sizes.keys,
        "SPLIT": SPLIT,
        "SCALED": options.k_scale is not None,
    }


def latent_variants(
    target: str, dtype: torch.dtype, pool_dtype: torch.dtype, num_heads: int, options: Options
) -> Iterator[Variant]:
    """Iterate over the kernel of one model with latents of 512 + 64, at blocks of 16."""
    label = f"{TYPES[dtype]} heads {num_heads}"
    label += f" latents {TYPES[pool_dtype]}" if pool_dtype != dtype else ""
    sizes = choose_latent_sizes(target, dtype, pool_dtype)
    on_tiles = target in ("sm_80", "gfx942") or (target == "sm_90" and sizes.rows == 64)
    types = {
        **dict.fromkeys(("q_latent", "q_rope"), f"*{TYPES[dtype]}"),
        **dict.fromkeys(("tops", "masses", "totals", "pool_scale"), "*fp32"),
        **dict.fromkeys(("block_table", "items", "tokens", "positions"), "*i32"),
        "pool": f"*{TYPES[pool_dtype]}",
        "score_scale": "fp32",
    }
    yield Variant(
        kernel=mla_kernel,
        label=label,
        types=types,
        constants={
            **_constants(sizes, num_heads, (512, 64), 16, options),
            **({"pool_scale": None} if options.k_scale is None else {}),
        },
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        loose=frozenset(LOOSE),
        matrix=dtype != torch.float32 and on_tiles,  # elsewhere by the instructions of sm_80
        wide_loads=True,
        targets=frozenset({target}),
    )


def shipped() -> Iterator[Variant]:
    """Iterate over what is compiled and proven before a release."""
    some, half = torch.empty(1), torch.bfloat16
    for target in TARGETS:
        for dtype in FLOAT_DTYPES:
            yield from latent_variants(target, dtype, dtype, 128, Options())
        for num_heads in (16, 40):
            yield from latent_variants(target, half, half, num_heads, Options())
        scaled = Options(k_scale=some, v_scale=some)
        yield from latent_variants(target, half, torch.int8, 128, scaled)
        if target in FLOAT8_TARGETS:
            yield from latent_variants(target, half, torch.float8_e4m3fn, 128, scaled)
        for options in (Options(), Options(lse=some)):
            yield from merges(target, MAX_LATENT_DIM, options, SPLIT)
