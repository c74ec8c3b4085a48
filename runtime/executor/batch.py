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
    chosen = [index for index, piece in enumerate(slices) if piece.draws]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Batch(
        token_ids=on_device(np.concatenate(tokens).astype(np.int64)),
        positions=on_device(positions),
        slot_mapping=on_device(blocks * block_size + positions % block_size),
        block_table=on_device(block_table),
        seq_lens=on_device(starts + counts),
        q_start=on_device(q_start),
        choose_rows=on_device(q_start[1:][chosen].astype(np.int64) - 1),
        draws=[draw for piece in slices for draw in piece.draws],
    )
