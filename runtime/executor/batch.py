"""A step's slices, end to end, as the tensors that a model reads.

Owns: turning packed ids and tables into one ragged batch.  Does not know: models, K/V memory.
Idea: slices arrive as bytes and are viewed, not parsed; nothing here is a loop over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from runtime.models.batch import Batch
from runtime.plan import Slice


def build_batch(slices: Sequence[Slice], *, block_size: int, device: torch.device) -> Batch:
    """Lay slices end to end; at least one slice.  O(tokens + blocks) copies."""
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

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

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
        tables=[piece.block_table for piece in slices],
        lens=(starts + counts).tolist(),
        counts=counts.tolist(),
    )
