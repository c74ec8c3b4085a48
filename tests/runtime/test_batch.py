"""The ragged batch of a step against one built in plain loops."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.executor.batch import build_batch
from runtime.models.batch import Batch
from runtime.plan import Draw, Rows, Slice

CPU = torch.device("cpu")


def draw(position: int) -> Draw:
    return Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=position)


@st.composite
def slices(draw_from, block_size: int) -> list[Slice]:
    """One to five slices; a table may name any block, shared or not."""
    pieces = []
    for index in range(draw_from(st.integers(1, 5))):
        start, count = draw_from(st.integers(0, 9)), draw_from(st.integers(1, 6))
        num_blocks = -(-(start + count) // block_size)
        blocks = draw_from(
            st.lists(st.integers(0, 2**31 - 1), min_size=num_blocks, max_size=num_blocks)
        )
        tokens = draw_from(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
        pieces.append(
            Slice(
                request_id=f"r{index}",
                start=start,
                tokens=pack_tokens(tokens),
                block_table=pack_tokens(blocks),
                draws=(draw(start + count),) * draw_from(st.integers(0, 2)),
            )
        )
    return pieces


def loop_reference(pieces: list[Slice], block_size: int) -> dict[str, list]:
    fields: dict[str, list] = {
        "token_ids": [],
        "positions": [],
        "slot_mapping": [],
        "block_table": [],
        "seq_lens": [],
        "q_start": [0],
        "choose_rows": [],
        "draws": [],
    }
    widest = max(len(unpack_tokens(piece.block_table)) for piece in pieces)
    for piece in pieces:
        table = unpack_tokens(piece.block_table)
        for offset, token in enumerate(unpack_tokens(piece.tokens)):
            position = piece.start + offset
            fields["token_ids"].append(token)
            fields["positions"].append(position)
            slot = table[position // block_size] * block_size + position % block_size
            fields["slot_mapping"].append(slot)
        fields["block_table"].append(table + [-1] * (widest - len(table)))
        fields["seq_lens"].append(fields["positions"][-1] + 1)
        fields["q_start"].append(len(fields["token_ids"]))
        for _ in piece.draws:
            fields["choose_rows"].append(len(fields["token_ids"]) - 1)
            fields["draws"].append(_)
    return fields


@given(data=st.data(), block_size=st.sampled_from((1, 2, 3, 16)))
@settings(max_examples=200, deadline=None)
def test_a_batch_is_what_plain_loops_build(data, block_size):
    pieces = data.draw(slices(block_size))
    batch = build_batch(pieces, block_size=block_size, device=CPU)
    for name, expected in loop_reference(pieces, block_size).items():
        value = getattr(batch, name)
        assert (value.tolist() if isinstance(value, torch.Tensor) else value) == expected, name


@given(
    block_size=st.sampled_from((1, 2, 16)),
    places=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    hot=st.integers(0, 5),
)
@settings(max_examples=100, deadline=None)
def test_rows_make_the_batch_that_their_slices_make(block_size, places, hot):
    count, width = len(places), max(places) // block_size + 1
    tables = np.full((count, width), -1, np.int32)
    for row, place in enumerate(places):
        tables[row, : place // block_size + 1] = 100 * row + np.arange(place // block_size + 1)
    rows = Rows(
        request_ids=tuple(f"r{row}" for row in range(count)),
        indexes=(0,) * count,
        tokens=pack_tokens(range(7, 7 + count)),
        positions=pack_tokens(places),
        tables=tables.tobytes(),
        block_size=block_size,
        draws=tuple(draw(0) for _ in places),
        drawn_at_random=(hot,) if hot < count else (),
    )
    ours = build_batch([], rows, block_size=block_size, device=CPU)
    theirs = build_batch(list(rows.slices()), block_size=block_size, device=CPU)
    for name in Batch.__slots__:
        one, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, name
            assert one.tolist() == other.tolist(), name
        elif name == "draws":
            assert [d for d in one if d is not None] == other[hot : hot + 1]
        else:
            assert list(one) == list(other), name


def test_dtypes_are_those_that_kernels_read():
    piece = Slice(request_id="r", start=1, tokens=pack_tokens([5]), block_table=pack_tokens([3]))
    batch = build_batch([piece], block_size=2, device=CPU)
    for name in ("token_ids", "positions", "slot_mapping", "choose_rows"):
        assert getattr(batch, name).dtype == torch.int64, name
    for name in ("block_table", "seq_lens", "q_start"):
        assert getattr(batch, name).dtype == torch.int32, name


def test_a_batch_shares_no_memory_with_its_plan():
    tokens, table = pack_tokens([1, 2]), pack_tokens([0, 1])
    piece = Slice(request_id="r", start=0, tokens=tokens, block_table=table)
    batch = build_batch([piece], block_size=1, device=CPU)
    batch.token_ids.fill_(9)
    batch.block_table.fill_(9)
    assert np.frombuffer(tokens, np.int32).tolist() == [1, 2]
    assert np.frombuffer(table, np.int32).tolist() == [0, 1]
