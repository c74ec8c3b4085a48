"""Norm, gated SiLU and rotary positions by the kernels in C.

Owns: the calls, and which arguments the kernels have a loop for.  Does not know: the arithmetic.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.native import DTYPES, library


class _Turn(ctypes.Structure):
    """`Turn` in rows.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "k_pool", "v_pool", "q")),
        ("slots", ctypes.c_void_p),
        *((f"{name}_stride", ctypes.c_long) for name in ("token", "head", "angle", "q")),
        *((name, ctypes.c_long) for name in ("block_size", "num_slots", "block_stride")),
        *((name, ctypes.c_long) for name in ("slot_stride", "pool_head_stride")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "head_dim")),
    )


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether there is a loop for such tensors: their dtype, and dense rows."""
    return all(t is None or (t.dtype in DTYPES and _dense(t)) for t in tensors)


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def rms_norm_native(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Scale the rows of x, or of x + residual, which becomes the sum."""
    size = x.element_size()
    library().radixcache_rms_norm(
        x.data_ptr(),
        x.stride(0) * size,
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0) * size,
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0) * size,
        *x.shape,
        eps,
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )


def silu_and_mul_native(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Gate the second half of each row by the first."""
    size = out.element_size()
    library().radixcache_silu_and_mul(
        gate_up.data_ptr(),
        gate_up.stride(0) * size,
        out.data_ptr(),
        out.stride(0) * size,
        *out.shape,
        DTYPES[out.dtype],
        torch.get_num_threads(),
    )


def rotary_store_native(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Turn queries into `out` [T, H, D], dense in its heads; store turned keys, and values.

    Raises IndexError for a slot past the pool, before anything is written.
    """
    size = qkv.element_size()
    num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    turn = _Turn(
        *(t.data_ptr() for t in (qkv, cos, sin, k_pool, v_pool, out, slot_mapping)),
        *(qkv.stride(0) * size, qkv.stride(1) * size, cos.stride(0), out.stride(0) * size),
        *(block_size, num_blocks * block_size, *(s * size for s in k_pool.stride()[:3])),
        *(out.shape[1], num_kv_heads, head_dim),
    )
    wrong = library().radixcache_rotary_store(
        ctypes.byref(turn), qkv.shape[0], DTYPES[qkv.dtype], torch.get_num_threads()
    )
    if wrong >= 0:
        raise IndexError(
            f"slot_mapping[{wrong}] is {int(slot_mapping[wrong])}, and the pool has "
            f"{num_blocks * block_size} slots"
        )
