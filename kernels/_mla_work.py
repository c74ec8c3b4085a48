"""The lists of work over a latent pool.

Owns: cutting a step so that its partial results fit a budget.  Does not know: q, latents, or any
kernel.
Idea: partial results of latents are wide, four numbers for each one that half-precision attention
with keys of 128 writes, so a prompt's rows are taken a chunk at a time.  A row's bits do not tell
the chunk.

    rows of q     | chunk 0 | chunk 1 | .. |     each a decode list of its own, in the same scratch
    sequences     |    a    | b |    c     |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from kernels._attention_work import SharedPrefixes, Tiling, WorkPlan, decode_work
from kernels._extend_plan import ExtendPlan
from kernels.scratch import Scratch

BUDGET: Final = 1 << 29  # bytes of partial results, where more than one tile of rows takes them


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedPlan(ExtendPlan):
    """Lists of work for neighbouring chunks of the rows of q."""

    chunks: tuple[WorkPlan, ...]


def latent_work(
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    prefixes: SharedPrefixes | None = None,
    *,
    num_tokens: int,
    token_bytes: int,
    max_seq_len: int,
    tiling: Tiling,
    scratch: Scratch,
) -> ChunkedPlan:
    """List every tile of queries with each of its splits apart, `BUDGET` bytes at a time.

    prefixes     what a group shares is listed once for all its queries; they are together, so a
                 step with groups is not cut
    token_bytes  of the partial result of one row of q, all heads, and one split
    """
    num_splits = -(-max_seq_len // tiling.split)
    room = BUDGET // (num_splits * token_bytes) // tiling.tokens * tiling.tokens
    size = max(room, tiling.tokens)
    work = partial(decode_work, max_seq_len=max_seq_len, tiling=tiling, scratch=scratch)
    if num_tokens <= size or (prefixes is not None and prefixes.members.shape[0]):
        return ChunkedPlan(num_tokens, (work(seq_lens, q_start, prefixes, num_tokens=num_tokens),))
    chunks = []
    for row in range(0, num_tokens, size):
        end = min(row + size, num_tokens)
        starts = q_start.clamp(row, end) - row
        # a sequence is as long as its last query in the chunk sees it
        lens = seq_lens - (q_start[1:] - end).clamp(min=0)
        chunks.append(work(lens, starts, num_tokens=end - row))
    return ChunkedPlan(num_tokens, tuple(chunks))
