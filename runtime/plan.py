"""A step as a value: what to compute, and what came of it.

Owns: the records between scheduler and executor.  Does not know: how either works.
Idea: all are plain data, so a step can be written to a file and run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from radixcache.lease import BlockCopy
from radixcache.tokens import TOKEN_BYTES

Ids = Sequence[int]
"""Block ids, in order."""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """How likely a token was, and which ones were likeliest; natural logarithms.

    Of the model's own distribution: before temperature, filters, biases and penalties.
    token    log-probability of the token that stands there
    top_ids  the likeliest tokens, likeliest first; of equal ones the lower id first
    top      their log-probabilities
    """

    token: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Draw(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How to choose a token behind a slice; the noise comes from (seed, position) alone.

    bias_ids, bias  packed int32 ids, each once, and packed float32: added to their logits
    allowed         one bit a token, bit i % 32 of word i // 32 of packed int32; empty allows all
    num_logprobs    report the token's log-probability and so many of the likeliest; None: nothing
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    bias_ids: bytes = b""
    bias: bytes = b""
    allowed: bytes = b""
    num_logprobs: int | None = None


class Slice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run of one sequence's tokens to compute.

        tokens   │ kept: K/V is there │ to store │
                 start … start + num_kept   …   end
        targets        │ of rows first_target … │

    start         position of the first token
    tokens        packed ids
    block_table   packed int32 block ids, from the sequence's begin to the end of this run
    draws         how to choose the next token, once for each branch that begins here; none where
                  more of the sequence follows, or nothing is to be drawn
    num_kept      leading tokens whose K/V must not be written again: they are computed only for
                  their logits
    targets       packed ids of the tokens that follow rows `first_target` …, whose
                  log-probabilities are wanted; empty for none
    first_target  row of this slice that the first target follows
    num_logprobs  likeliest tokens to report beside each target
    index         which branch of the request it belongs to
    """

    request_id: str
    start: int
    tokens: bytes
    block_table: bytes
    draws: tuple[Draw, ...] = ()
    num_kept: int = 0
    targets: bytes = b""
    first_target: int = 0
    num_logprobs: int = 0
    index: int = 0


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Slices of one token each that draw one more, as columns.

    request_ids, indexes  whose they are
    tokens, positions     packed int32, one a row: the token to compute, and where it stands
    tables                packed int32 [rows, width]: block ids up to a row's position, then -1
    draws                 how each row chooses, its `position` left out
    drawn_at_random       rows that don't just take the likeliest token
    """

    request_ids: tuple[str, ...]
    indexes: tuple[int, ...]
    tokens: bytes
    positions: bytes
    tables: bytes
    block_size: int
    draws: tuple[Draw, ...]
    drawn_at_random: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.request_ids)

    def draw(self, row: int) -> Draw:
        """Return how a row chooses; O(1)."""
        position = int.from_bytes(self._number(self.positions, row), "little")
        return msgspec.structs.replace(self.draws[row], position=position + 1)

    def slices(self) -> Iterator[Slice]:
        """Yield each row as a slice; for whoever reads slices, such as what repeats a step."""
        tables = np.frombuffer(self.tables, np.int32).reshape(len(self), -1)
        for row, start in enumerate(np.frombuffer(self.positions, np.int32).tolist()):
            yield Slice(
                request_id=self.request_ids[row],
                start=start,
                tokens=self._number(self.tokens, row),
                block_table=tables[row, : start // self.block_size + 1].tobytes(),
                draws=(msgspec.structs.replace(self.draws[row], position=start + 1),),
                index=self.indexes[row],
            )

    def _number(self, column: bytes, row: int) -> bytes:
        return column[row * TOKEN_BYTES : (row + 1) * TOKEN_BYTES]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one step computes: rows first, then pieces.

    rows    of those that decode; None where nobody does
    pieces  all other slices
    copies  block copies to carry out first, in order
    """

    step: int
    pieces: tuple[Slice, ...]
    rows: Rows | None = None
    copies: tuple[BlockCopy, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All that is computed, as slices; made anew each time, O(slices)."""
        return (*(self.rows.slices() if self.rows else ()), *self.pieces)

    @property
    def num_slices(self) -> int:
        """How many slices there are; O(1)."""
        return len(self.pieces) + (len(self.rows) if self.rows else 0)


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave, in the order of its slices.

    token_ids         one token for each draw
    logprobs          one entry for each draw, None where none were asked for; empty where no draw
                      asked
    target_logprobs   one entry for each target, slices end to end
    """

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    target_logprobs: tuple[TokenLogprobs, ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """Where two runs of blocks first hold other bits.

    block  place in the runs of the first block that differs
    layer  the first one in which it does
    """

    block: int
    layer: int


class Executor(Protocol):
    """Whoever computes steps: the model, or a stand-in in tests."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the copies, store K/V of every slice, and choose a token for each draw."""

    def first_difference(self, ours: Ids, theirs: Ids, num_tokens: int) -> Difference | None:
        """Compare the bits of the first `num_tokens` slots of two runs of blocks."""


def merge_results(step: int, results: Sequence[StepResult]) -> StepResult:
    """Return the results of a step's slices, computed apart, as one."""
    asks = any(result.logprobs for result in results)
    return StepResult(
        step=step,
        token_ids=tuple(token for result in results for token in result.token_ids),
        logprobs=tuple(
            logprobs
            for result in results
            for logprobs in (result.logprobs or (None,) * len(result.token_ids))
        )
        if asks
        else (),
        target_logprobs=tuple(t for result in results for t in result.target_logprobs),
    )
