"""The records that the kernels in C read, field by field as kernels.h and decoder.c have them.

Owns: their layout.  Does not know: who fills them.
"""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one kind, by names with spaces between."""
    return tuple((name, kind) for name in names.split())


class Product(ctypes.Structure):
    """Rows times a packed weight; strides in bytes."""

    _fields_ = (
        *fields(_POINTER, "x packed bias out"),
        *fields(_LONG, "x_stride out_stride rows outputs inputs dtype"),
    )


class Norm(ctypes.Structure):
    """Rows to scale, and what is added to them first."""

    _fields_ = (
        *fields(_POINTER, "x weight residual out"),
        *fields(_LONG, "x_stride residual_stride out_stride rows width dtype"),
        ("eps", _FLOAT),
    )


class Gate(ctypes.Structure):
    """Rows whose second half the first one opens."""

    _fields_ = (
        *fields(_POINTER, "gate_up out"),
        *fields(_LONG, "stride out_stride rows width dtype"),
    )


class Turn(ctypes.Structure):
    """Queries and keys to turn, keys and values to store; strides in bytes, of angles in floats."""

    _fields_ = (
        *fields(_POINTER, "qkv cos sin k_pool v_pool q slots"),
        *fields(_LONG, "token_stride head_stride angle_stride q_stride"),
        *fields(_LONG, "block_size num_slots block_stride slot_stride pool_head_stride"),
        *fields(_LONG, "heads kv_heads head_dim tokens dtype"),
    )


class Layer(ctypes.Structure):
    """Weights of a decoder layer."""

    _fields_ = fields(_POINTER, "attention_norm qkv qkv_bias out out_bias ffn_norm gate_up down")


class Decoder(ctypes.Structure):
    """A step through all layers of a decoder."""

    _fields_ = (
        *fields(_POINTER, "layers residual added normed mixed attended gate_up gated attention"),
        *fields(_LONG, "num_layers hidden ffn pool_stride"),
        *fields(_FLOAT, "eps scale"),
        ("turn", Turn),
    )
