"""A decoder's layers in one call, where the native kernels compute all of their operations.

Owns: whether a stack of layers can go this way, and the records of the call.  Does not know: models
beyond the order of a Llama-like layer, nor how an operation works.
Idea: on a CPU a step of few rows is thousands of operations of microseconds.  Called one by one
they cost more in Python than in arithmetic, and take the interpreter's lock back each time; here
they take it once a step.  The bits are those of the same operations one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from ctypes import byref
from dataclasses import dataclass
from typing import Final

import torch

from kernels._attention_native import NativePlan, attention_record, kind_of, takes
from kernels._extend_plan import ExtendPlan
from kernels._linear_native import PackedMatrix, rounded_bytes
from kernels._rows_native import alike, turn_record, wrong_slot
from kernels.backend import check_device, check_dtype, check_shape, check_slots, choose_backend
from kernels.linear import PackedWeight
from kernels.native import DTYPES, library
from kernels.native.records import Decoder, Layer
from kernels.norm_rope import check_angles
from kernels.scratch import Scratch

PART_ROWS: Final = 512
"""Rows that go through half a layer together: what they leave for each other stays in caches."""

LISTS: Final = 3
"""Lists of attention's work in a layer, at most; of 128 bytes each, as all are."""

LISTS_OF_PART: Final = 12
"""Lists of the rest of a layer, for each part of the rows."""


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer, packed for `linear`; q, k, v in one matrix, gate and up in another.

    qkv      [(H + 2·Hkv)·D, hidden]     gate_up  [2·ffn, hidden]
    out      [hidden, H·D]               down     [hidden, ffn]
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor | PackedWeight
    qkv_bias: torch.Tensor | None
    out: torch.Tensor | PackedWeight
    out_bias: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor | PackedWeight
    down: torch.Tensor | PackedWeight


class DecoderLayers:
    """Layers that `fuse_layers` found fit to run in one call; holds their weights.

    One thread at a time: the working memory is kept from call to call.
    """

    def __init__(
        self, layers: Sequence[LayerWeights], dtype: torch.dtype, eps: float, scale: float
    ) -> None:
        self._layers = tuple(map(copy, layers))  # the tensors that the records point to
        self._dtype, self._eps, self._scale = dtype, eps, scale
        self._records = (Layer * len(layers))(*map(_record, self._layers))
        cpu = torch.device("cpu")
        self._scratch, self._lists = Scratch(cpu, dtype), Scratch(cpu, torch.int64)
        self._rounded = Scratch(cpu, torch.uint8)

    def run(
        self,
        added: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pools: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: ExtendPlan,
    ) -> None:
        """Compute all layers: what `added` and `residual` hold becomes what the last layer leaves.

        added         [T, hidden] dense: what the first norm adds to the residual stream
        residual      [T, hidden] dense
        cos, sin      [T, D/2] float32, the table's rows at each token's position
        pools         [L, 2, N, B, Hkv, D]  K and V of all layers
        slot_mapping  [T] int64, as in `store_kv`
        plan          of the step, for pools of this layout

        Raises IndexError for a slot past the pool, before anything is computed, and ValueError or
        TypeError for arguments that do not fit together.
        """
        checked = self._check(added, residual, cos, sin, pools, slot_mapping, plan)
        tokens, hidden = added.shape
        if not tokens:
            return
        first, heads, (k_pool, v_pool) = self._layers[0], checked.heads, pools[0]
        width, ffn = heads.num_kv * heads.group * heads.dim, first.down.shape[1]
        take = self._scratch.take
        part = min(tokens, PART_ROWS)
        mixed = take("mixed", part, first.qkv.shape[0] // heads.dim, heads.dim)
        buffers = {
            "normed": take("normed", part, hidden),
            "mixed": mixed,
            "attended": take("attended", tokens, width),
            "gate_up": take("gate_up", part, 2 * ffn),
            "gated": take("gated", part, ffn),
        }
        if any(isinstance(m, PackedWeight) and m.int8 for m in (first.qkv, first.down)):
            widest = max(hidden, width, ffn)
            buffers["rounded"] = self._rounded.take("rounded", part * rounded_bytes(widest))
        q = take("q", tokens, width // heads.dim, heads.dim)
        num_lists = LISTS + LISTS_OF_PART * -(-tokens // part)
        lists = self._lists.take("lists", len(self._layers) * num_lists * 16 + 8).zero_()
        attended = buffers["attended"].view(q.shape)
        cos, sin = alike(cos, sin)
        turn = turn_record(mixed, cos, sin, k_pool, v_pool, slot_mapping, q)
        turn.tokens = tokens
        decoder = Decoder(
            layers=ctypes.addressof(self._records),
            residual=residual.data_ptr(),
            added=added.data_ptr(),
            num_layers=len(self._layers),
            hidden=hidden,
            ffn=ffn,
            part=part,
            pool_stride=pools.stride(0) * pools.element_size(),
            eps=self._eps,
            turn=turn,
            attention=attention_record(q, k_pool, v_pool, attended, self._scale, checked),
            **{name: buffer.data_ptr() for name, buffer in buffers.items()},
        )
        start = lists.data_ptr() + -lists.data_ptr() % 64
        wrong = library().radixcache_decoder(byref(decoder), start, checked.threads)
        if wrong >= 0:
            raise wrong_slot(slot_mapping, wrong, decoder.turn.num_slots)

    def _check(
        self,
        added: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pools: torch.Tensor,
        slot_mapping: torch.Tensor,
        plan: ExtendPlan,
    ) -> NativePlan:
        """Raise unless the arguments of `run` fit together; return the plan as one of ours."""
        if not isinstance(plan, NativePlan):
            raise TypeError(
                f"plan is a {type(plan).__name__}, made for another backend than native"
            )
        heads = plan.heads
        check_shape("added", added, (plan.num_tokens, self._layers[0].out.shape[0]))
        check_shape("residual", residual, tuple(added.shape))
        check_shape("pools", pools, (len(self._layers), 2, "N", "B", heads.num_kv, heads.dim))
        for name, tensor in (("added", added), ("residual", residual), ("pools", pools)):
            check_dtype(name, tensor, (self._dtype,))
            check_device(name, tensor, torch.device("cpu"))
            if not tensor.is_contiguous():
                raise ValueError(f"{name} has strides {tensor.stride()}, expected contiguous")
        if plan.pool != kind_of(pools[0, 0]):
            raise ValueError("pools are not what the plan was made for")
        check_slots(slot_mapping, plan.num_tokens, pools[0, 0])
        check_angles(plan.num_tokens, heads.dim, cos, sin, pools.device)
        return plan


def fuse_layers(
    layers: Sequence[LayerWeights],
    *,
    dtype: torch.dtype,
    head_dim: int,
    eps: float,
    scale: float,
    backend: str | None = None,
) -> DecoderLayers | None:
    """Return the layers as one operation; None where some operation of theirs is not native.

    dtype, head_dim, eps, scale  of all layers, as in `rms_norm` and `extend_attention`
    """
    matrices = [m for layer in layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    device = matrices[0].device if matrices else torch.device("meta")
    fits = (
        dtype in DTYPES
        and takes(dtype, head_dim)
        and device.type == "cpu"
        and choose_backend(device, backend) == "native"
        and all(isinstance(m, PackedWeight) and m.backend == "native" for m in matrices)
        and all(m.dtype == dtype for m in matrices)
        and all(_shapes(layer) == _shapes(layers[0]) for layer in layers)
        and all(v.dtype == dtype and v.is_contiguous() for x in layers for v in _vectors(x))
    )
    return DecoderLayers(layers, dtype, eps, scale) if fits else None


def _shapes(layer: LayerWeights) -> list[tuple[int, ...]]:
    """The sizes of a layer's weights, biases among them."""
    matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return [tuple(weight.shape) for weight in (*matrices, *_vectors(layer))]


def _vectors(layer: LayerWeights) -> list[torch.Tensor]:
    vectors = (layer.attention_norm, layer.ffn_norm, layer.qkv_bias, layer.out_bias)
    return [vector for vector in vectors if vector is not None]


def _record(layer: LayerWeights) -> Layer:
    """Write a layer down; biases may be missing."""
    record = Layer()
    for name, *_ in Layer._fields_:
        value = getattr(layer, name)
        if isinstance(value, PackedWeight):
            assert isinstance(value.packed, PackedMatrix)
            setattr(record, name, value.packed.record)
        elif value is not None:
            setattr(record, name, value.data_ptr())
    return record
