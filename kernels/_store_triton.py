"""Storing keys and values in Triton: one program writes one token's slot, or a part of it."""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard

MAX_WIDTH: Final = 1024  # elements a program moves


def store_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write the slots as `store_kv` says, without waiting for the device."""
    num_tokens, num_kv_heads, head_dim = k.shape
    numel = num_kv_heads * head_dim
    width = min(MAX_WIDTH, triton.next_power_of_2(numel))
    with device_guard(k.device):
        store_kernel[(num_tokens, triton.cdiv(numel, width))](
            k,
            v,
            k_pool,
            v_pool,
            slot_mapping,
            *k.stride(),
            *v.stride(),
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
            NUMEL=numel,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=k_pool.shape[1],
            WIDTH=width,
            enable_fp_fusion=True,
        )


@triton.jit
def store_kernel(
    k,  # [T, Hkv, D]
    v,
    k_pool,  # [N, B, Hkv, D]
    v_pool,
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
    NUMEL: tl.constexpr,  # of a token: Hkv * D
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy `WIDTH` elements of one token, K and V alike."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    element = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = element < NUMEL
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    keys = tl.load(k + token * k_by_token + head * k_by_head + dim * k_by_dim, mask=inside)
    values = tl.load(v + token * v_by_token + head * v_by_head + dim * v_by_dim, mask=inside)
    k_at = block * k_pool_by_block + offset * k_pool_by_slot + head * k_pool_by_head + dim
    v_at = block * v_pool_by_block + offset * v_pool_by_slot + head * v_pool_by_head + dim
    tl.store(k_pool + k_at, keys, mask=inside)
    tl.store(v_pool + v_at, values, mask=inside)
