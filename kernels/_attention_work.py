"""The lists of work for the attention kernel: extend, decode and shared prefixes.

Owns: which query rows meet which splits of whose keys.  Does not know: q, K, V, or any kernel.
Idea: a list is as long as the shapes allow and is filled on the device, so that making one waits
for nothing and fits a CUDA graph; an item that turns out to have no queries ends at once.

    extend          every tile of queries | all splits up to its last key
    decode          every tile of queries | split 0 | split 1 | ..          one item each
    shared prefix   the group's queries   | split 0 | split 1 |             read once for all
                    each member's own                         | split 2 | ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from kernels._extend_cut import runs
from kernels._extend_plan import ExtendPlan
from kernels.scratch import Scratch

SPLIT: Final = 512
"""Keys of a split; a multiple of every key tile, and part of the arithmetic."""


class Tiling(NamedTuple):
    """The sizes that a list depends on; the same for all lists of a model."""

    tokens: int  # of a query tile
    split: int  # keys of a split


@dataclass(frozen=True, slots=True, eq=False)
class WorkPlan(ExtendPlan):
    """A list of work, and where each row of q stands.

    items       [I, 6] int32  sequence, first split, end split, first entry of `tokens`, number of
                              tokens, end of the keys that they see
    tokens      [L] int32     rows of q
    positions   [T] int32     of each row of q in its sequence; -1 for a row of no sequence
    first_news  [T] int32     position of the first new token of the row's sequence
    num_splits  0 where an item folds all its splits; else each item is one of at most so many
    """

    tiling: Tiling
    items: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    first_news: torch.Tensor
    num_splits: int
    scratch: Scratch


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefixes:
    """Which sequences of a step begin with the same blocks; the caller's knowledge.

    members  [P] int32      sequences, group by group; none is in two groups
    starts   [G + 1] int32  group g is members[starts[g]:starts[g + 1]]
    lens     [G] int32      tokens at the front that all members of a group have in the same blocks

    Shapes are all that is looked at before a launch, so the tensors may be refilled for a captured
    CUDA graph; a group may be empty.

    >>> SharedPrefixes.of([([0, 2, 5], 1024), ([1, 3], 512)]).starts
    tensor([0, 3, 5], dtype=torch.int32)
    """

    members: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def of(
        cls, groups: list[tuple[list[int], int]], device: torch.device | str = "cpu"
    ) -> SharedPrefixes:
        """Build from (sequences, common length in tokens) of each group."""
        starts = [0]
        for members, _ in groups:
            starts.append(starts[-1] + len(members))

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        members = [sequence for group, _ in groups for sequence in group]
        return cls(tensor(members), tensor(starts), tensor([length for _, length in groups]))

    @classmethod
    def among(
        cls,
        sequences: Sequence[int],
        common: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        unit: int = SPLIT,
    ) -> SharedPrefixes:
        """Group sequences where that saves reads.

        sequences  sorted so that those with like beginnings are neighbours
        common     tokens that each has in the same blocks as the one before it; the first 0
        unit       of tokens that are read once, see `shared_unit`

        >>> SharedPrefixes.among([3, 0, 2], [0, 1024, 700]).members
        tensor([3, 0], dtype=torch.int32)
        """
        found = runs([length // unit for length in common])
        shared = [(list(sequences[a:b]), n * unit) for a, b, n in found if n]
        return cls.of(shared, device)


class _Step(NamedTuple):
    """What every list needs to know of a step."""

    seq_lens: torch.Tensor
    q_start: torch.Tensor
    num_tokens: int
    tiling: Tiling

    def first(self, size: int) -> torch.Tensor:
        """Return 0, 1, .. size - 1."""
        return torch.arange(size, dtype=torch.int32, device=self.q_start.device)

    @property
    def prefix_lens(self) -> torch.Tensor:
        return self.seq_lens - self.q_start.diff()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Position and first new position of each row of q."""
        row = self.first(self.num_tokens)
        sequence = _owner(self.q_start[:-1], row)
        first_new = self.prefix_lens[sequence]
        position = first_new + row - self.q_start[sequence]
        return position.where(row < self.q_start[-1], -1), first_new

    def tiles(self) -> tuple[torch.Tensor, ...]:
        """Sequence, first row, number of tokens and end of the keys of each tile of queries.

        Sequence s is given the tiles from q_start[s] // tokens + s on, which leaves room for its
        last, partial one.
        """
        size = self.tiling.tokens
        num_sequences = self.seq_lens.shape[0]
        first_tile = self.q_start[:-1] // size + self.first(num_sequences)
        tile = self.first(self.num_tokens // size + num_sequences)
        sequence = _owner(first_tile, tile)
        first = (tile - first_tile[sequence]) * size
        num_tokens = (self.q_start.diff()[sequence] - first).clamp(0, size)
        key_end = self.prefix_lens[sequence] + first + num_tokens
        return sequence, self.q_start[sequence] + first, num_tokens, key_end


def extend_work(
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    num_tokens: int,
    tiling: Tiling,
    scratch: Scratch,
) -> WorkPlan:
    """List every tile of queries once, with all its splits."""
    step = _Step(seq_lens, q_start, num_tokens, tiling)
    sequence, row, count, key_end = step.tiles()
    end_split = _splits(key_end, tiling)
    items = torch.stack([sequence, torch.zeros_like(row), end_split, row, count, key_end], 1)
    return _plan(step, items, step.first(num_tokens), 0, scratch)


def decode_work(
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    prefixes: SharedPrefixes | None = None,
    *,
    num_tokens: int,
    max_seq_len: int,
    tiling: Tiling,
    scratch: Scratch,
) -> WorkPlan:
    """List every tile of queries with each of its splits apart.

    prefixes  groups, the splits that one shares are listed once for all its queries
    """
    step = _Step(seq_lens, q_start, num_tokens, tiling)
    num_splits = -(-max_seq_len // tiling.split)
    rows = step.first(num_tokens)
    if prefixes is None or not prefixes.members.shape[0]:
        items = _split_items(step, torch.zeros_like(seq_lens), num_splits)
        return _plan(step, items, rows, num_splits, scratch)
    common, members_rows, skipped = _common_items(step, prefixes, num_splits)
    # first the groups' queries, then all rows of q in their order
    own = _split_items(step, skipped, num_splits)
    own[:, 3] += num_tokens
    tokens = torch.cat([members_rows.clamp(0, max(num_tokens - 1, 0)), rows])
    return _plan(step, torch.cat([common, own]), tokens, num_splits, scratch)


def _common_items(
    step: _Step, prefixes: SharedPrefixes, num_splits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Items of the splits that groups share, the rows of q they name, and the splits done so.

    returns  items, rows [T] group by group, number of shared splits of each sequence [S]
    """
    seq_lens, q_start, tiling = step.seq_lens, step.q_start, step.tiling
    members, starts, lens = prefixes.members, prefixes.starts, prefixes.lens
    group = _owner(starts[:-1], step.first(members.shape[0]))
    present = step.first(members.shape[0]) < starts[-1]
    shared = lens // tiling.split
    # one more sequence takes what the unused places of `members` say
    skipped = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    place = members.where(present, seq_lens.shape[0]).long()
    skipped.index_copy_(0, place, shared[group])

    # the members' queries end to end, group by group
    num_queries = q_start.diff()[members.clamp(0, seq_lens.shape[0] - 1)].where(present, 0)
    ends = num_queries.cumsum(0, dtype=torch.int32)
    before = torch.nn.functional.pad(ends, (1, 0))
    entry = step.first(step.num_tokens)
    member = torch.searchsorted(ends, entry, right=True).clamp(max=members.shape[0] - 1)
    row = q_start[members[member].clamp(0, seq_lens.shape[0] - 1)] + entry - before[member]

    group_start = before[starts.clamp(max=members.shape[0])]
    owner, first, count, _ = _Step(lens, group_start, step.num_tokens, tiling).tiles()
    split = step.first(num_splits)[:, None]
    count = count * (split < shared[owner])
    # members[starts[g]] stands for its group: its blocks are everyone's
    reader = members[starts[owner].clamp(max=members.shape[0] - 1)]
    items = _items(reader, split, first, count, (split + 1) * tiling.split)
    return items, row, skipped[:-1]


def _split_items(step: _Step, skipped: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Items of one split each, neighbours in a split side by side."""
    sequence, row, count, key_end = step.tiles()
    split = step.first(num_splits)[:, None]
    count = count * ((split >= skipped[sequence]) & (split < _splits(key_end, step.tiling)))
    return _items(sequence, split, row, count, key_end)


def _items(
    sequence: torch.Tensor,
    split: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    key_end: torch.Tensor,
) -> torch.Tensor:
    """Items of one split each; `count` has the shape [splits, tiles] of all."""
    fields = (sequence, split, split + 1, first, count, key_end)
    return torch.stack([field.expand_as(count) for field in fields], -1).view(-1, 6)


def _plan(
    step: _Step, items: torch.Tensor, tokens: torch.Tensor, num_splits: int, scratch: Scratch
) -> WorkPlan:
    positions, first_news = step.rows()
    return WorkPlan(
        num_tokens=step.num_tokens,
        tiling=step.tiling,
        items=items.to(torch.int32).contiguous(),
        tokens=tokens.to(torch.int32),
        positions=positions.to(torch.int32),
        first_news=first_news.to(torch.int32),
        num_splits=num_splits,
        scratch=scratch,
    )


def _owner(starts: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the last index whose start is at or before each of `at`."""
    return (torch.searchsorted(starts.contiguous(), at, right=True) - 1).to(torch.int32)


def _splits(key_end: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    return (key_end + tiling.split - 1) // tiling.split
