"""The memory behind block ids: paged K and V of every layer.

Owns: the tensor and its layout.  Does not know: tokens, leases, who uses which block.

    pool  [layers, 2 (K, V), num_blocks, block_size, kv heads, head dim]
"""

from __future__ import annotations

import torch

from kernels import copy_blocks
from radixcache.lease import BlockCopy
from runtime.errors import InvalidSetting
from runtime.models.config import ModelConfig
from runtime.plan import Difference, Ids

_WORDS = {2: torch.int16, 4: torch.int32}  # integers as wide as the numbers


class KVStore:
    """K and V of `num_blocks` blocks, for all layers in one tensor.

    Memory is touched only as blocks are first written, so an unused pool costs little.
    Raises InvalidSetting where the device has not that much.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (
            config.num_layers,
            2,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        self.block_size = block_size
        try:
            self.pool = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidSetting(
                f"{num_blocks} blocks of K/V can't be had on {device}: give less K/V memory or "
                f"fewer blocks ({reason})"
            ) from None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pool.numel() * self.pool.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer, each [num_blocks, block_size, kv heads, head dim]."""
        return self.pool[index, 0], self.pool[index, 1]

    def copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Carry out block copies in order, all layers at once."""
        batch: list[BlockCopy] = []
        touched: set[int] = set()
        for copy in copies:
            if copy.src in touched or copy.dst in touched:  # order matters: finish those before
                self._copy_batch(batch)
                batch, touched = [], set()
            batch.append(copy)
            touched |= {copy.src, copy.dst}
        self._copy_batch(batch)

    def first_difference(self, ours: Ids, theirs: Ids, num_tokens: int) -> Difference | None:
        """Compare the first `num_tokens` slots of two runs of blocks, bit by bit.

        returns  the first block that differs, and the first layer in which it does; None: none

        Bits, not numbers: NaN is like itself, and -0 unlike 0.  Reads both runs once.
        """
        size = self.block_size
        words = self.pool.view(_WORDS[self.pool.element_size()])
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            count = min(size, num_tokens - place * size)
            unlike = words[:, :, a, :count] != words[:, :, b, :count]
            layers = unlike.flatten(1).any(1).nonzero()
            if len(layers):
                return Difference(block=place, layer=int(layers[0]))
        return None

    def _copy_batch(self, batch: list[BlockCopy]) -> None:
        if not batch:
            return
        device = self.pool.device
        src, dst, num_slots = (
            torch.tensor(column, device=device)
            for column in zip(*((c.src, c.dst, c.num_tokens) for c in batch), strict=True)
        )
        copy_blocks(self.pool[:, 0], self.pool[:, 1], src, dst, num_slots)
