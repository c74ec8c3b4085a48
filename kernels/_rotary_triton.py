"""Rotary positions in Triton, alone and fused with the head norms and the store of K/V.

A pair is (first, second): the halves of a head stand `SECOND` apart, and pairs `STEP` apart, which
is (1, D/2) for split halves and (2, 1) for interleaved ones.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import triton
import triton.language as tl

from kernels._store_triton import (
    choose_scales,
    largest_of,
    scale_constants,
    scale_strides,
    store_part,
)
from kernels.backend import FLOAT8_TARGETS, device_guard
from kernels.variant import Variant

MAX_NUMEL: Final = 1024  # elements a program turns
NUM_WARPS: Final = 1  # 8 pairs a thread, 16 bytes of each half, where a warp has 64 threads


def choose_heads(num_heads: int, head_dim: int) -> int:
    """Return how many heads a program takes."""
    fitting = max(1, MAX_NUMEL // int(triton.next_power_of_2(head_dim)))
    return min(fitting, int(triton.next_power_of_2(num_heads)))


def pairing(head_dim: int, *, interleaved: bool) -> dict[str, int]:
    """Return the compile-time arguments that say where the numbers of a pair stand."""
    half = head_dim // 2
    step, second = (2, 1) if interleaved else (1, half)
    return {
        "PAIRS": half,
        "WIDTH": int(triton.next_power_of_2(half)),
        "STEP": step,
        "SECOND": second,
    }


def rotary_triton(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    """Fill `out` as `rotary` says, without waiting for the device."""
    num_tokens, num_heads, head_dim = x.shape
    heads = choose_heads(num_heads, head_dim)
    with device_guard(x.device):
        rotary_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x,
            cos,
            sin,
            out,
            *x.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *out.stride()[:2],
            NUM_HEADS=num_heads,
            HEADS=heads,
            **pairing(head_dim, interleaved=interleaved),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def rotary_store_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Fill `out` and the slots as `rotary_store_kv` says, without waiting for the device."""
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads = k_pool.shape[2]
    heads = choose_heads(num_kv_heads, head_dim)
    q_norm, k_norm = norms or (None, None)
    k_scale, v_scale = scales or (None, None)
    grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    with device_guard(qkv.device):
        rotary_store_kernel[grid](
            qkv,
            cos,
            sin,
            out,
            k_pool,
            v_pool,
            slot_mapping,
            q_norm,
            k_norm,
            eps,
            k_scale,
            v_scale,
            *qkv.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *out.stride()[:2],
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            *scale_strides(k_scale),
            *scale_strides(v_scale),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEADS=heads,
            BLOCK_SIZE=k_pool.shape[1],
            **pairing(head_dim, interleaved=interleaved),
            **scale_constants(k_pool.dtype, k_scale),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


@triton.jit
def turn(first, second, cos, sin):
    """Turn pairs by angles, all [HEADS, WIDTH] float32; which sums are fused is spelt out."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def norm_pairs(first, second, weight, pair, inside, eps, PAIRS: tl.constexpr, STEP, SECOND):
    """Normalise heads of the dtype of `weight`: [HEADS, WIDTH] float32, rounded in between."""
    kind = weight.dtype.element_ty
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / (2 * PAIRS) + eps)[:, None]
    by_first = tl.load(weight + pair * STEP, mask=inside, other=0.0).to(tl.float32)
    by_second = tl.load(weight + pair * STEP + SECOND, mask=inside, other=0.0).to(tl.float32)
    first = (first * scale).to(kind).to(tl.float32) * by_first[None, :]
    second = (second * scale).to(kind).to(tl.float32) * by_second[None, :]
    return first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)


@triton.jit
def rotary_kernel(
    x,  # [T, H, D]
    cos,  # [T, D/2]
    sin,
    out,  # [T, H, D]
    x_by_token,  # strides, in elements
    x_by_head,
    cos_by_token,
    sin_by_token,
    out_by_token,
    out_by_head,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    PAIRS: tl.constexpr,  # D/2
    WIDTH: tl.constexpr,  # PAIRS rounded up to a power of two
    STEP: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Turn `HEADS` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, WIDTH)
    real = (head < NUM_HEADS)[:, None] & (pair < PAIRS)[None, :]
    at = x + token * x_by_token + head[:, None] * x_by_head + pair[None, :] * STEP
    first = tl.load(at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(at + SECOND, mask=real, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_by_token + pair, mask=pair < PAIRS, other=0.0)
    s = tl.load(sin + token * sin_by_token + pair, mask=pair < PAIRS, other=0.0)
    c = tl.broadcast_to(c[None, :], first.shape)
    s = tl.broadcast_to(s[None, :], first.shape)
    first, second = turn(first, second, c, s)
    to = out + token * out_by_token + head[:, None] * out_by_head + pair[None, :] * STEP
    tl.store(to, first.to(out.dtype.element_ty), mask=real)
    tl.store(to + SECOND, second.to(out.dtype.element_ty), mask=real)


@triton.jit
def rotary_store_kernel(
    qkv,  # [T, H + 2 * Hkv, D]
    cos,  # [T, D/2]
    sin,
    out,  # [T, H, D]
    k_pool,  # [N, B, Hkv, D]
    v_pool,
    slot_mapping,  # [T]
    q_norm,  # [D] or None
    k_norm,
    eps,
    k_scale,  # None, [Hkv] or [N, B, Hkv]
    v_scale,
    qkv_by_token,  # strides, in elements
    qkv_by_head,
    cos_by_token,
    sin_by_token,
    out_by_token,
    out_by_head,
    k_by_block,
    k_by_slot,
    k_by_head,
    v_by_block,
    v_by_slot,
    v_by_head,
    k_scale_by_block,
    k_scale_by_slot,
    v_scale_by_block,
    v_scale_by_slot,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # D/2
    WIDTH: tl.constexpr,  # PAIRS rounded up to a power of two
    STEP: tl.constexpr,
    SECOND: tl.constexpr,
    SCALES: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Turn `HEADS` query heads of one token, or turn and store as many key and value heads."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    in_head = pair < PAIRS
    kind = qkv.dtype.element_ty
    c = tl.load(cos + token * cos_by_token + pair, mask=in_head, other=0.0)
    s = tl.load(sin + token * sin_by_token + pair, mask=in_head, other=0.0)
    c = tl.broadcast_to(c[None, :], (HEADS, WIDTH))
    s = tl.broadcast_to(s[None, :], (HEADS, WIDTH))
    row = qkv + token * qkv_by_token + pair[None, :] * STEP
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        real = (head < NUM_HEADS)[:, None] & in_head[None, :]
        at = row + head[:, None] * qkv_by_head
        first = tl.load(at, mask=real, other=0.0).to(tl.float32)
        second = tl.load(at + SECOND, mask=real, other=0.0).to(tl.float32)
        if q_norm is not None:
            first, second = norm_pairs(
                first, second, q_norm, pair, in_head, eps, PAIRS, STEP, SECOND
            )
        first, second = turn(first, second, c, s)
        to = out + token * out_by_token + head[:, None] * out_by_head + pair[None, :] * STEP
        tl.store(to, first.to(kind), mask=real)
        tl.store(to + SECOND, second.to(kind), mask=real)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            head = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
            stored = head < NUM_KV_HEADS
            real = stored[:, None] & in_head[None, :]
            at = row + (NUM_HEADS + head)[:, None] * qkv_by_head
            first = tl.load(at, mask=real, other=0.0).to(tl.float32)
            second = tl.load(at + SECOND, mask=real, other=0.0).to(tl.float32)
            if k_norm is not None:
                first, second = norm_pairs(
                    first, second, k_norm, pair, in_head, eps, PAIRS, STEP, SECOND
                )
            first, second = turn(first, second, c, s)
            first, second = first.to(kind), second.to(kind)
            to = k_pool + block * k_by_block + offset * k_by_slot
            to += head[:, None] * k_by_head + pair[None, :] * STEP
            scale_at = block * k_scale_by_block + offset * k_scale_by_slot + head
            peak = tl.maximum(largest_of(first), largest_of(second))
            scales = choose_scales(peak, k_scale, scale_at, stored, SCALES, MOST, LEAST)
            store_part(first, to, real, scales, SCALES, MOST)
            store_part(second, to + SECOND, real, scales, SCALES, MOST)

            at += NUM_KV_HEADS * qkv_by_head
            first = tl.load(at, mask=real, other=0.0)
            second = tl.load(at + SECOND, mask=real, other=0.0)
            to = v_pool + block * v_by_block + offset * v_by_slot
            to += head[:, None] * v_by_head + pair[None, :] * STEP
            scale_at = block * v_scale_by_block + offset * v_scale_by_slot + head
            peak = tl.maximum(largest_of(first), largest_of(second))
            scales = choose_scales(peak, v_scale, scale_at, stored, SCALES, MOST, LEAST)
            store_part(first, to, real, scales, SCALES, MOST)
            store_part(second, to + SECOND, real, scales, SCALES, MOST)


def shipped() -> Iterator[Variant]:
    """Iterate over what launches choose for bfloat16 models of 32 query and 8 key heads."""
    for head_dim in (80, 128):
        for interleaved in (False, True):
            where = pairing(head_dim, interleaved=interleaved)
            label = f"D {head_dim}{', interleaved' if interleaved else ''}"
            tables = dict.fromkeys(("cos", "sin"), "*fp32")
            yield Variant(
                rotary_kernel,
                label,
                {**tables, "x": "*bf16", "out": "*bf16"},
                {"NUM_HEADS": 32, "HEADS": choose_heads(32, head_dim), **where},
                num_warps=NUM_WARPS,
                wide_loads=not interleaved,
            )
            for pool, dtype in (("bf16", torch.bfloat16), ("fp8e4nv", torch.float8_e4m3fn)):
                quantised = pool == "fp8e4nv"
                scale = torch.empty(1, 1, 1, device="meta") if quantised else None
                types = dict.fromkeys(("qkv", "out", "q_norm", "k_norm"), "*bf16")
                types |= {**tables, "slot_mapping": "*i64", "eps": "fp32"}
                types |= dict.fromkeys(("k_pool", "v_pool"), f"*{pool}")
                types |= dict.fromkeys(("k_scale", "v_scale"), "*fp32")
                constants: dict[str, Any] = {
                    "NUM_HEADS": 32,
                    "NUM_KV_HEADS": 8,
                    "HEADS": choose_heads(8, head_dim),
                    "BLOCK_SIZE": 16,
                    **where,
                    **scale_constants(dtype, scale),
                }
                if not quantised:
                    constants |= {"k_scale": None, "v_scale": None}
                yield Variant(
                    rotary_store_kernel,
                    f"{label}, normed, to {pool}",
                    types,
                    constants,
                    num_warps=NUM_WARPS,
                    loose=frozenset({"k_scale_by_slot", "v_scale_by_slot"}),
                    wide_loads=not interleaved,
                    targets=FLOAT8_TARGETS if quantised else None,
                )
