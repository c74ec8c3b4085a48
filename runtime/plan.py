"""A step as a value: what to compute, and what came of it.

Owns: the two records between scheduler and executor.  Does not know: how either works.
Idea: both are plain data, so a step can be written to a file and run again.
"""

from __future__ import annotations

import msgspec

from radixcache.lease import BlockCopy


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the token behind a slice; the noise comes from (seed, position) alone."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A run of one sequence's tokens to compute.

    start        position of the first token
    tokens       packed ids
    block_table  packed int32 block ids, from the sequence's begin to the end of this run
    draw         how to choose the next token; None where more of the sequence follows
    """

    request_id: str
    start: int
    tokens: bytes
    block_table: bytes
    draw: Draw | None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one step computes.

    copies  block copies to carry out first, in order
    """

    step: int
    slices: tuple[Slice, ...]
    copies: tuple[BlockCopy, ...] = ()


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave: one token for each slice with a `draw`, in order."""

    step: int
    token_ids: tuple[int, ...]
