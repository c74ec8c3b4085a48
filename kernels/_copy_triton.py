"""Copying blocks in Triton: one program moves a part of one block in one layer."""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard

MAX_WIDTH: Final = 1024  # elements a program moves


def copy_triton(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_slots: torch.Tensor,
) -> None:
    """Copy slots as `copy_blocks` says, without waiting for the device."""
    num_layers, _, block_size, num_kv_heads, head_dim = k_pools.shape
    numel = block_size * num_kv_heads * head_dim
    width = min(MAX_WIDTH, triton.next_power_of_2(numel))
    with device_guard(k_pools.device):
        copy_kernel[(src.shape[0], num_layers, triton.cdiv(numel, width))](
            k_pools,
            v_pools,
            src,
            dst,
            num_slots,
            *k_pools.stride()[:4],
            *v_pools.stride()[:4],
            SLOT_NUMEL=num_kv_heads * head_dim,
            HEAD_DIM=head_dim,
            WIDTH=width,
            enable_fp_fusion=True,
        )


@triton.jit
def copy_kernel(
    k_pools,  # [L, N, B, Hkv, D]
    v_pools,
    src,  # [C]
    dst,
    num_slots,
    k_by_layer,  # strides, in elements
    k_by_block,
    k_by_slot,
    k_by_head,
    v_by_layer,
    v_by_block,
    v_by_slot,
    v_by_head,
    SLOT_NUMEL: tl.constexpr,  # Hkv * D
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy `WIDTH` elements of one block in one layer, K and V alike."""
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(src + copy)
    target = tl.load(dst + copy)
    element = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    slot = element // SLOT_NUMEL
    head = element % SLOT_NUMEL // HEAD_DIM
    dim = element % HEAD_DIM
    inside = slot < tl.load(num_slots + copy)
    k_at = layer * k_by_layer + slot * k_by_slot + head * k_by_head + dim
    v_at = layer * v_by_layer + slot * v_by_slot + head * v_by_head + dim
    keys = tl.load(k_pools + source * k_by_block + k_at, mask=inside)
    values = tl.load(v_pools + source * v_by_block + v_at, mask=inside)
    tl.store(k_pools + target * k_by_block + k_at, keys, mask=inside)
    tl.store(v_pools + target * v_by_block + v_at, values, mask=inside)
