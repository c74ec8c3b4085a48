"""Blocks that leave the device, and come back: bytes under a seal.

Owns: the copy in host memory, its checksums, and refusing what is not what was asked for.  Does not
know: where the bytes go (another tier, a file, a network), or who decides that they do.
Idea: a block that comes back is believed only if its bytes are those that left, in this layout, and
its seal is the very one that is wanted: namespace and epoch, position, and all tokens before.
Everything is checked before the first byte is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import msgspec
import torch

from kernels import gather_blocks, scatter_blocks
from radixcache.seal import Seal
from runtime.errors import BlockRefused
from runtime.kv.store import KVStore


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of a block are to be read: [2, layers, block_size, kv heads, dim]."""

    dtype: str
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    byte_order: str = sys.byteorder


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks in host memory.

    kv         [C, 2, layers, block_size, kv heads, head dim], contiguous; a block is one piece
    seals      C, what each of them is
    checksums  C, each over its seal, the layout and its bytes
    """

    layout: BlockLayout
    kv: torch.Tensor
    seals: tuple[Seal, ...]
    checksums: tuple[int, ...]


def layout_of(store: KVStore) -> BlockLayout:
    """Return the layout of a store's blocks."""
    num_layers, _, _, block_size, num_kv_heads, head_dim = store.pool.shape
    return BlockLayout(
        dtype=str(store.pool.dtype).removeprefix("torch."),
        num_layers=num_layers,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def export_blocks(store: KVStore, block_ids: Sequence[int], seals: Sequence[Seal]) -> StagedBlocks:
    """Copy blocks to the host, under their seals.

    block_ids, seals  as `radixcache.seal.tree_seals` or `seals_of` has them

    Cost: one pass over the blocks on the device, one over the link, and the checksums.
    """
    layout = layout_of(store)
    device = store.pool.device
    shape = (len(block_ids), 2, layout.num_layers, *store.pool.shape[3:])
    staging = torch.empty(shape, dtype=store.pool.dtype, device=device)
    ids = torch.tensor(list(block_ids), dtype=torch.int64, device=device)
    gather_blocks(store.pool[:, 0], store.pool[:, 1], ids, staging)
    kv = staging.cpu()
    checksums = [_checksum(seal, layout, block) for seal, block in zip(seals, kv, strict=True)]
    return StagedBlocks(layout, kv, tuple(seals), tuple(checksums))


def import_blocks(
    store: KVStore, staged: StagedBlocks, block_ids: Sequence[int], wanted: Sequence[Seal]
) -> None:
    """Copy blocks back into a store, all or none.

    block_ids  where they go, distinct, and read by nobody yet
    wanted     the seals that these places ask for, in the order of `staged`

    Raises BlockRefused that names the block and what is wrong with it; nothing is written then.
    """
    layout = layout_of(store)
    asked, came = len(wanted), (len(staged.seals), len(staged.checksums), len(staged.kv))
    if set(came) != {asked} or len(block_ids) != asked:  # one without a seal would go unchecked
        raise BlockRefused(
            f"{asked} blocks are wanted for {len(block_ids)} places, but {came[0]} seals, "
            f"{came[1]} checksums and {came[2]} blocks came: compute them again"
        )
    if staged.layout != layout:
        names = [n for n in layout.__struct_fields__ if _field(staged, n) != getattr(layout, n)]
        raise BlockRefused(
            f"the blocks have another layout than this store: {', '.join(names)} differ; "
            "compute them again"
        )
    for place, (seal, want) in enumerate(zip(staged.seals, wanted, strict=True)):
        if staged.checksums[place] != _checksum(seal, layout, staged.kv[place]):
            raise BlockRefused(
                f"block {place} of {len(wanted)} is damaged: its checksum does not agree; "
                "compute it again"
            )
        if seal != want:
            names = [n for n in want.__struct_fields__ if getattr(seal, n) != getattr(want, n)]
            raise BlockRefused(
                f"block {place} of {len(wanted)} is another than is wanted at position "
                f"{want.start}: {', '.join(names)} differ; compute it again"
            )
    device = store.pool.device
    ids = torch.tensor(list(block_ids), dtype=torch.int64, device=device)
    scatter_blocks(staged.kv.to(device), store.pool[:, 0], store.pool[:, 1], ids)


def _field(staged: StagedBlocks, name: str) -> object:
    return getattr(staged.layout, name)


def _checksum(seal: Seal, layout: BlockLayout, block: torch.Tensor) -> int:
    """CRC-32: found 2 to 4 times as fast as SHA-256 and BLAKE2b, and bytes get lost, not forged."""
    label = msgspec.msgpack.encode((seal, layout))
    return crc32(block.contiguous().view(torch.uint8).numpy().data, crc32(label))
