"""Storing keys and values in Triton: one program writes a few heads of one token's slot.

A program holds whole heads, so that a scale by slot and head is a maximum within the program.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from kernels.backend import FLOAT8_TARGETS, device_guard
from kernels.quantise import LEAST_SCALE, largest
from kernels.variant import Variant

MAX_NUMEL: Final = 1024  # elements a program moves, of K and of V
NUM_WARPS: Final = 2  # 8 elements a thread, 16 bytes, where a warp has 64 threads

Scales: TypeAlias = Literal["none", "head", "slot"]


class Tile(NamedTuple):
    """What one program covers of a token."""

    heads: int
    dim: int


def choose_tile(num_heads: int, head_dim: int) -> Tile:
    """Return whole heads, as many as fit."""
    dim = triton.next_power_of_2(head_dim)
    return Tile(min(triton.next_power_of_2(num_heads), max(1, MAX_NUMEL // dim)), dim)


def store_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Write the slots as `store_kv` says, without waiting for the device."""
    num_tokens, num_kv_heads, head_dim = k.shape
    tile = choose_tile(num_kv_heads, head_dim)
    with device_guard(k.device):
        store_kernel[(num_tokens, triton.cdiv(num_kv_heads, tile.heads))](
            k,
            v,
            k_pool,
            v_pool,
            k_scale,
            v_scale,
            slot_mapping,
            *k.stride(),
            *v.stride(),
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            *scale_strides(k_scale),
            *scale_strides(v_scale),
            NUM_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEADS=tile.heads,
            DIM=tile.dim,
            BLOCK_SIZE=k_pool.shape[1],
            **scale_constants(k_pool.dtype, k_scale),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides by block and slot; zeros where a scale has neither."""
    return scale.stride()[:2] if scale is not None and scale.dim() == 3 else (0, 0)


def scale_constants(dtype: torch.dtype, scale: torch.Tensor | None) -> dict[str, Any]:
    """Return the compile-time arguments of `choose_scales` and `store_part`."""
    kind: Scales = "none" if scale is None else "head" if scale.dim() == 1 else "slot"
    return {"SCALES": kind, "MOST": largest(dtype), "LEAST": LEAST_SCALE}


@triton.jit
def store_kernel(
    k,  # [T, Hkv, D]
    v,
    k_pool,  # [N, B, Hkv, D]
    v_pool,
    k_scale,  # None, [Hkv] or [N, B, Hkv]
    v_scale,
    slot_mapping,  # [T]
    k_by_token,  # strides, in elements
    k_by_head,
    k_by_dim,
    v_by_token,
    v_by_head,
    v_by_dim,
    k_pool_by_block,
    k_pool_by_slot,
    k_pool_by_head,
    v_pool_by_block,
    v_pool_by_slot,
    v_pool_by_head,
    k_scale_by_block,
    k_scale_by_slot,
    v_scale_by_block,
    v_scale_by_slot,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    SCALES: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Store `HEADS` heads of one token, K and V alike."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    real = head < NUM_HEADS
    inside = real[:, None] & (dim < HEAD_DIM)[None, :]
    k_at = token * k_by_token + head[:, None] * k_by_head + dim[None, :] * k_by_dim
    v_at = token * v_by_token + head[:, None] * v_by_head + dim[None, :] * v_by_dim
    keys = tl.load(k + k_at, mask=inside, other=0.0)
    values = tl.load(v + v_at, mask=inside, other=0.0)
    k_to = k_pool + block * k_pool_by_block + offset * k_pool_by_slot
    v_to = v_pool + block * v_pool_by_block + offset * v_pool_by_slot
    k_scale_at = block * k_scale_by_block + offset * k_scale_by_slot + head
    v_scale_at = block * v_scale_by_block + offset * v_scale_by_slot + head
    scales = choose_scales(largest_of(keys), k_scale, k_scale_at, real, SCALES, MOST, LEAST)
    store_part(
        keys, k_to + head[:, None] * k_pool_by_head + dim[None, :], inside, scales, SCALES, MOST
    )
    scales = choose_scales(largest_of(values), v_scale, v_scale_at, real, SCALES, MOST, LEAST)
    store_part(
        values, v_to + head[:, None] * v_pool_by_head + dim[None, :], inside, scales, SCALES, MOST
    )


@triton.jit
def largest_of(x):
    """Return the largest absolute value of each row of x."""
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def choose_scales(
    peak,  # [HEADS] float32, the largest absolute value of each head
    scale,  # the tensor of scales
    scale_at,  # [HEADS] where in it
    real,  # [HEADS] which heads there are
    SCALES: tl.constexpr,
    MOST: tl.constexpr,  # the largest number that the pool stores
    LEAST: tl.constexpr,  # the smallest scale
):
    """Return the scale of each head: read where it is given, chosen and written where not."""
    scales = peak
    if SCALES == "head":
        scales = tl.load(scale + scale_at, mask=real, other=1.0)
    elif SCALES == "slot":
        scales = tl.maximum(tl.div_rn(peak, MOST), LEAST)
        tl.store(scale + scale_at, scales, mask=real)
    return scales


@triton.jit
def store_part(
    x,  # [HEADS, WIDTH]
    to,  # pointers into the slot
    inside,
    scales,  # [HEADS]; of no use where the pool is not quantised
    SCALES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store numbers of some heads in a slot, divided by their scales where it is quantised."""
    if SCALES == "none":
        tl.store(to, x, mask=inside)
    else:
        wide = x.to(tl.float32)
        scaled = tl.div_rn(wide, tl.broadcast_to(scales[:, None], wide.shape))
        scaled = tl.minimum(tl.maximum(scaled, -MOST), MOST)
        if to.dtype.element_ty == tl.int8:
            # adding and taking away 1.5 * 2^23 rounds to an integer, ties to even
            scaled = (scaled + 12582912.0) - 12582912.0
        tl.store(to, scaled.to(to.dtype.element_ty), mask=inside)


STORED: Final = (
    ("bf16", torch.bfloat16, "none"),
    ("fp8e4nv", torch.float8_e4m3fn, "head"),
    ("fp8e4nv", torch.float8_e4m3fn, "slot"),
    ("fp8e5", torch.float8_e5m2, "slot"),
    ("i8", torch.int8, "slot"),
)
"""Triton's name and torch's of what pools hold, and the scales of it, in the report."""


def shipped() -> Iterator[Variant]:
    """Iterate over what launches choose for bfloat16 models of 8 key heads."""
    for head_dim in (80, 128):
        tile = choose_tile(8, head_dim)
        for name, dtype, scales in STORED:
            types = dict.fromkeys(("k", "v"), "*bf16")
            types |= dict.fromkeys(("k_pool", "v_pool"), f"*{name}")
            types |= {"slot_mapping": "*i64", "k_scale": "*fp32", "v_scale": "*fp32"}
            constants: dict[str, Any] = {
                "k_by_dim": 1,
                "v_by_dim": 1,
                "NUM_HEADS": 8,
                "HEAD_DIM": head_dim,
                "HEADS": tile.heads,
                "DIM": tile.dim,
                "BLOCK_SIZE": 16,
                "SCALES": scales,
                "MOST": largest(dtype),
                "LEAST": LEAST_SCALE,
            }
            if scales == "none":
                constants |= {"k_scale": None, "v_scale": None}
            yield Variant(
                store_kernel,
                f"{name} by {scales}, D {head_dim}",
                types,
                constants,
                num_warps=NUM_WARPS,
                loose=frozenset({"k_scale_by_slot", "v_scale_by_slot"}),
                wide_loads=True,
                targets=FLOAT8_TARGETS if name.startswith("fp8") else None,
            )
