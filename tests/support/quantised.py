"""Random quantised weights, as a GGUF file stores them, and what they mean.

Owns: blocks whose scales are small and finite.  Does not know: how the project reads them.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from kernels.formats import BLOCKS, QuantisedWeight


def random_quantised(name: str, outputs: int, inputs: int, *, seed: int = 0) -> QuantisedWeight:
    """Return a weight of random blocks; its numbers are near 0.1."""
    draw, block = np.random.default_rng(seed), BLOCKS[name]
    count = outputs * inputs // block.inputs
    raw = draw.integers(0, 256, (count, block.num_bytes), dtype=np.uint8)
    size = 0.1 if block.inputs == 32 else 0.004  # of what super-blocks multiply by up to 63
    for at in block.half_bytes:
        halves = draw.normal(0, size / 8, count).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return QuantisedWeight(torch.from_numpy(raw.reshape(outputs, -1)), name, (outputs, inputs))


def meaning(weight: QuantisedWeight) -> torch.Tensor:
    """Return the float32 numbers that the `gguf` package reads from it."""
    kind = gguf.GGMLQuantizationType[weight.format]
    return torch.from_numpy(dequantize(weight.raw.numpy(), kind).reshape(weight.shape).copy())
