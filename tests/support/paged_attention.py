"""Paged steps for testing attention, and a float64 reference that knows nothing of pages.

Owns: scattering known keys over pools full of NaN.  Does not know: how attention is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass
class Suffix:
    """New queries of one sequence, and the keys and values of all its tokens."""

    q: torch.Tensor  # [n, H, D], for the last n positions
    k: torch.Tensor  # [seq_len, Hkv, D]
    v: torch.Tensor

    def last(self, num_queries: int) -> Suffix:
        """Return the same sequence with fewer new queries."""
        return Suffix(self.q[self.q.shape[0] - num_queries :], self.k, self.v)

    def first(self, seq_len: int, num_queries: int) -> Suffix:
        """Return the sequence as it was at an earlier length."""
        end = self.q.shape[0] - (self.k.shape[0] - seq_len)
        return Suffix(self.q[end - num_queries : end], self.k[:seq_len], self.v[:seq_len])


def random_suffix(
    generator: torch.Generator,
    num_queries: int,
    seq_len: int,
    *,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> Suffix:
    """Draw a sequence; `heads` is (key heads, query heads of a key head, head size)."""
    num_kv_heads, group, head_dim = heads

    def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)

    return Suffix(
        draw(num_queries, num_kv_heads * group),
        draw(seq_len, num_kv_heads),
        draw(seq_len, num_kv_heads),
    )


def dense_attention(suffix: Suffix, scale: float) -> torch.Tensor:
    """Return the output in float64: [n, H, D]."""
    num_queries, num_heads, _ = suffix.q.shape
    seq_len, num_kv_heads, _ = suffix.k.shape
    k, v = (
        x.double().repeat_interleave(num_heads // num_kv_heads, 1) for x in (suffix.k, suffix.v)
    )
    scores = torch.einsum("qhd,khd->hqk", suffix.q.double(), k) * scale
    position = torch.arange(seq_len - num_queries, seq_len)
    scores.masked_fill_(torch.arange(seq_len) > position[:, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@dataclass
class Step:
    """The arguments of one call, and how to tell its sequences apart again."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor

    def run(self, attention: Callable[..., torch.Tensor], **keywords: object) -> list[torch.Tensor]:
        """Call `attention` and return the rows of each sequence."""
        out = attention(
            self.q,
            self.k_pool,
            self.v_pool,
            self.block_table,
            self.seq_lens,
            self.q_start,
            **keywords,
        )
        return list(out.split(self.q_start.diff().tolist()))


def new_pool(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: str,
) -> torch.Tensor:
    """Return a pool [N, B, Hkv, D] full of NaN, with the strides of `layout`."""
    size = (num_blocks, block_size, num_kv_heads, head_dim)
    nan = float("nan")
    if layout == "head_major":
        return torch.full(
            (num_blocks, num_kv_heads, block_size, head_dim), nan, dtype=dtype
        ).transpose(1, 2)
    if layout == "layer":
        return torch.full((3, 2, *size), nan, dtype=dtype)[1, 1]
    if layout == "padded":
        return torch.full((*size[:2], num_kv_heads + 1, head_dim + 4), nan, dtype=dtype)[
            :, :, :num_kv_heads, :head_dim
        ]
    return torch.full(size, nan, dtype=dtype)


LAYOUTS = ("plain", "head_major", "layer", "padded")


def build_step(
    suffixes: Sequence[Suffix],
    generator: torch.Generator,
    *,
    block_size: int = 16,
    layout: str = "plain",
    num_shared_blocks: int = 0,
) -> Step:
    """Scatter sequences over blocks in random order; unused slots stay NaN.

    The first `num_shared_blocks` blocks of every sequence are the first sequence's own.
    """
    counts = [-(-s.k.shape[0] // block_size) for s in suffixes]
    num_blocks = sum(counts) + 2
    size = (num_blocks, block_size, *suffixes[0].k.shape[1:])
    dtype = suffixes[0].k.dtype
    k_pool, v_pool = (new_pool(*size, dtype, layout) for _ in range(2))
    free = torch.randperm(num_blocks, generator=generator).tolist()
    block_table = torch.full((len(suffixes), max(counts, default=0) + 1), -1, dtype=torch.int32)
    for row, (suffix, count) in enumerate(zip(suffixes, counts, strict=True)):
        blocks = block_table[0, :num_shared_blocks].tolist() if row else []
        blocks += [free.pop() for _ in range(count - len(blocks))]
        block_table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for ordinal, block in enumerate(blocks):
            start = ordinal * block_size
            for pool, values in ((k_pool, suffix.k), (v_pool, suffix.v)):
                part = values[start : start + block_size]
                pool[block, : part.shape[0]] = part
    num_queries = torch.tensor([0, *(s.q.shape[0] for s in suffixes)])
    return Step(
        torch.cat([s.q for s in suffixes]),
        k_pool,
        v_pool,
        block_table,
        torch.tensor([s.k.shape[0] for s in suffixes], dtype=torch.int32),
        num_queries.cumsum(0).to(torch.int32),
    )
