"""The Llama family: weights, and one forward pass over a ragged batch.

Owns: the order of operations of a layer and where its weights lie.  Does not know: files,
sequences, sampling.
Idea: one path for prefill and decode.  K/V of the batch is stored first and attention reads only
the store, so a token attends to the same stored values whoever computed them, and when.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch.nn import functional

from kernels import (
    LayerWeights,
    PackedWeight,
    QuantisedWeight,
    RowLayout,
    Scratch,
    fuse_layers,
    linear,
    pack_weight,
    rms_norm,
    rotary_store_kv,
    rotary_table,
    silu_and_mul,
)
from runtime.kv.store import KVStore
from runtime.models.attention import StepAttention
from runtime.models.batch import Batch
from runtime.models.config import ModelConfig
from runtime.models.rope import inverse_frequencies

Weight: TypeAlias = torch.Tensor | QuantisedWeight


class LlamaModel:
    """A Llama-like decoder on one device.

    tensors   (canonical name, tensor) of every weight, already checked against `config`; matrices
              may be quantised where the backend computes with them
    int8      whether products with quantised weights round their rows to 8 bits
    product_backend  computes the products; None: the device's
    progress  called with the number of tensors taken so far

    `row_layout` is that of its products, None for the default; see kernels/row_check.py.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, Weight]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool = False,
        product_backend: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.row_layout: RowLayout | None = None
        self._scale = config.head_dim**-0.5
        self._scratch = Scratch(device)
        self._product_backend = product_backend
        self._pack = partial(pack_weight, dtype=dtype, int8=int8, backend=product_backend)
        weights: dict[str, Weight] = {}
        layers: dict[int, LayerWeights] = {}
        for count, (name, tensor) in enumerate(tensors, 1):
            weights[name] = tensor if isinstance(tensor, QuantisedWeight) else tensor.to(device)
            index = _complete_layer(weights, name, config)
            if index is not None:
                layers[index] = self._layer(weights, f"model.layers.{index}.")
            if progress:
                progress(count)
        self._layers = [layers[index] for index in range(config.num_layers)]
        self._norm = _vector(weights, "model.norm.weight", dtype)
        table = weights.pop("model.embed_tokens.weight")
        self._head = self._pack(table if config.tie_embeddings else weights.pop("lm_head.weight"))
        self._embedding = self._table(table)
        self._fused = fuse_layers(
            self._layers,
            dtype=dtype,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=self._scale,
        )
        cos, sin = rotary_table(inverse_frequencies(config), config.max_len)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def _table(self, table: Weight) -> torch.Tensor | PackedWeight:
        """Return what embeddings are read from: the head, where it is the same and can be read."""
        if (
            isinstance(self._head, PackedWeight)
            and self._head.has_rows
            and self.config.tie_embeddings
        ):
            return self._head  # one copy serves both
        return self._pack(table) if isinstance(table, QuantisedWeight) else table.to(self.dtype)

    def _layer(self, weights: dict[str, Weight], at: str) -> LayerWeights:
        """Take a layer's weights; a matrix goes as its packed copy comes, so that memory never
        holds two copies of more than one layer."""

        def packed(*names: str) -> torch.Tensor | PackedWeight:
            """Take matrices as one, laid out as the backend computes with it."""
            return self._pack([weights.pop(f"{at}{name}.weight") for name in names])

        def bias(*names: str) -> torch.Tensor | None:
            """Take biases as one, if there are any."""
            found = [f"{at}{name}.bias" for name in names if f"{at}{name}.bias" in weights]
            return (
                torch.cat([_vector(weights, name, self.dtype) for name in found]) if found else None
            )

        return LayerWeights(
            attention_norm=_vector(weights, f"{at}input_layernorm.weight", self.dtype),
            qkv=packed(*_QKV),
            qkv_bias=bias(*_QKV),
            out=packed("self_attn.o_proj"),
            out_bias=bias("self_attn.o_proj"),
            ffn_norm=_vector(weights, f"{at}post_attention_layernorm.weight", self.dtype),
            gate_up=packed("mlp.gate_proj", "mlp.up_proj"),
            down=packed("mlp.down_proj"),
        )

    def forward(self, batch: Batch, store: KVStore) -> torch.Tensor:
        """Compute the last hidden state of every token, storing its K/V on the way.

        returns  [T, hidden] in the model's dtype
        """
        added = self._embed(batch.token_ids)
        x = torch.zeros_like(added)  # the residual stream; each norm adds to it what came before
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        attention = StepAttention(
            batch,
            store.layer(0)[0],
            num_heads=self.config.num_heads,
            dtype=self.dtype,
            scratch=self._scratch,
        )
        if self._fused and attention.plan and self.row_layout is None:
            pools, slots = store.pool, batch.slot_mapping
            self._fused.run(added, x, cos, sin, pools, slots, attention.plan)
            return x.add_(added)
        step = _Step(batch, store, attention, cos, sin)
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self._layers):
            normed = rms_norm(added, layer.attention_norm, eps=eps, residual=x)
            added = self._attention(layer, index, normed, step)
            normed = rms_norm(added, layer.ffn_norm, eps=eps, residual=x)
            added = self._product(silu_and_mul(self._product(normed, layer.gate_up)), layer.down)
        return x.add_(added)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._embedding, PackedWeight):
            return self._embedding.rows(token_ids)
        return functional.embedding(token_ids, self._embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states onto the vocabulary.

        hidden   [R, hidden], rows of `forward`'s result
        returns  [R, vocab] float32
        """
        normed = rms_norm(hidden, self._norm, eps=self.config.rms_norm_eps)
        return self._product(normed, self._head).float()

    @property
    def products(self) -> str:
        """Which backend multiplies and how the weights are stored: what bits may depend on."""
        matrices = [self._head, *(weight for weight, _ in self.layer_weights)]
        packed = [weight for weight in matrices if isinstance(weight, PackedWeight)]
        formats = sorted({name for weight in packed for name in weight.formats})
        backends = sorted({str(weight.backend) for weight in packed}) or ["plain"]
        rounded = ", rows rounded to 8 bits" if any(weight.int8 for weight in packed) else ""
        return f"{' and '.join(backends)}, weights in {', '.join(formats) or self.dtype}{rounded}"

    @property
    def layer_weights(self) -> list[tuple[torch.Tensor | PackedWeight, torch.Tensor | None]]:
        """Every matrix that the layers multiply by, with its bias."""
        return [
            pair
            for layer in self._layers
            for pair in (
                (layer.qkv, layer.qkv_bias),
                (layer.out, layer.out_bias),
                (layer.gate_up, None),
                (layer.down, None),
            )
        ]

    @property
    def head_weight(self) -> torch.Tensor | PackedWeight:
        """[vocab, hidden]: what the last hidden states are multiplied by."""
        return self._head

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every weight in its dtype, unpacked, in a fixed order."""
        layers = [getattr(layer, name) for layer in self._layers for name in LayerWeights.__slots__]
        tables = (
            (self._embedding, self._head) if self._embedding is not self._head else (self._head,)
        )
        for weight in (*tables, self._norm, *layers):
            if weight is not None:
                yield weight.plain() if isinstance(weight, PackedWeight) else weight

    def _product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        backend = self._product_backend
        return linear(x, weight, bias, layout=self.row_layout, backend=backend)

    def _attention(
        self, layer: LayerWeights, index: int, x: torch.Tensor, step: _Step
    ) -> torch.Tensor:
        config, batch = self.config, step.batch
        heads, kv_heads = config.num_heads, config.num_kv_heads
        mixed = self._product(x, layer.qkv, layer.qkv_bias)
        mixed = mixed.view(-1, heads + 2 * kv_heads, config.head_dim)
        k_pool, v_pool = step.store.layer(index)
        q = rotary_store_kv(mixed, step.cos, step.sin, k_pool, v_pool, batch.slot_mapping)
        attended = step.attention(q, k_pool, v_pool, scale=self._scale)
        return self._product(attended.view(-1, heads * config.head_dim), layer.out, layer.out_bias)


@dataclass(slots=True)
class _Step:
    """What all layers of one forward pass share."""

    batch: Batch
    store: KVStore
    attention: StepAttention
    cos: torch.Tensor
    sin: torch.Tensor


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MATRICES = (*_QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def _complete_layer(weights: dict[str, Weight], name: str, config: ModelConfig) -> int | None:
    """Return the layer of a weight if all of that layer's are there."""
    match = _LAYER.match(name)
    if match is None:
        return None
    needed = [f"{match[0]}{part}.weight" for part in (*_NORMS, *_MATRICES)]
    if config.attention_bias:
        needed += [f"{match[0]}{part}.bias" for part in _MATRICES[:4]]
    return int(match[1]) if all(part in weights for part in needed) else None


def _vector(weights: dict[str, Weight], name: str, dtype: torch.dtype) -> torch.Tensor:
    vector = weights.pop(name)
    if isinstance(vector, QuantisedWeight):  # no file that is known has one
        raise TypeError(f"{name} is quantised: only matrices may be")
    return vector.to(dtype)
