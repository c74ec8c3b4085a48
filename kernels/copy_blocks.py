"""Copying whole or partly filled blocks within the paged pools, every layer at once.

Owns: moving slots between blocks.  Does not know: why a block is copied (copy-on-write, mostly).
Idea: a copy names blocks and a slot count; bits move, nothing is computed.
"""

from __future__ import annotations

import torch

from kernels.backend import (
    check_device,
    check_dtype,
    check_pools,
    check_shape,
    check_unit_stride,
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

    No block may be both a source and a target, nor the target of two copies.  Cost: one pass over
    the copied slots; the torch backend waits for the device.
    """
    check_shape("k_pools", k_pools, ("L", "N", "B", "Hkv", "D"))
    check_pools("k_pools", k_pools, "v_pools", v_pools)
    check_shape("src", src, ("C",))
    for name, tensor in (("src", src), ("dst", dst), ("num_slots", num_slots)):
        check_shape(name, tensor, tuple(src.shape))
        check_dtype(name, tensor, (torch.int64,))
        check_device(name, tensor, k_pools.device)
        check_unit_stride(name, tensor)
    chosen = choose_backend(k_pools.device, backend)
    if src.shape[0] == 0:
        return
    if chosen == "torch":
        _copy_torch(k_pools, v_pools, src, dst, num_slots)
    else:
        from kernels._copy_triton import copy_triton  # optional: not on every platform

        copy_triton(k_pools, v_pools, src, dst, num_slots)


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
