"""The index tensors by which the torch backend of extend attention gathers and joins.

Owns: the plan of a step, made once for all its layers.  Does not know: the values of q, K and V.
Idea: which rows meet which tiles is the same in every layer, and working it out costs as much as a
small step's attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels._extend_cut import TILE, Batch, Chunk, Heads, cut, group
from kernels.scratch import Scratch


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Chunks of equally many queries that are computed together, most tiles first.

    An item is a tile of a chunk.  Items stand in the order of their tiles: tile 0 of every chunk,
    then tile 1 of those that have it, and so on.  The first `num_shared` tiles are the same blocks
    for all chunks: they are gathered once, and their product holds the rows of every chunk.
    """

    num_chunks: int
    num_queries: int  # of each chunk
    num_shared: int
    steps: tuple[int, ...]  # chunks that have tile 0, 1, ...
    owner: torch.Tensor  # [items] chunk of each item
    last: torch.Tensor  # [chunks] item of each chunk's last tile, counted after the shared ones
    mask: torch.Tensor  # [chunks, queries, TILE] 0 or -inf, for the last tile
    rows: torch.Tensor  # [chunks * queries] rows of q and of the output

    @property
    def num_gathered(self) -> int:
        """Tiles of K that the product reads."""
        return self.num_shared + sum(self.steps[self.num_shared :])


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Keys collected once, and the products that read them from the first tile on."""

    index: torch.Tensor  # [tiles * Hkv * TILE] rows of the pool, see `pool_rows`
    num_tiles: int
    products: tuple[Product, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExtendPlan:
    """Everything about a step that is the same in each of its layers; each backend has its own."""

    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TorchPlan(ExtendPlan):
    """A step of the torch backend, cut into products."""

    heads: Heads
    pool_layout: tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
    gathers: tuple[Gather, ...]
    scratch: Scratch


def pool_rows(pool: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """View a pool as rows of D elements; return it with the row steps of block, slot and head."""
    unit = math.gcd(*pool.stride()[:3])
    by_block, by_slot, by_head = (stride // unit for stride in pool.stride()[:3])
    num_blocks, block_size, num_kv_heads, head_dim = pool.shape
    extent = (num_blocks - 1) * by_block + (block_size - 1) * by_slot
    extent += (num_kv_heads - 1) * by_head + 1
    return pool.as_strided((extent, head_dim), (unit, 1)), (by_block, by_slot, by_head)


def plan_torch(
    pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    heads: Heads,
    scratch: Scratch,
) -> TorchPlan:
    """Cut a step into gathers and products; waits for the device to read lengths and starts."""
    lens = seq_lens.tolist()
    starts = q_start.tolist()
    check_lengths(lens, starts, block_table.shape[1] * pool.shape[1])
    narrow: list[Chunk] = []
    gathers: list[Gather] = []
    planner = _Planner(pool, block_table, lens, heads)
    for sequence, rows in enumerate(pairwise(starts)):
        chunks = list(cut(sequence, rows, lens[sequence], heads))
        if len(chunks) == 1 and chunks[0].is_narrow(heads):
            narrow += chunks
        elif chunks:
            gathers.append(planner.gather([Batch([chunk], 0) for chunk in chunks]))
    for batch in group(narrow, block_table, pool.shape[1], heads):
        gathers.append(planner.gather([batch]))
    layout = (tuple(pool.shape), pool.stride())
    return TorchPlan(starts[-1], heads, layout, tuple(gathers), scratch)


def check_lengths(lens: list[int], starts: list[int], room: int) -> None:
    """Raise ValueError unless each sequence has its queries among its tokens, and room for them."""
    if starts[0] != 0:
        raise ValueError(f"q_start begins at {starts[0]}, expected 0")
    for sequence, (seq_len, (first_row, end_row)) in enumerate(
        zip(lens, pairwise(starts), strict=True)
    ):
        if not 0 <= end_row - first_row <= seq_len <= room:
            raise ValueError(
                f"sequence {sequence} has seq_lens {seq_len} and {end_row - first_row} queries, "
                f"and block_table has room for {room} tokens"
            )


class _Planner:
    """Builds the index tensors of one step."""

    __slots__ = ("_block_size", "_block_table", "_device", "_heads", "_lens", "_row_steps", "_seen")

    def __init__(
        self, pool: torch.Tensor, block_table: torch.Tensor, lens: list[int], heads: Heads
    ) -> None:
        self._heads = heads
        self._lens = lens
        self._block_table = block_table
        self._block_size = pool.shape[1]
        self._row_steps = pool_rows(pool)[1]
        self._device = pool.device
        key = torch.arange(TILE, device=self._device)
        # row p hides the keys of a tile after its p-th
        self._seen = torch.zeros((TILE, TILE), device=self._device)
        self._seen.masked_fill_(key > key[:, None], -math.inf)

    def gather(self, batches: Sequence[Batch]) -> Gather:
        """Plan products over one gather; the last of them reads all of it."""
        products = tuple(self._product(*batch) for batch in batches)
        chunks, num_shared = batches[-1]
        items = [(tile, chunks[0].sequence) for tile in range(num_shared)]
        for tile, count in list(enumerate(products[-1].steps))[num_shared:]:
            items += [(tile, chunk.sequence) for chunk in chunks[:count]]
        return Gather(self._row_index(items), len(items), products)

    def _row_index(self, items: list[tuple[int, int]]) -> torch.Tensor:
        """Pool rows of (tile, sequence) items, in the order [item, head, key].

        Keys past the end of a sequence repeat its last one: a slot that was never written may hold
        anything, NaN included, and a weight of zero does not silence that.
        """
        width = self._block_table.shape[1]
        facts = [(tile * TILE, s * width, self._lens[s] - 1) for tile, s in items]
        first, entry, last = torch.tensor(facts, device=self._device)[:, :, None].unbind(1)
        position = torch.minimum(first + torch.arange(TILE, device=self._device), last)
        ordinal = position.div(self._block_size, rounding_mode="floor")
        offset = position - ordinal * self._block_size
        block = self._block_table.reshape(-1).index_select(0, (ordinal + entry).view(-1))
        by_block, by_slot, by_head = self._row_steps
        row = block.view_as(ordinal) * by_block + offset * by_slot
        head = torch.arange(self._heads.num_kv, device=self._device) * by_head
        return (row[:, None] + head[:, None]).view(-1)

    def _product(self, chunks: list[Chunk], num_shared: int) -> Product:
        tiles = range(chunks[0].num_tiles)
        steps = tuple(sum(c.num_tiles > tile for c in chunks) for tile in tiles)
        owner = [i for count in steps for i in range(count)]
        starts = [sum(steps[num_shared:tile]) for tile in tiles]
        last = [starts[c.num_tiles - 1] + i for i, c in enumerate(chunks)]
        rows = [c.row + i for c in chunks for i in range(c.num_queries)]
        seen = [c.position % TILE + i for c in chunks for i in range(c.num_queries)]
        if len(chunks) == 1:  # a view is enough
            mask = self._seen[seen[0] : seen[-1] + 1][None]
        else:
            mask = self._seen.index_select(0, self._tensor(seen)).view(len(chunks), -1, TILE)
        return Product(
            num_chunks=len(chunks),
            num_queries=chunks[0].num_queries,
            num_shared=num_shared,
            steps=steps,
            owner=self._tensor(owner),
            last=self._tensor(last),
            mask=mask,
            rows=self._tensor(rows),
        )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
