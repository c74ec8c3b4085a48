"""Sequences with all their queries, keys and values, attended to in whatever pieces one likes.

Owns: the tensors, where they lie in the pools, and one call for a list of pieces.  Does not know:
which pieces must agree.
Idea: everything is stored once; a piece is a range of one sequence's queries, which see the keys
before them.  Any cut, batch, block size or op then answers for the same rows.

    0            start        end            length
    |-- seen ----|-- queries --|-- not seen --|
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

import kernels
from kernels.roofline import Heads

Op = Literal["extend", "decode", "cascade"]


class Piece(NamedTuple):
    """Queries start to end of a sequence."""

    sequence: int
    start: int
    end: int


class History:
    """Sequences of given lengths, with queries, keys and values of their own.

    common  the sequences' first keys are those of sequence 0, and in its blocks
    kv      dtype of the pools; eight bits have a scale by slot
    """

    def __init__(
        self,
        device: torch.device,
        lens: list[int],
        *,
        heads: Heads,
        dtype: torch.dtype,
        kv: torch.dtype | None = None,
        common: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.device, self.lens, self.heads, self.common = device, lens, heads, common
        self.kv = kv or dtype
        self.options = options or {}
        shapes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        total = sum(lens)
        self.q, self.k, self.v = (
            torch.randn(total, num, heads.head_dim, device=device, dtype=dtype) for num in shapes
        )
        self.starts = [sum(lens[:i]) for i in range(len(lens))]
        for start in self.starts[1:]:
            for tensor in (self.k, self.v):
                tensor[start : start + common] = tensor[:common]

    def stored(self, block_size: int) -> Stored:
        """Store every key and value in blocks of a size, in random order, NaN everywhere else."""
        return Stored(self, block_size)


class Stored:
    """A history in pools of one block size."""

    def __init__(self, history: History, block_size: int) -> None:
        self.history, self.block_size = history, block_size
        device, heads = history.device, history.heads
        counts = [-(-n // block_size) for n in history.lens]
        num_shared = history.common // block_size
        ids = torch.randperm(sum(counts) + 3, dtype=torch.int32)
        self.tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        at = 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = ids[at : at + count]
            at += count
            self.tables[row, :num_shared] = self.tables[0, :num_shared]
        shape = (len(ids), block_size, heads.num_kv_heads, heads.head_dim)
        eight_bits = history.kv.itemsize == 1
        empty = 0.0 if history.kv == torch.int8 else float("nan")
        self.pools = [
            torch.full(shape, empty, device=device, dtype=torch.float32).to(history.kv)
            for _ in range(2)
        ]
        self.scales: dict[str, torch.Tensor] = {}
        if eight_bits:
            nan = torch.full(shape[:3], float("nan"), device=device)
            self.scales = {"k_scale": nan, "v_scale": nan.clone()}
        kernels.store_kv(history.k, history.v, *self.pools, self._slots(), **self.scales)

    def _slots(self) -> torch.Tensor:
        """Where each token lies; -1 for what sequence 0 stores for the others."""
        slots = []
        shared = self.history.common // self.block_size * self.block_size
        for row, length in enumerate(self.history.lens):
            place = torch.arange(length)
            block = self.tables[row].long()[place // self.block_size]
            slot = block * self.block_size + place % self.block_size
            slots.append(slot.where((place >= shared) | (row == 0), -1))
        return torch.cat(slots).to(self.history.device)

    def attend(self, pieces: list[Piece], op: Op = "extend", *, spare_rows: int = 0) -> Any:
        """Attend from all pieces in one call; return their rows end to end, [T, H, D].

        spare_rows  rows of q that belong to no sequence, at the end
        """
        history, device = self.history, self.history.device
        rows = [
            history.q[history.starts[s] + start : history.starts[s] + end]
            for s, start, end in pieces
        ]
        nothing = torch.full_like(history.q[:1], float("nan")).expand(spare_rows, -1, -1)
        q = torch.cat([*rows, nothing])
        new = torch.tensor([0, *(end - start for _, start, end in pieces)])
        paged = (
            *self.pools,
            self.tables[[s for s, _, _ in pieces]].to(device),
            torch.tensor([end for _, _, end in pieces], dtype=torch.int32, device=device),
            new.cumsum(0).int().to(device),
        )
        options: dict[str, Any] = {"scale": history.heads.head_dim**-0.5}
        options |= {**self.scales, **history.options}
        if op == "extend":
            out = kernels.extend_attention(q, *paged, **options)
        elif op == "decode":
            out = kernels.decode_attention(q, *paged, **options)
        else:
            members = list(range(len(pieces)))
            common = min(history.common, *(start for _, start, _ in pieces))
            prefixes = kernels.SharedPrefixes.of([(members, common)], device)
            out = kernels.shared_prefix_attention(q, *paged, prefixes, **options)
        return out[: len(q) - spare_rows]

    def in_chunks(self, size: int, op: Op = "extend") -> Any:
        """Attend to everything, each sequence `size` queries a call, all sequences together."""
        history = self.history
        out = torch.full_like(history.q, float("nan"))
        for first in range(0, max(history.lens), size):
            pieces = [
                Piece(s, first, min(first + size, length))
                for s, length in enumerate(history.lens)
                if first < length
            ]
            self.place(out, pieces, self.attend(pieces, op))
        return out

    def place(self, out: torch.Tensor, pieces: list[Piece], rows: torch.Tensor) -> None:
        """Write pieces' rows where they stand in the history."""
        at = 0
        for s, start, end in pieces:
            base = self.history.starts[s]
            out[base + start : base + end] = rows[at : at + end - start]
            at += end - start
