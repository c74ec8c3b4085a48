"""The records that the kernels in C read, field by field as kernels.h, attention.h and decoder.c
have them.

Owns: their layout.  Does not know: who fills them.
"""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of one kind, by names with spaces between."""
    return tuple((name, kind) for name in names.split())


class Part(ctypes.Structure):
    """Rows of a matrix that are stored alike."""

    _fields_ = (("packed", _POINTER), *fields(_LONG, "format outputs"))


class Matrix(ctypes.Structure):
    """A packed weight."""

    _fields_ = (("parts", Part * 3), *fields(_LONG, "num_parts outputs inputs int8"))


class Packing(ctypes.Structure):
    """A file's rows to pack."""

    _fields_ = (*fields(_POINTER, "raw packed"), *fields(_LONG, "format outputs inputs"))


class Taking(ctypes.Structure):
    """Rows of a matrix to read."""

    _fields_ = (
        ("matrix", ctypes.POINTER(Matrix)),
        *fields(_POINTER, "ids out"),
        *fields(_LONG, "count dtype"),
    )


class Load(ctypes.Structure):
    """What measures the limits of a machine."""

    _fields_ = (("data", _POINTER), ("bytes", _LONG), ("results", _POINTER))


class Product(ctypes.Structure):
    """Rows times a packed weight; strides in bytes."""

    _fields_ = (
        ("matrix", ctypes.POINTER(Matrix)),
        *fields(_POINTER, "x bias out rounded"),
        *fields(_LONG, "x_stride out_stride rows dtype"),
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


_WORK = "items tokens limits parts"
_PHASE_ENDS = ("phase_ends", _LONG * 3)


class AttentionStep(ctypes.Structure):
    """The work of a step of attention."""

    _fields_ = (
        *fields(_POINTER, f"{_WORK} block_table part_sums part_marks scratch"),
        _PHASE_ENDS,
        *fields(_LONG, "table_stride num_kv_heads group head_dim block_size"),
        *fields(_LONG, "max_rows scratch_bytes dtype"),
    )


class Attention(ctypes.Structure):
    """Attention in one layer; strides in bytes."""

    _fields_ = (
        *fields(_POINTER, "step q k v out"),
        *fields(_LONG, "q_token q_head out_token out_head"),
        *fields(_LONG, "k_block k_slot k_head v_block v_slot v_head"),
        ("scale", _FLOAT),
    )


class Listing(ctypes.Structure):
    """What the list of a step of attention is made from, and what came of it."""

    _fields_ = (
        *fields(_POINTER, "seq_lens q_start members starts lens block_table"),
        *fields(_LONG, "num_sequences num_members num_groups"),
        *fields(_LONG, "table_stride num_blocks block_size"),
        *fields(_LONG, "max_rows num_kv_heads group tile room threads"),
        *fields(_POINTER, f"skipped {_WORK}"),
        _PHASE_ENDS,
        *fields(_LONG, "num_entries num_parts wrong lacking"),
    )


class Layer(ctypes.Structure):
    """Weights of a decoder layer."""

    _fields_ = (
        *fields(_POINTER, "attention_norm ffn_norm qkv_bias out_bias"),
        *fields(Matrix, "qkv out gate_up down"),
    )


class Decoder(ctypes.Structure):
    """A step through all layers of a decoder."""

    _fields_ = (
        *fields(_POINTER, "layers residual added normed mixed attended gate_up gated rounded"),
        *fields(_LONG, "num_layers hidden ffn part pool_stride"),
        ("turn", Turn),
        ("attention", Attention),
        ("eps", _FLOAT),
    )
