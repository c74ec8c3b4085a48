"""Which queries of a step are computed together on the torch backend.

Owns: cutting queries into chunks, and chunks into products.  Does not know: K, V or q.
Idea: a row's bits do not depend on its company, so any cut is as good as another; this one follows
the cache sizes of a CPU, and reads key tiles that sequences share once for all of them.

    keys of a sequence     | tile 0 | tile 1 | ... | tile t | not visible
    queries of a chunk                                ^--^    a chunk lies within one tile, so
                                                              tile t alone needs a mask
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch

TILE: Final = 256  # keys; part of the arithmetic: another value gives other bits
ROW_STEP: Final = 8  # rows of a product are a multiple of this
NARROW_ROWS: Final = 32  # chunks of at most this many rows share a product with others
SCORE_BUDGET: Final = 1 << 20  # scores of a product, to keep them in the cache
GATHER_BUDGET: Final = 1 << 21  # gathered key elements of a narrow product, likewise
SHARED_GAIN: Final = 4  # tile reads that sharing must save to be worth a product of its own


class Heads(NamedTuple):
    """The sizes that stay the same from step to step."""

    num_kv: int
    group: int  # query heads that share a key head
    dim: int


class Chunk(NamedTuple):
    """Neighbouring queries of one sequence whose positions lie within one tile."""

    sequence: int
    row: int  # of q, where it starts
    num_queries: int
    position: int  # of its first query

    @property
    def num_tiles(self) -> int:
        """Tiles that its queries see, the last one in part."""
        return self.position // TILE + 1

    def is_narrow(self, heads: Heads) -> bool:
        """Whether it has too few rows to fill a product."""
        return self.num_queries * heads.group <= NARROW_ROWS


class Batch(NamedTuple):
    """Narrow chunks of equally many queries for one product, most tiles first."""

    chunks: list[Chunk]
    num_shared: int  # leading tiles that are the same blocks for all, and that all see in full


def padded(num_rows: int) -> int:
    """Round a row count up to what a product takes."""
    return -(-num_rows // ROW_STEP) * ROW_STEP


def cut(sequence: int, rows: tuple[int, int], seq_len: int, heads: Heads) -> Iterator[Chunk]:
    """Cut the last rows of a sequence at tile boundaries and where scores outgrow the cache."""
    row, end_row = rows
    position = seq_len - (end_row - row)
    while row < end_row:
        tile = position // TILE
        room = SCORE_BUDGET // ((tile + 1) * TILE * heads.num_kv * heads.group)
        room = max(ROW_STEP, room // ROW_STEP * ROW_STEP)
        count = min(end_row - row, (tile + 1) * TILE - position, room)
        yield Chunk(sequence, row, count, position)
        row, position = row + count, position + count


def group(
    chunks: list[Chunk], block_table: torch.Tensor, block_size: int, heads: Heads
) -> Iterator[Batch]:
    """Group narrow chunks, at most one a sequence, into products."""
    alone: list[Chunk] = []
    for run, num_shared in _runs(chunks, block_table, block_size):
        if num_shared * (len(run) - 1) < SHARED_GAIN:
            alone += run
            continue
        run.sort(key=lambda c: -c.num_tiles)
        yield from _split(run, num_shared, heads)
    alone.sort(key=lambda c: (c.num_queries, -c.num_tiles))
    yield from _split(alone, 0, heads)


def _split(chunks: list[Chunk], num_shared: int, heads: Heads) -> Iterator[Batch]:
    """Split where the query count changes and where a product outgrows the cache."""
    max_tiles = GATHER_BUDGET // (TILE * heads.num_kv * heads.dim)
    max_rows = SCORE_BUDGET // (TILE * heads.num_kv * max(num_shared, 1))
    batch: list[Chunk] = []
    tiles = 0
    for chunk in chunks:
        own = chunk.num_tiles - num_shared
        rows = (len(batch) + 1) * chunk.num_queries * heads.group
        full = tiles + own > max_tiles or (num_shared and rows > max_rows)
        if batch and (full or chunk.num_queries != batch[0].num_queries):
            yield Batch(batch, num_shared)
            batch, tiles = [], 0
        batch.append(chunk)
        tiles += own
    if batch:
        yield Batch(batch, num_shared)


def _runs(
    chunks: list[Chunk], block_table: torch.Tensor, block_size: int
) -> Iterator[tuple[list[Chunk], int]]:
    """Find chunks that share leading tiles."""
    ordered, common = _by_prefix(chunks, block_table, block_size)
    for first, end, num_shared in runs(common):
        yield ordered[first:end], num_shared


def runs(common: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut a sorted list into runs that share their beginnings.

    common  how much each item has in common with the one before
    yields  first item, end, and how much all items of the run have in common

    A run grows as long as that saves more reads.

    >>> list(runs([0, 4, 4, 1]))
    [(0, 3, 4), (3, 4, 0)]
    """
    first, num_shared = 0, 0
    for item, with_last in enumerate(common):
        size = item - first
        shared = min(num_shared, with_last) if size > 1 else with_last
        if size and shared * size <= num_shared * (size - 1):
            yield first, item, num_shared
            first, shared = item, 0
        num_shared = shared
    if common:
        yield first, len(common), num_shared


def _by_prefix(
    chunks: list[Chunk], block_table: torch.Tensor, block_size: int
) -> tuple[list[Chunk], list[int]]:
    """Bring chunks with like prefixes together, and count the tiles each shares with the last."""
    if len(chunks) < 2:
        return chunks, [0] * len(chunks)
    sequences = torch.tensor([c.sequence for c in chunks], device=block_table.device)
    table = block_table.index_select(0, sequences)
    # where two tables part, they part for good: a block a tile is enough to sort them by
    keys = table[:, :: max(1, TILE // block_size)].tolist()
    order = sorted(range(len(chunks)), key=lambda i: (chunks[i].num_queries, keys[i]))
    ordered = [chunks[i] for i in order]
    table = table.index_select(0, torch.tensor(order, device=table.device))
    blocks = (table[1:] == table[:-1]).cumprod(1).sum(1).tolist()
    common = [0]
    for num_blocks, (a, b) in zip(blocks, pairwise(ordered), strict=True):
        alike = a.num_queries == b.num_queries
        tiles = min(num_blocks * block_size // TILE, a.num_tiles - 1, b.num_tiles - 1)
        common.append(tiles if alike else 0)
    return ordered, common
