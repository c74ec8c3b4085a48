"""Writing the keys and values of new tokens into their slots of the paged pools.

Owns: the scatter from token order to slots, quantising on the way.  Does not know: who assigned the
slots.
Idea: K/V is stored before anything attends to it, so attention sees the stored values only.
"""

from __future__ import annotations

import torch

from kernels.backend import (
    check_float8,
    check_for_pool,
    check_pools,
    check_scales,
    check_shape,
    check_slots,
    choose_backend,
)
from kernels.quantise import choose_scale, quantise


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Copy each token's key and value into its slot of the pools, in place.

    k, v              [T, Hkv, D]      new tokens, in the dtype of the pools; of any float dtype
                                       where the pools are quantised
    k_pool, v_pool    [N, B, Hkv, D]   N blocks of B slots, any strides with unit stride in D
    slot_mapping      [T] int64        block * B + offset; negative: write nothing for this token
    k_scale, v_scale  float32, for pools of eight bits, where value = stored * scale:
                      [Hkv]        by head, read; larger values saturate
                      [N, B, Hkv]  by slot and head, written: the largest value of D just fits

    Slots of one call are distinct.  The torch backend raises IndexError for a slot past the pool;
    the Triton backend cannot look without waiting for the device (RADIXCACHE_KERNELS_DEBUG=1 does).
    Cost: one pass over k and v; the torch backend waits for the device when it has to look for
    negative slots.
    """
    check_shape("k_pool", k_pool, ("N", "B", "Hkv", "D"))
    check_pools("k_pool", k_pool, "v_pool", v_pool)
    check_scales(k_pool, k_scale, v_scale)
    for name, tensor in (("k", k), ("v", v)):
        check_shape(name, tensor, ("T", *k_pool.shape[2:]))
        check_for_pool(name, tensor, k_pool)
    check_shape("v", v, tuple(k.shape))
    check_slots(slot_mapping, k.shape[0], k_pool)
    chosen = choose_backend(k_pool.device, backend)
    if k.shape[0] == 0:
        return
    if chosen != "triton":
        _store_torch(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale)
    else:
        check_float8("k_pool", k_pool)
        from kernels._store_triton import store_triton  # optional: not on every platform

        store_triton(k, v, k_pool, v_pool, slot_mapping, k_scale, v_scale)


def _store_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if int(slot_mapping.min()) < 0:
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping, k, v = slot_mapping[kept], k[kept], v[kept]
    block_size = k_pool.shape[1]
    for tensor, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if scale is not None:
            tensor = _quantised(tensor, pool, slot_mapping, scale)
        if pool.element_size() == 1:
            tensor, pool = tensor.view(torch.int8), pool.view(torch.int8)  # no scatter of float8
        if pool.stride(0) == block_size * pool.stride(1):  # slots are evenly spaced: much faster
            pool.flatten(0, 1).index_copy_(0, slot_mapping, tensor)
        else:
            pool.index_put_((slot_mapping // block_size, slot_mapping % block_size), tensor)


def _quantised(
    tensor: torch.Tensor, pool: torch.Tensor, slot_mapping: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    if scale.dim() == 1:
        return quantise(tensor, scale[:, None], pool.dtype)
    chosen = choose_scale(tensor, pool.dtype)
    block_size = pool.shape[1]
    scale.index_put_((slot_mapping // block_size, slot_mapping % block_size), chosen)
    return quantise(tensor, chosen[..., None], pool.dtype)
