"""From a layer's fused projection to turned queries and stored keys and values, in one pass.

Owns: the fusion of head norms, rotary positions and the store.  Does not know: anything that its
parts do not.
Idea: between the projection and attention every number is read once and written once; three ops
would move the queries and keys three times.
"""

from __future__ import annotations

import torch

from kernels._rows_native import rotary_store_native, takes
from kernels.backend import (
    check_dense,
    check_float8,
    check_for_pool,
    check_pools,
    check_scales,
    check_shape,
    check_slots,
    check_unit_stride,
    choose_backend,
)
from kernels.norm_rope import check_angles, rms_norm, rotary
from kernels.store_kv import store_kv


def rotary_store_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Turn queries and keys by their positions and store keys and values; return the queries.

    qkv                [T, H + 2·Hkv, D]  query, key and value heads of each token
    cos, sin           [T, D/2] float32, the table's rows at each token's position
    k_pool … v_scale   as in `store_kv`
    interleaved        as in `rotary`
    norms              weights [D] of an RMS norm, with `eps`, of each query and of each key head
                       before they are turned (Qwen 3, Gemma 3); None for none
    out                [T, H, D] written and returned; allocated when None
    returns            [T, H, D] in qkv.dtype

    The same arithmetic as `rms_norm`, `rotary` and `store_kv` one after the other.  Cost: one pass
    over qkv on Triton; on torch that of the three.
    """
    shape = _check(qkv, cos, sin, k_pool, v_pool, slot_mapping, norms, k_scale, v_scale)
    num_tokens, num_heads, _ = shape
    num_kv_heads = k_pool.shape[2]
    chosen = choose_backend(qkv.device, backend)
    if out is not None:
        check_dense("out", out, shape, qkv.dtype, qkv.device)
    plain = norms is None and not interleaved and k_scale is None
    if chosen == "native" and plain and takes(qkv, k_pool) and k_pool.stride() == v_pool.stride():
        dense = out is not None and out.is_contiguous()
        target = out if out is not None and dense else torch.empty(shape, dtype=qkv.dtype)
        rotary_store_native(qkv, cos, sin, k_pool, v_pool, slot_mapping, target)
        return target if out is None or dense else out.copy_(target)
    if chosen != "triton":
        qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        if norms is not None:
            q, k = qk[:, :num_heads], qk[:, num_heads:]
            qk = torch.cat([_normed(q, norms[0], eps), _normed(k, norms[1], eps)], 1)
        turned = rotary(qk, cos, sin, interleaved=interleaved, backend="torch")
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        store_kv(turned[:, num_heads:], v, k_pool, v_pool, slot_mapping, **scales, backend="torch")
        return turned[:, :num_heads] if out is None else out.copy_(turned[:, :num_heads])
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device) if out is None else out
    if num_tokens:
        check_float8("k_pool", k_pool)
        from kernels._rotary_triton import rotary_store_triton  # optional: as Triton is

        scale_pair = None if k_scale is None or v_scale is None else (k_scale, v_scale)
        rotary_store_triton(
            qkv,
            cos,
            sin,
            k_pool,
            v_pool,
            slot_mapping,
            norms,
            eps,
            scale_pair,
            out,
            interleaved=interleaved,
        )
    return out


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Raise for arguments that do not fit together; return the shape of the queries."""
    check_pools("k_pool", k_pool, "v_pool", v_pool)
    check_shape("k_pool", k_pool, ("N", "B", "Hkv", "D"))
    num_kv_heads, head_dim = k_pool.shape[2:]
    check_shape("qkv", qkv, ("T", "H + 2Hkv", head_dim))
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] - 2 * num_kv_heads
    if num_heads < 1:
        raise ValueError(
            f"qkv has {qkv.shape[1]} heads, expected more than 2 * {num_kv_heads} of the pools"
        )
    check_for_pool("qkv", qkv, k_pool)
    check_unit_stride("qkv", qkv)
    check_angles(num_tokens, head_dim, cos, sin, qkv.device)
    check_scales(k_pool, k_scale, v_scale)
    check_slots(slot_mapping, num_tokens, k_pool)
    for name, weight in zip(("norms[0]", "norms[1]"), norms or (), strict=False):
        check_dense(name, weight, (head_dim,), qkv.dtype, qkv.device)
    return num_tokens, num_heads, head_dim


def _normed(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(heads.flatten(0, 1), weight, eps=eps, backend="torch").view(heads.shape)
