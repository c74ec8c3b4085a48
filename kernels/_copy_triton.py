"""Moving blocks in Triton: one program moves a part of one block in one layer, K and V alike.

Pools of eight bits are moved as int8: a copy is of bits, and not every GPU knows every float8.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard
from kernels.variant import Variant

MAX_BYTES: Final = 4096  # that a program moves, of K and of V: 16 for each of 256 threads


def copy_triton(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_slots: torch.Tensor,
) -> None:
    """Copy slots as `copy_blocks` says, without waiting for the device."""
    grid, sizes = _dealt(k_pools, src.shape[0])
    with device_guard(k_pools.device):
        copy_kernel[grid](
            _bits(k_pools),
            _bits(v_pools),
            src,
            dst,
            num_slots,
            *k_pools.stride()[:4],
            *v_pools.stride()[:4],
            **sizes,
            enable_fp_fusion=True,
        )


def gather_triton(
    k_pools: torch.Tensor, v_pools: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor
) -> None:
    """Fill the staging buffer as `gather_blocks` says, without waiting for the device."""
    _stage(k_pools, v_pools, blocks, staging, outward=True)


def scatter_triton(
    staging: torch.Tensor, k_pools: torch.Tensor, v_pools: torch.Tensor, blocks: torch.Tensor
) -> None:
    """Fill the blocks as `scatter_blocks` says, without waiting for the device."""
    _stage(k_pools, v_pools, blocks, staging, outward=False)


def _stage(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    *,
    outward: bool,
) -> None:
    grid, sizes = _dealt(k_pools, blocks.shape[0])
    with device_guard(k_pools.device):
        stage_kernel[grid](
            _bits(k_pools),
            _bits(v_pools),
            _bits(staging),
            blocks,
            k_pools.shape[0],
            *k_pools.stride()[:4],
            *v_pools.stride()[:4],
            BLOCK_SIZE=k_pools.shape[2],
            **sizes,
            OUTWARD=outward,
            enable_fp_fusion=True,
        )


def _dealt(k_pools: torch.Tensor, num_blocks: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """Return the grid of some blocks of every layer, and the sizes of a program."""
    num_layers, _, block_size, num_kv_heads, head_dim = k_pools.shape
    sizes = choose_sizes(block_size, num_kv_heads, head_dim, k_pools.element_size())
    parts = triton.cdiv(block_size * num_kv_heads, sizes["ROWS"])
    return (num_blocks, num_layers, parts), sizes


def choose_sizes(
    block_size: int, num_kv_heads: int, head_dim: int, element_size: int
) -> dict[str, int]:
    """Return the compile-time sizes: a program takes so many rows, each one head of one slot."""
    dim = int(triton.next_power_of_2(head_dim))
    num_rows = block_size * num_kv_heads
    return {
        "NUM_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROWS": min(
            int(triton.next_power_of_2(num_rows)), max(1, MAX_BYTES // (dim * element_size))
        ),
        "DIM": dim,
    }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int8) if tensor.element_size() == 1 else tensor


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
    NUM_HEADS: tl.constexpr,  # Hkv
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # of a program; row r is head r % NUM_HEADS of slot r // NUM_HEADS
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
):
    """Copy `ROWS` heads of one block in one layer."""
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(src + copy)
    target = tl.load(dst + copy)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    slot = row // NUM_HEADS
    head = row % NUM_HEADS
    inside = (slot < tl.load(num_slots + copy))[:, None] & (dim < HEAD_DIM)[None, :]
    k_at = (layer * k_by_layer + slot * k_by_slot + head * k_by_head)[:, None] + dim[None, :]
    v_at = (layer * v_by_layer + slot * v_by_slot + head * v_by_head)[:, None] + dim[None, :]
    keys = tl.load(k_pools + source * k_by_block + k_at, mask=inside)
    values = tl.load(v_pools + source * v_by_block + v_at, mask=inside)
    tl.store(k_pools + target * k_by_block + k_at, keys, mask=inside)
    tl.store(v_pools + target * v_by_block + v_at, values, mask=inside)


@triton.jit
def stage_kernel(
    k_pools,  # [L, N, B, Hkv, D]
    v_pools,
    staging,  # [C, 2, L, B, Hkv, D], contiguous
    blocks,  # [C]
    num_layers,
    k_by_layer,  # strides, in elements
    k_by_block,
    k_by_slot,
    k_by_head,
    v_by_layer,
    v_by_block,
    v_by_slot,
    v_by_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,  # Hkv
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # of a program; row r is head r % NUM_HEADS of slot r // NUM_HEADS
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    OUTWARD: tl.constexpr,  # from the pools to the buffer
):
    """Copy `ROWS` heads of one block in one layer between the pools and the buffer."""
    place = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + place)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    inside = (row < BLOCK_SIZE * NUM_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    slot = row // NUM_HEADS
    head = row % NUM_HEADS
    k_at = k_pools + layer * k_by_layer + block * k_by_block + dim[None, :]
    v_at = v_pools + layer * v_by_layer + block * v_by_block + dim[None, :]
    k_at += (slot * k_by_slot + head * k_by_head)[:, None]
    v_at += (slot * v_by_slot + head * v_by_head)[:, None]
    numel = BLOCK_SIZE * NUM_HEADS * HEAD_DIM  # of a block in one layer
    within = (row * HEAD_DIM)[:, None] + dim[None, :]
    k_staged = staging + (place * 2 * num_layers + layer) * numel + within
    v_staged = staging + ((place * 2 + 1) * num_layers + layer) * numel + within
    if OUTWARD:
        tl.store(k_staged, tl.load(k_at, mask=inside), mask=inside)
        tl.store(v_staged, tl.load(v_at, mask=inside), mask=inside)
    else:
        tl.store(k_at, tl.load(k_staged, mask=inside), mask=inside)
        tl.store(v_at, tl.load(v_staged, mask=inside), mask=inside)


def shipped() -> Iterator[Variant]:
    """Iterate over what launches choose for blocks of 16 slots with 8 key heads."""
    for name in ("bf16", "i8"):
        for head_dim in (80, 128):
            sizes = choose_sizes(16, 8, head_dim, 2 if name == "bf16" else 1)
            pools = dict.fromkeys(("k_pools", "v_pools"), f"*{name}")
            ids = dict.fromkeys(("src", "dst", "num_slots"), "*i64")
            label = f"{name}, D {head_dim}"
            yield Variant(copy_kernel, label, {**pools, **ids}, sizes, wide_loads=True)
            for outward in (True, False):
                yield Variant(
                    stage_kernel,
                    f"{label}, {'gather' if outward else 'scatter'}",
                    {**pools, "staging": f"*{name}", "blocks": "*i64"},
                    {**sizes, "BLOCK_SIZE": 16, "OUTWARD": outward},
                    loose=frozenset({"num_layers"}),
                    wide_loads=True,
                )
