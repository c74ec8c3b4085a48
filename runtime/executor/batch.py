"""A step's slices, end to end, as the tensors that a model reads.

Owns: turning packed ids and tables into one ragged batch.  Does not know: models, K/V memory.
Idea: slices arrive as bytes and are viewed, not parsed; nothing here is a loop over tokens.  Where
all of them are rows, they are columns already, and nothing is a loop over sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from runtime.models.batch import Batch, Tables
from runtime.plan import Draw, Rows, Slice


def build_batch(
    slices: Sequence[Slice], rows: Rows | None = None, *, block_size: int, device: torch.device
) -> Batch:
    """Lay rows and then slices end to end; at least one of either.  O(tokens + blocks) copies."""
    if rows is None:
        return _batch_of_slices(slices, block_size=block_size, device=device)
    if slices:  # a prompt's step takes so long that rows may be slices, too
        return _batch_of_slices([*rows.slices(), *slices], block_size=block_size, device=device)
    return _batch_of_rows(rows, device=device)


def _batch_of_slices(slices: Sequence[Slice], *, block_size: int, device: torch.device) -> Batch:
    tokens = [np.frombuffer(piece.tokens, np.int32) for piece in slices]
    tables = [np.frombuffer(piece.block_table, np.int32) for piece in slices]
    counts = np.array([len(ids) for ids in tokens], np.int32)
    starts = np.array([piece.start for piece in slices], np.int32)
    q_start = np.zeros(len(slices) + 1, np.int32)
    np.cumsum(counts, out=q_start[1:])
    block_table = np.full((len(slices), max(map(len, tables))), -1, np.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    owner = np.repeat(np.arange(len(slices)), counts)
    positions = np.arange(q_start[-1], dtype=np.int64) + (starts - q_start[:-1])[owner]
    blocks = block_table[owner, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    kept = np.array([piece.start + piece.num_kept for piece in slices], np.int64)
    slots[positions < kept[owner]] = -1
    drawing = [index for index, piece in enumerate(slices) for _ in piece.draws]
    targets = [np.frombuffer(piece.targets, np.int32) for piece in slices]
    target_rows = [
        np.arange(len(ids)) + q_start[index] + piece.first_target
        for index, (piece, ids) in enumerate(zip(slices, targets, strict=True))
    ]
    on_device = _mover(device)
    return Batch(
        token_ids=on_device(np.concatenate(tokens).astype(np.int64)),
        positions=on_device(positions),
        slot_mapping=on_device(slots),
        block_table=on_device(block_table),
        seq_lens=on_device(starts + counts),
        q_start=on_device(q_start),
        choose_rows=on_device(q_start[1:][drawing].astype(np.int64) - 1),
        draws=[draw for piece in slices for draw in piece.draws],
        target_rows=on_device(np.concatenate(target_rows).astype(np.int64)),
        target_ids=on_device(np.concatenate(targets).astype(np.int64)),
        target_tops=[
            piece.num_logprobs
            for piece, ids in zip(slices, targets, strict=True)
            for _ in range(len(ids))
        ],
        tables=Tables(block_table, [len(table) for table in tables]),
        lens=(starts + counts).tolist(),
        counts=counts.tolist(),
    )


def _batch_of_rows(rows: Rows, *, device: torch.device) -> Batch:
    """Lay rows alone end to end; a few operations on whole columns."""
    count, block_size = len(rows), rows.block_size
    places = np.frombuffer(rows.positions, np.int32)
    tables = np.frombuffer(rows.tables, np.int32).reshape(count, -1)
    every = np.arange(count)
    positions, seq_lens = places.astype(np.int64), places + 1
    blocks, inside = np.divmod(positions, block_size)
    slots = tables[every, blocks] * np.int64(block_size) + inside
    draws: list[Draw | None] = [None] * count
    for row in rows.drawn_at_random:
        draws[row] = rows.draw(row)
    on_device = _mover(device)
    nothing = on_device(np.empty(0, np.int64))
    return Batch(
        token_ids=on_device(np.frombuffer(rows.tokens, np.int32).astype(np.int64)),
        positions=on_device(positions),
        slot_mapping=on_device(slots),
        block_table=on_device(tables.copy()),
        seq_lens=on_device(seq_lens),
        q_start=on_device(np.arange(count + 1, dtype=np.int32)),
        choose_rows=on_device(every),
        draws=draws,
        target_rows=nothing,
        target_ids=nothing,
        target_tops=[],
        tables=Tables(tables, (blocks + 1).tolist()),
        lens=seq_lens.tolist(),
        counts=[1] * count,
    )


def _mover(device: torch.device) -> Callable[[np.ndarray[Any, Any]], torch.Tensor]:
    """Return what makes an array a tensor on a device; on the host it is the same memory."""
    if device.type == "cpu":
        return torch.from_numpy  # a third of what `as_tensor` costs
    return partial(torch.as_tensor, device=device)
