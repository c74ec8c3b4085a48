"""Writing the keys and values of new tokens into their slots of the paged pools.

Owns: the scatter from token order to slots.  Does not know: who assigned the slots.
Idea: K/V is stored before anything attends to it, so attention sees the stored values only.
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


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Copy each token's key and value into its slot of the pools, in place.

    k, v            [T, Hkv, D]      new tokens, in the dtype of the pools
    k_pool, v_pool  [N, B, Hkv, D]   N blocks of B slots, any strides with unit stride in D
    slot_mapping    [T] int64        block * B + offset; negative: write nothing for this token

    Slots of one call are distinct.  The torch backend raises IndexError for a slot past the pool;
    the Triton backend cannot look without waiting for the device.
    Cost: one pass over k and v; the torch backend waits for the device when it has to look for
    negative slots.
    """
    check_shape("k_pool", k_pool, ("N", "B", "Hkv", "D"))
    check_pools("k_pool", k_pool, "v_pool", v_pool)
    for name, tensor in (("k", k), ("v", v)):
        check_shape(name, tensor, ("T", *k_pool.shape[2:]))
        check_dtype(name, tensor, (k_pool.dtype,))
        check_device(name, tensor, k_pool.device)
    check_shape("v", v, tuple(k.shape))
    check_shape("slot_mapping", slot_mapping, (k.shape[0],))
    check_dtype("slot_mapping", slot_mapping, (torch.int64,))
    check_device("slot_mapping", slot_mapping, k_pool.device)
    check_unit_stride("slot_mapping", slot_mapping)
    chosen = choose_backend(k_pool.device, backend)
    if k.shape[0] == 0:
        return
    if chosen == "torch":
        _store_torch(k, v, k_pool, v_pool, slot_mapping)
    else:
        from kernels._store_triton import store_triton  # optional: not on every platform

        store_triton(k, v, k_pool, v_pool, slot_mapping)


def _store_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    if int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping, k, v = slot_mapping[kept], k[kept], v[kept]
    block_size = k_pool.shape[1]
    for tensor, pool in ((k, k_pool), (v, v_pool)):
        if pool.stride(0) == block_size * pool.stride(1):  # slots are evenly spaced: much faster
            pool.flatten(0, 1).index_copy_(0, slot_mapping, tensor)
        else:
            pool.index_put_((slot_mapping // block_size, slot_mapping % block_size), tensor)
