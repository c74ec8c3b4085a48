"""The runtime's own Llama behind the face of small_llama.py; needs the runtime's libraries.

Owns: the translation of pieces into the runtime's slices.  Does not know: what is compared.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.history import Piece
from benchmarks.gpu.small_llama import Shape, Texts
from runtime.executor.batch import build_batch
from runtime.kv.store import KVStore
from runtime.models.config import ModelConfig
from runtime.models.llama import LlamaModel
from runtime.plan import Slice
from runtime.weights.mapping import expected_shapes


def new_runtime_llama(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[ModelConfig, LlamaModel]:
    """Make a model of random weights, drawn on the device one tensor at a time."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_layers=shape.num_layers,
        num_heads=shape.heads.num_heads,
        num_kv_heads=shape.heads.num_kv_heads,
        head_dim=shape.heads.head_dim,
        max_len=shape.max_len,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    )

    def drawn(size: tuple[int, ...]) -> torch.Tensor:
        matrix = len(size) > 1  # the others are norms' weights, which are about one
        return torch.randn(size, device=device) * 2 * size[-1] ** -0.5 + (0 if matrix else 1)

    weights = ((name, drawn(size)) for name, size in expected_shapes(config).items())
    return config, LlamaModel(config, weights, dtype=dtype, device=device)


class RuntimeLlama:
    """A model of random weights, computed by the runtime."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.config, self.model = new_runtime_llama(shape, device, dtype)

    def new_pool(self, num_blocks: int, block_size: int) -> torch.Tensor:
        store = self._store(num_blocks, block_size)
        return store.pool.fill_(float("nan"))

    def _store(self, num_blocks: int, block_size: int) -> KVStore:
        return KVStore(
            self.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )

    def logits(self, pool: torch.Tensor, texts: Texts, pieces: list[Piece]) -> torch.Tensor:
        store = self._store(1, texts.block_size)
        store.pool = pool
        slices = [
            Slice(
                request_id=str(place),
                start=start,
                tokens=np.array(texts.ids[s][start:end], np.int32).tobytes(),
                block_table=texts.tables[s, : -(-end // texts.block_size)].numpy().tobytes(),
            )
            for place, (s, start, end) in enumerate(pieces)
        ]
        batch = build_batch(slices, block_size=texts.block_size, device=self.device)
        return self.model.logits(self.model.forward(batch, store))
