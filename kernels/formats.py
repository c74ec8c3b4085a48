"""How the weights of a model file are stored: numbers, or blocks of quantised ones.

Owns: the names, in the order of native/kernels.h, and the sizes of blocks.  Does not know: files,
products, or how a block is read; native/formats.c has that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch


class BlockShape(NamedTuple):
    """A block as a GGUF file has it.

    inputs      numbers of a row that it holds
    num_bytes   that it takes
    half_bytes  where in it the float16 numbers are by which all of it is scaled
    """

    inputs: int
    num_bytes: int
    half_bytes: tuple[int, ...]


BLOCKS: Final = {
    "Q4_0": BlockShape(32, 18, (0,)),
    "Q4_1": BlockShape(32, 20, (0, 2)),
    "Q5_0": BlockShape(32, 22, (0,)),
    "Q5_1": BlockShape(32, 24, (0, 2)),
    "Q8_0": BlockShape(32, 34, (0,)),
    "Q4_K": BlockShape(256, 144, (0, 2)),
    "Q5_K": BlockShape(256, 176, (0, 2)),
    "Q6_K": BlockShape(256, 210, (208,)),
}
"""Quantised formats that the kernels in C compute with.  Source: ggml's block types."""

DENSE: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

FORMATS: Final = (*DENSE.values(), *BLOCKS)
"""All formats; the place in this list is the number that the C code takes."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedWeight:
    """A weight [N, K] as a GGUF file stores it.

    raw     [N, bytes of a row] uint8, row by row, blocks in order; may be a view of a mapped file
    format  one of `BLOCKS`
    shape   (N, K)

    Raises ValueError where the format is unknown, K is no multiple of a block, or `raw` is not of
    that size.
    """

    raw: torch.Tensor
    format: str
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        block = BLOCKS.get(self.format)
        if block is None:
            raise ValueError(f"format is {self.format!r}: choose one of {', '.join(BLOCKS)}")
        outputs, inputs = self.shape
        if inputs % block.inputs:
            raise ValueError(
                f"rows of {inputs} numbers are no multiple of {self.format}'s {block.inputs}"
            )
        expected = (outputs, inputs // block.inputs * block.num_bytes)
        if tuple(self.raw.shape) != expected or self.raw.dtype != torch.uint8:
            raise ValueError(
                f"raw is {self.raw.dtype} {list(self.raw.shape)}, expected uint8 {list(expected)}"
            )

    def has_finite_scales(self) -> bool:
        """Whether no scale or minimum is infinite or a NaN.  Cost: a look at each block."""
        block = BLOCKS[self.format]
        blocks = self.raw.reshape(-1, block.num_bytes)
        for at in block.half_bytes:
            high = blocks[:, at + 1]  # the sign, five bits of exponent, two of the fraction
            if bool(((high & 0x7C) == 0x7C).any()):
                return False
        return True
