"""The attention of one step: which operation computes which of its rows.

Owns: the choice between extend, decode and shared prefixes, and the plans of a step.  Does not
know: weights, layers, or how an operation works.
Idea: all three give a row the same bits, so the choice is one of speed.  The scheduler puts
sequences that decode before the others; their block tables are the tree's own word on who shares
what.

    slices of a step   | decoding, 1 or a few rows each | prefilling, many rows each |
                       | decode, or shared prefixes     | extend                     |
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise, takewhile
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from kernels import (
    ExtendPlan,
    Scratch,
    SharedPrefixes,
    choose_backend,
    decode_attention,
    extend_attention,
    plan_decode,
    plan_extend,
    plan_shared_prefix,
    shared_prefix_attention,
    shared_unit,
)
from radixcache.tokens import common_prefix_len, num_tokens
from runtime.models.batch import Batch

FEW_ROWS: Final = 8
"""Rows of a slice, at most, that are laid out as decode: one token, or a few drafts."""

_Tables: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Part(NamedTuple):
    """Neighbouring slices of a step that attend by one operation."""

    rows: slice
    tables: _Tables  # block_table, seq_lens, q_start
    attend: partial[torch.Tensor]


class StepAttention:
    """Attends in each layer of one step; made once a step.

    k_pool     of any layer; the pools of all layers have one shape and layout
    num_heads  query heads
    dtype      of the queries
    scratch    working memory, the same step after step
    """

    def __init__(
        self,
        batch: Batch,
        k_pool: torch.Tensor,
        *,
        num_heads: int,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        backend = choose_backend(k_pool.device)
        num_decoding = 0
        if backend != "torch":  # which has one way for all
            num_decoding = sum(1 for _ in takewhile(lambda rows: rows <= FEW_ROWS, batch.counts))
        # the native backend deals out both kinds in one list
        cuts = {0, len(batch.counts)} | ({num_decoding} if backend == "triton" else set())
        self._parts = []
        for first, end in pairwise(sorted(cuts)):
            row, num_rows = sum(batch.counts[:first]), sum(batch.counts[first:end])
            q_start = batch.q_start[first : end + 1]
            tables = (
                batch.block_table[first:end],
                batch.seq_lens[first:end],
                q_start - row if row else q_start,
            )
            sizes: dict[str, Any] = {
                "num_heads": num_heads,
                "num_tokens": num_rows,
                "dtype": dtype,
                "scratch": scratch,
            }
            if first < num_decoding:
                attend = _decode(batch, num_decoding, k_pool, tables, sizes)
            else:
                attend = partial(extend_attention, plan=plan_extend(k_pool, *tables, **sizes))
            self._parts.append(_Part(slice(row, row + num_rows), tables, attend))

    @property
    def plan(self) -> ExtendPlan | None:
        """The plan of the whole step, where one operation computes all of it; else None."""
        return self._parts[0].attend.keywords["plan"] if len(self._parts) == 1 else None

    def __call__(
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Attend from q [T, H, D] to one layer's pools; returns [T, H, D] in q.dtype."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, tables, attend in self._parts:
            attend(q[rows], k_pool, v_pool, *tables, scale=scale, out=out[rows])
        return out


def _decode(
    batch: Batch, count: int, k_pool: torch.Tensor, tables: _Tables, sizes: dict[str, Any]
) -> partial[torch.Tensor]:
    """Attend from the first `count` slices; what some have in the same blocks is read once."""
    longest = max(batch.lens[:count])
    prefixes = _shared_prefixes(batch, count, block_size=k_pool.shape[1])
    if not len(prefixes.members):
        plan = plan_decode(k_pool, *tables, max_seq_len=longest, **sizes)
        return partial(decode_attention, plan=plan)
    plan = plan_shared_prefix(k_pool, *tables, prefixes, max_seq_len=longest, **sizes)
    return partial(shared_prefix_attention, prefixes=prefixes, plan=plan)


def _shared_prefixes(batch: Batch, count: int, *, block_size: int) -> SharedPrefixes:
    """Group the first `count` slices by their block tables; O(count · blocks), at memory speed.

    A block that two tables name at one place is one node of the tree, or a lease and its fork.
    """
    order = sorted(range(count), key=batch.tables.__getitem__)  # equal beginnings side by side
    common = [0]
    for one, other in pairwise(order):
        ours, theirs = batch.tables[one], batch.tables[other]
        alike = common_prefix_len(ours, 0, theirs, num_tokens(ours)) * block_size
        common.append(min(alike, _prefix_len(batch, one), _prefix_len(batch, other)))
    device = batch.block_table.device
    return SharedPrefixes.among(order, common, device, unit=shared_unit(device))


def _prefix_len(batch: Batch, index: int) -> int:
    """Tokens before a slice's own: all of its rows see them."""
    return batch.lens[index] - batch.counts[index]
