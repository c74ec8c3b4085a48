"""A small Llama of random weights, out of the kernels alone or as the runtime computes it.

Owns: the two ways to compute the same kind of model, behind one face.  Does not know: what is
compared.
Idea: where the runtime's libraries are absent, the order of its operations is still checked, by
the same ops in the same order; where they are there, its own code is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional

import kernels
from benchmarks.gpu.history import Piece
from kernels.roofline import Heads
from kernels.rotary_scaling import rotary_frequencies


class Shape(NamedTuple):
    """Sizes of the model."""

    heads: Heads
    hidden: int
    ffn: int
    vocab: int
    num_layers: int
    max_len: int


SMALL: Final = Shape(Heads(12, 4, 64), 768, 2048, 8192, 4, 1200)
FEW: Final = Shape(Heads(4, 2, 16), 64, 96, 61, 2, 64)
"""For the interpreter."""


class Step(NamedTuple):
    """The index tensors of one pass over pieces, all on the device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor


class Texts(NamedTuple):
    """Token ids of some sequences, and the blocks that are theirs."""

    ids: list[list[int]]
    tables: torch.Tensor  # [S, M] int32
    block_size: int

    @classmethod
    def random(cls, lens: list[int], vocab: int, block_size: int) -> Texts:
        """Draw texts, and scatter their blocks."""
        ids = [torch.randint(vocab, (n,)).tolist() for n in lens]
        return cls.of(ids, block_size)

    @classmethod
    def of(cls, ids: list[list[int]], block_size: int) -> Texts:
        """Give given texts blocks of another size."""
        most = max(-(-len(text) // block_size) for text in ids)
        tables = torch.randperm(most * len(ids), dtype=torch.int32).view(len(ids), most)
        return cls(ids, tables, block_size)

    def step(self, pieces: list[Piece], device: torch.device) -> Step:
        """Lay pieces end to end."""
        ids = [token for s, start, end in pieces for token in self.ids[s][start:end]]
        places = [torch.arange(start, end) for _, start, end in pieces]
        slots = [
            self.tables[s].long()[place // self.block_size] * self.block_size
            + place % self.block_size
            for (s, _, _), place in zip(pieces, places, strict=True)
        ]
        new = torch.tensor([0, *(end - start for _, start, end in pieces)])
        return Step(
            token_ids=torch.tensor(ids, device=device),
            positions=torch.cat(places).to(device),
            slots=torch.cat(slots).to(device),
            block_table=self.tables[[s for s, _, _ in pieces]].to(device),
            seq_lens=torch.tensor([end for _, _, end in pieces], dtype=torch.int32, device=device),
            q_start=new.cumsum(0).int().to(device),
        )


class Model(Protocol):
    """What is asked about: one pass gives logits, and leaves K/V in a pool.

    new_pool  [layers, 2, blocks, block size, kv heads, head dim], full of NaN
    """

    def new_pool(self, num_blocks: int, block_size: int) -> torch.Tensor: ...

    def logits(self, pool: torch.Tensor, texts: Texts, pieces: list[Piece]) -> torch.Tensor: ...


class LayersAlone:
    """The model out of the kernels alone."""

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = kernels.linear,
    ) -> None:
        self.shape, self.device, self.dtype, self.product = shape, device, dtype, product
        self.scratch = kernels.Scratch(device)
        heads, hidden = shape.heads, shape.hidden

        def normal(*size: int) -> torch.Tensor:
            return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

        num_mixed = heads.num_heads + 2 * heads.num_kv_heads
        self.embedding = 2 * normal(shape.vocab, hidden)
        self.head = normal(shape.vocab, hidden)
        self.layers = [
            {
                "norm": 1 + normal(1, hidden)[0],
                "qkv": 2 * normal(num_mixed * heads.head_dim, hidden),
                "out": normal(hidden, heads.num_heads * heads.head_dim),
                "ffn_norm": 1 + normal(1, hidden)[0],
                "gate_up": normal(2 * shape.ffn, hidden),
                "down": normal(hidden, shape.ffn),
            }
            for _ in range(shape.num_layers)
        ]
        frequencies = rotary_frequencies(heads.head_dim, theta=10_000.0)
        cos, sin = kernels.rotary_table(frequencies, shape.max_len)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def new_pool(self, num_blocks: int, block_size: int) -> torch.Tensor:
        heads = self.shape.heads
        size = (
            self.shape.num_layers,
            2,
            num_blocks,
            block_size,
            heads.num_kv_heads,
            heads.head_dim,
        )
        return torch.full(size, float("nan"), device=self.device, dtype=self.dtype)

    def logits(self, pool: torch.Tensor, texts: Texts, pieces: list[Piece]) -> torch.Tensor:
        return self.forward(pool, texts.step(pieces, self.device))

    def forward(
        self, pool: torch.Tensor, step: Step, *, max_seq_len: int | None = None
    ) -> torch.Tensor:
        """Compute [T, vocab] logits, as `hidden` does."""
        return self.project(self.hidden(pool, step, max_seq_len=max_seq_len))

    def hidden(
        self, pool: torch.Tensor, step: Step, *, max_seq_len: int | None = None
    ) -> torch.Tensor:
        """Compute [T, hidden], storing K/V on the way.

        max_seq_len  of a decode, which takes the split layout, as a graph may hold it
        """
        heads = self.shape.heads
        paged = (step.block_table, step.seq_lens, step.q_start)
        size = {"num_heads": heads.num_heads, "num_tokens": len(step.token_ids)}
        attend: Callable[..., torch.Tensor] = kernels.extend_attention
        if max_seq_len is None:
            plan = kernels.plan_extend(pool[0, 0], *paged, **size, scratch=self.scratch)
        else:
            attend = kernels.decode_attention
            plan = kernels.plan_decode(
                pool[0, 0], *paged, **size, max_seq_len=max_seq_len, scratch=self.scratch
            )
        attend = partial(attend, scale=heads.head_dim**-0.5, plan=plan)
        product = self.product
        x = functional.embedding(step.token_ids, self.embedding)
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        for layer, (k_pool, v_pool) in zip(self.layers, pool, strict=True):
            normed = kernels.rms_norm(x, layer["norm"], eps=1e-5)
            mixed = product(normed, layer["qkv"]).view(len(x), -1, heads.head_dim)
            q = kernels.rotary_store_kv(mixed, cos, sin, k_pool, v_pool, step.slots)
            attended = attend(q, k_pool, v_pool, *paged)
            x = x + product(attended.flatten(1), layer["out"])
            normed = kernels.rms_norm(x, layer["ffn_norm"], eps=1e-5)
            x = x + product(kernels.silu_and_mul(product(normed, layer["gate_up"])), layer["down"])
        return x

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Project rows onto the vocabulary."""
        ones = torch.ones_like(self.embedding[0])
        return self.product(kernels.rms_norm(x, ones, eps=1e-5), self.head).float()
