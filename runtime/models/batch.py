"""What a model reads in one pass: a ragged batch, as tensors.

Owns: the fields.  Does not know: who built it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from runtime.plan import Draw


class Tables(Sequence[bytes]):
    """Packed block tables, cut out of one array as they are asked for.

    array  [S, M] int32, on the host
    lens   blocks of each
    """

    def __init__(self, array: np.ndarray[Any, Any], lens: Sequence[int]) -> None:
        self._array = array
        self._lens = lens

    def __len__(self) -> int:
        return len(self._lens)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._array[index, : self._lens[index]].tobytes()


@dataclass(slots=True)
class Batch:
    """One ragged batch of S slices with T tokens, R of them to be followed by a choice.

    token_ids, positions  [T] int64
    slot_mapping          [T] int64       where each token's K/V goes: block · block_size + offset;
                                          -1 where it is in place and stays
    block_table           [S, M] int32    -1 beyond a sequence
    seq_lens              [S] int32       keys that the last token of each slice sees
    q_start               [S + 1] int32   slice s owns rows q_start[s] … q_start[s + 1]
    choose_rows           [R] int64       the row that each draw follows
    draws                 R of them; None takes the likeliest token
    target_rows           [P] int64       rows whose next token's log-probability is wanted
    target_ids            [P] int64       those tokens
    target_tops           P numbers of likeliest tokens to report beside them
    tables, lens, counts  on the host: packed block table, seq_len and tokens of each slice
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor
    choose_rows: torch.Tensor
    draws: list[Draw | None]
    target_rows: torch.Tensor
    target_ids: torch.Tensor
    target_tops: list[int]
    tables: Tables
    lens: list[int]
    counts: list[int]
