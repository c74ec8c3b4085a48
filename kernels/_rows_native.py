"""Norm, gated SiLU and rotary positions by the kernels in C.

Owns: the calls, and which arguments the kernels have a loop for.  Does not know: the arithmetic.
"""

from __future__ import annotations

from ctypes import byref

import torch

from kernels.native import DTYPES, library
from kernels.native.records import Gate, Norm, Turn


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
    norm = Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0) * size,
        residual_stride=0 if residual is None else residual.stride(0) * size,
        out_stride=out.stride(0) * size,
        rows=x.shape[0],
        width=x.shape[1],
        dtype=DTYPES[x.dtype],
        eps=eps,
    )
    library().radixcache_rms_norm(byref(norm), torch.get_num_threads())


def silu_and_mul_native(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Gate the second half of each row by the first."""
    size = out.element_size()
    gate = Gate(
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        stride=gate_up.stride(0) * size,
        out_stride=out.stride(0) * size,
        rows=out.shape[0],
        width=out.shape[1],
        dtype=DTYPES[out.dtype],
    )
    library().radixcache_silu_and_mul(byref(gate), torch.get_num_threads())


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
    cos, sin = alike(cos, sin)
    turn = turn_record(qkv, cos, sin, k_pool, v_pool, slot_mapping, out)
    wrong = library().radixcache_rotary_store(byref(turn), torch.get_num_threads())
    if wrong >= 0:
        raise wrong_slot(slot_mapping, wrong, turn.num_slots)


def alike(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tables with one stride from row to row, as the kernels read them."""
    same = cos.stride(0) == sin.stride(0)
    return (cos, sin) if same else (cos.contiguous(), sin.contiguous())


def turn_record(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    out: torch.Tensor,
) -> Turn:
    """Write down what `rotary_store_native` is to do."""
    size = qkv.element_size()
    num_blocks, block_size, num_kv_heads, head_dim = k_pool.shape
    block_stride, slot_stride, head_stride = (stride * size for stride in k_pool.stride()[:3])
    return Turn(
        qkv=qkv.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        k_pool=k_pool.data_ptr(),
        v_pool=v_pool.data_ptr(),
        q=out.data_ptr(),
        slots=slot_mapping.data_ptr(),
        token_stride=qkv.stride(0) * size,
        head_stride=qkv.stride(1) * size,
        angle_stride=cos.stride(0),
        q_stride=out.stride(0) * size,
        block_size=block_size,
        num_slots=num_blocks * block_size,
        block_stride=block_stride,
        slot_stride=slot_stride,
        pool_head_stride=head_stride,
        heads=out.shape[1],
        kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens=qkv.shape[0],
        dtype=DTYPES[qkv.dtype],
    )


def wrong_slot(slot_mapping: torch.Tensor, token: int, num_slots: int) -> IndexError:
    """Return the error for a slot past the pool."""
    return IndexError(
        f"slot_mapping[{token}] is {int(slot_mapping[token])}, and the pool has {num_slots} slots"
    )
