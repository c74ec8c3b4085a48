"""Shapes of what is measured on a GPU, and the paged tensors of one step.

Owns: sizes, full and tiny, and how a step's blocks lie.  Does not know: ops, clocks, cases.
Idea: every case is written for a full size and asks the shapes to cap it, so that all of it also
runs in Triton's interpreter in moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from kernels.roofline import Heads

BLOCK_SIZE: Final = 16
HALF: Final = torch.bfloat16
Call = Callable[[], object]


class Shapes(NamedTuple):
    """Sizes of a model, and caps on whatever grows with a case.

    most_batch, most_keys, most_rows, most_prefix  caps; keys that a group shares have one of their
                                                   own, as the cascade shares whole splits only
    """

    heads: Heads
    hidden: int
    ffn: int
    vocab: int
    most_batch: int
    most_keys: int
    most_rows: int
    most_prefix: int

    def batch(self, num: int) -> int:
        """Cap a number of sequences."""
        return min(num, self.most_batch)

    def keys(self, num: int) -> int:
        """Cap the keys of a sequence."""
        return min(num, self.most_keys)

    def rows(self, num: int) -> int:
        """Cap new tokens, or rows of an op that knows no sequences."""
        return min(num, self.most_rows)

    def prefix(self, num: int) -> int:
        """Cap the keys that a group shares."""
        return min(num, self.most_prefix)


_NO_CAP = 1 << 30
FULL: Final = Shapes(Heads(32, 8, 128), 4096, 14336, 128256, _NO_CAP, _NO_CAP, _NO_CAP, _NO_CAP)
"""An 8B model of the Llama 3 family."""

TINY: Final = Shapes(Heads(4, 2, 64), 64, 96, 300, 2, 40, 12, 528)
"""For the interpreter: each kernel runs, on next to nothing."""


@dataclass
class Step:
    """Paged tensors of one attention call: every block in its own place, in random order."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor

    @property
    def paged(self) -> tuple[torch.Tensor, ...]:
        return self.k_pool, self.v_pool, self.block_table, self.seq_lens, self.q_start

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of sequences of one length out of their blocks: [S, Hkv, keys, D] each."""
        longest = int(self.seq_lens.max())
        blocks = self.block_table.clamp(min=0).long()
        k, v = (
            pool[blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
            for pool in (self.k_pool, self.v_pool)
        )
        return k, v


def new_step(
    device: torch.device,
    q_lens: list[int],
    seq_lens: list[int],
    *,
    heads: Heads = FULL.heads,
    dtype: torch.dtype = HALF,
    shared: int = 0,
    block_size: int = BLOCK_SIZE,
) -> Step:
    """Make a step; the first `shared` keys of all sequences are in the same blocks."""
    num_shared = shared // block_size
    own = [-(-n // block_size) - num_shared for n in seq_lens]
    ids = torch.randperm(num_shared + sum(own), dtype=torch.int32)
    table = torch.full((len(seq_lens), num_shared + max(own)), -1, dtype=torch.int32)
    table[:, :num_shared] = ids[:num_shared]
    at = num_shared
    for row, count in enumerate(own):
        table[row, num_shared : num_shared + count] = ids[at : at + count]
        at += count
    shape = (len(ids), block_size, heads.num_kv_heads, heads.head_dim)
    pools = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    q = torch.randn(sum(q_lens), heads.num_heads, heads.head_dim, device=device, dtype=dtype)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return Step(q, *pools, table.to(device), lens.to(device), starts.to(device))
