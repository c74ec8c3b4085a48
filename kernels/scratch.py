"""Working memory that an operation may keep between calls.

Owns: named buffers that only grow.  Does not know: what is kept in them.
Idea: fresh memory costs the operating system a page fault every few kilobytes, more than the
arithmetic it is used for; a caller that repeats an operation hands the same buffers back.
"""

from __future__ import annotations

import math

import torch


class Scratch:
    """Buffers of one dtype and device, for one thread.

    A buffer is valid until the next `take` of its name, and its contents are whatever was left in
    it.
    """

    __slots__ = ("_buffers", "_device", "_dtype")

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device = device
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the buffer `name` as a contiguous tensor of `shape`, growing it as needed."""
        numel = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=self._dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:numel].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers together."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
