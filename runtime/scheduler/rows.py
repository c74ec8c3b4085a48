"""Those that decode, as columns: what a step changes is changed for all of them at once.

Owns: the columns, and who stands in which row.  Does not know: the cache, budgets, text.
Idea: between two edges of a block nothing of a decode changes but its newest token and its place.
So a step is a few operations on arrays, and a sequence itself is looked at only at an edge, where
its lease needs a block or has one to publish.

    position % block_size   0: a block is needed    …    block_size - 1: one will be full
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Numbers
from typing import Any, TypeAlias

import numpy as np

from runtime.errors import EngineFailure
from runtime.plan import Draw, Rows
from runtime.scheduler.slices import draws_of
from runtime.sequence import Sequence

_Names: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], tuple[Draw, ...], tuple[int, ...]]


class DecodeRows:
    """Sequences that are one token behind and choose the next one by themselves.

    sequences  by row; a row that falls empty is taken by the last one
    """

    def __init__(self, block_size: int) -> None:
        self.sequences: list[Sequence] = []
        self._block_size = block_size
        self._tokens = np.zeros(8, np.int32)
        self._positions = np.zeros(8, np.int32)
        self._tables = np.full((8, 8), -1, np.int32)
        self._outputs: list[list[int]] = []  # each sequence's own
        self._draws: list[Draw] = []
        self._names: _Names | None = None  # until somebody comes or goes

    def __len__(self) -> int:
        return len(self.sequences)

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence, all of whose tokens are on its lease."""
        row = len(self.sequences)
        if row == len(self._tokens):
            self._tokens, self._positions = (
                np.concatenate((column, np.zeros_like(column)))
                for column in (self._tokens, self._positions)
            )
            self._tables = np.concatenate((self._tables, np.full_like(self._tables, -1)))
        self._tokens[row] = sequence.output[-1]
        self._positions[row] = sequence.num_tokens - 1
        self.sequences.append(sequence)
        self._outputs.append(sequence.output)
        self._draws += draws_of(sequence, 0)
        self._names = None
        sequence.row = row
        self.refresh(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out; the last one takes its row.  Nothing happens if it is in none."""
        row = sequence.row
        if row < 0:
            return
        sequence.num_computed, sequence.row = sequence.num_computed, -1
        last = len(self.sequences) - 1
        _fill_up(self.sequences, row)
        _fill_up(self._outputs, row)
        _fill_up(self._draws, row)
        if row < last:
            self._tokens[row] = self._tokens[last]
            self._positions[row] = self._positions[last]
            self._tables[row] = self._tables[last]
            self.sequences[row].row = row
        self._names = None

    def refresh(self, sequence: Sequence) -> None:
        """Read a sequence's block table again."""
        assert sequence.lease is not None
        table = np.frombuffer(sequence.lease.block_table, np.int32)
        if len(table) > self._tables.shape[1]:
            room = np.full((len(self._tables), len(table)), -1, np.int32)
            self._tables = np.concatenate((self._tables, room), axis=1)
        ours = self._tables[sequence.row]
        ours[: len(table)] = table
        ours[len(table) :] = -1

    def add_block(self, sequence: Sequence) -> None:
        """Read the block that a sequence has got for its newest token."""
        assert sequence.lease is not None
        table = sequence.lease.block_table
        if len(table) > self._tables.shape[1]:
            self.refresh(sequence)
        else:
            self._tables[sequence.row, len(table) - 1] = table[-1]

    def starting(self) -> list[Sequence]:
        """Return those whose newest token is the first one of a block."""
        return self._standing_at(0)

    def filling(self) -> list[Sequence]:
        """Return those whose newest token is the last one of a block."""
        return self._standing_at(self._block_size - 1)

    def _standing_at(self, inside: int) -> list[Sequence]:
        (rows,) = (self._positions[: len(self)] % self._block_size == inside).nonzero()
        return [self.sequences[row] for row in rows.tolist()]

    def columns(self) -> Rows | None:
        """Return what a step computes of them; a copy of the columns, None where there are none."""
        count = len(self)
        if not count:
            return None
        if self._names is None:
            self._names = (
                tuple([sequence.request.request_id for sequence in self.sequences]),
                tuple([sequence.index for sequence in self.sequences]),
                tuple(self._draws),
                tuple([row for row, draw in enumerate(self._draws) if draw.temperature]),
            )
        request_ids, indexes, draws, drawn_at_random = self._names
        positions = self._positions[:count]
        width = int(positions.max()) // self._block_size + 1
        return Rows(
            request_ids=request_ids,
            indexes=indexes,
            tokens=self._tokens[:count].tobytes(),
            positions=positions.tobytes(),
            tables=self._tables[:count, :width].tobytes(),
            block_size=self._block_size,
            draws=draws,
            drawn_at_random=drawn_at_random,
        )

    def check(self) -> None:
        """Check every column against its sequence; for tests.  Raises EngineFailure."""
        for row, sequence in enumerate(self.sequences):
            lease, place = sequence.lease, sequence.num_tokens - 1
            assert lease is not None
            table = self._tables[row][self._tables[row] >= 0].tolist()
            inside = place % self._block_size
            facts = {
                "row": sequence.row == row,
                "token": self._tokens[row] == sequence.output[-1],
                "position": self._positions[row] == place,
                "block table": table == lease.block_table.tolist(),
                "output": self._outputs[row] is sequence.output,
                "draw": self._draws[row].seed == sequence.seeds[0],
                "lease": place - inside <= lease.num_tokens <= place + 1,
            }
            wrong = [name for name, holds in facts.items() if not holds]
            if wrong:
                raise EngineFailure(f"row {row} of {sequence.request.request_id}: {wrong} wrong")

    def advance(self, tokens: Numbers[int]) -> None:
        """Take the token that was drawn for each."""
        deque(map(list.append, self._outputs, tokens), maxlen=0)  # a loop in C
        self._tokens[: len(tokens)] = tokens
        self._positions[: len(tokens)] += 1


def _fill_up(column: list[Any], row: int) -> None:
    """Let the last one take the place of a row."""
    column[row] = column[-1]
    column.pop()
