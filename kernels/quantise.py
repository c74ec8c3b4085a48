"""Eight-bit keys and values: how a number is stored, and what its scale is.

Owns: the torch reference of the arithmetic.  Does not know: pools or slots.
Idea: value = stored * scale.  A scale is either given once for a head, or is chosen when a token is
stored so that the largest number of its head just fits.
"""

from __future__ import annotations

from typing import Final

import torch

from kernels.backend import QUANTISED_DTYPES

LEAST_SCALE: Final = 1e-12
"""A head of zeros gets this scale, so that nothing is divided by zero."""


def largest(dtype: torch.dtype) -> float:
    """Return the largest number that a quantised dtype stores; 0 for a dtype that is not one.

    >>> [largest(kind) for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)]
    [448.0, 57344.0, 127.0]
    >>> largest(torch.bfloat16)
    0.0
    """
    if dtype not in QUANTISED_DTYPES:
        return 0.0
    if dtype.is_floating_point:
        return float(torch.finfo(dtype).max)
    return float(torch.iinfo(dtype).max)


def choose_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of each head: its largest absolute value over the largest storable one.

    x        [..., D]
    returns  [...] float32
    """
    return (x.float().abs().amax(-1) / largest(dtype)).clamp_min(LEAST_SCALE)


def quantise(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide by the scale and round to the nearest storable number, ties to even; saturate.

    x        [..., D]
    scale    broadcasts to x, float32
    returns  [..., D] of `dtype`
    """
    most = largest(dtype)
    scaled = (x.float() / scale).clamp(-most, most)
    return scaled.to(dtype) if dtype.is_floating_point else scaled.round().to(dtype)
