"""Moving whole or partly filled blocks of the paged pools, every layer at once.

Owns: moving slots between blocks, and blocks between the pools and a staging buffer.  Does not
know: why a block is copied (copy-on-write, mostly) or where a staging buffer goes (host, disk).
Idea: a move names blocks and a slot count; bits move, nothing is computed.
"""

from __future__ import annotations

import torch

from kernels.backend import (
    check_dense,
    check_ids,
    check_pools,
    check_shape,
    check_tensor,
    choose_backend,
)


def copy_blocks(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_slots: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy the first `num_slots[i]` slots of block `src[i]` to block `dst[i]`, in place.

    k_pools, v_pools  [L, N, B, Hkv, D]   all layers, any strides with unit stride in D
    src, dst          [C] int64           block ids
    num_slots         [C] int64           0 to B each

    No block may be both a source and a target, nor the target of two copies.  Scales by slot and
    head are copied by a call of their own, as pools of [L, N, B, Hkv, 1].  Cost: one pass over
    the copied slots; the torch backend waits for the device.
    """
    _check_layers(k_pools, v_pools)
    for name, tensor in (("src", src), ("dst", dst), ("num_slots", num_slots)):
        shape = ("C",) if name == "src" else src.shape
        check_dense(name, tensor, shape, torch.int64, k_pools.device)
    chosen = choose_backend(k_pools.device, backend)
    if src.shape[0] == 0:
        return
    check_ids("src", src, 0, k_pools.shape[1])
    check_ids("dst", dst, 0, k_pools.shape[1])
    if chosen != "triton":
        _copy_torch(k_pools, v_pools, src, dst, num_slots)
    else:
        from kernels._copy_triton import copy_triton  # optional: not on every platform

        copy_triton(k_pools, v_pools, src, dst, num_slots)


def gather_blocks(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy blocks out of the pools into a dense staging buffer, all layers in one launch.

    k_pools, v_pools  [L, N, B, Hkv, D]      all layers, any strides with unit stride in D
    blocks            [C] int64              block ids; one may come twice
    staging           [C, 2, L, B, Hkv, D]   contiguous, in the pools' dtype; K at 0 and V at 1

    A block is one contiguous piece of the buffer, so that it travels to the host or to disk as one.
    Cost: one pass over the blocks; waits for nothing on either backend.
    """
    chosen = _check_staging(k_pools, v_pools, blocks, staging, backend)
    if blocks.shape[0] == 0:
        return
    if chosen != "triton":
        for part, pools in enumerate((k_pools, v_pools)):
            staging[:, part].copy_(pools[:, blocks].transpose(0, 1))
    else:
        from kernels._copy_triton import gather_triton  # optional: not on every platform

        gather_triton(k_pools, v_pools, blocks, staging)


def scatter_blocks(
    staging: torch.Tensor,
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    blocks: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy a staging buffer back into blocks of the pools: `gather_blocks` the other way.

    Arguments as there; `blocks` are distinct.  Cost: one pass over the blocks.
    """
    chosen = _check_staging(k_pools, v_pools, blocks, staging, backend)
    if blocks.shape[0] == 0:
        return
    if chosen != "triton":
        for part, pools in enumerate((k_pools, v_pools)):
            pools[:, blocks] = staging[:, part].transpose(0, 1)
    else:
        from kernels._copy_triton import scatter_triton  # optional: not on every platform

        scatter_triton(staging, k_pools, v_pools, blocks)


def _check_layers(k_pools: torch.Tensor, v_pools: torch.Tensor) -> None:
    check_shape("k_pools", k_pools, ("L", "N", "B", "Hkv", "D"))
    check_pools("k_pools", k_pools, "v_pools", v_pools)


def _check_staging(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    backend: str | None,
) -> str:
    _check_layers(k_pools, v_pools)
    check_dense("blocks", blocks, ("C",), torch.int64, k_pools.device)
    num_layers, num_blocks, *block = k_pools.shape
    shape = (blocks.shape[0], 2, num_layers, *block)
    check_tensor("staging", staging, shape, k_pools.dtype, k_pools.device)
    if not staging.is_contiguous():
        raise ValueError(f"staging has strides {staging.stride()}, expected a contiguous tensor")
    check_ids("blocks", blocks, 0, num_blocks)
    return choose_backend(k_pools.device, backend)


def _copy_torch(
    k_pools: torch.Tensor,
    v_pools: torch.Tensor,
    src: torch.Tensor,
    dst: torch.Tensor,
    num_slots: torch.Tensor,
) -> None:
    counts = num_slots.tolist()
    for i, count in enumerate(counts):
        if not 0 <= count <= k_pools.shape[2]:
            raise ValueError(f"num_slots[{i}] is {count}, and a block has {k_pools.shape[2]} slots")
    for source, target, count in zip(src.tolist(), dst.tolist(), counts, strict=True):
        for pools in (k_pools, v_pools):
            pools[:, target, :count] = pools[:, source, :count]
