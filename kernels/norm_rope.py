"""The row-wise ops around the products: RMS norm, rotary positions, gated SiLU.

Owns: their arithmetic, in float32, a row at a time.  Does not know: layers, caches, batches.
Idea: nothing here mixes rows, so no batch can change a row's bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Scale each row to a root mean square of 1, then by `weight`.

    x        [T, D]
    weight   [D]
    returns  [T, D] in x.dtype; computed in float32

    Source: Zhang and Sennrich 2019.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotary_table(inv_freq: torch.Tensor, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tabulate cosine and sine of every position.

    inv_freq  [D/2] radians a position
    returns   cos, sin, each [max_len, D/2] float32
    """
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * inv_freq.double()[None, :]
    return angles.cos().float(), angles.sin().float()


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + D/2) of each head by its position's angles.

    x         [T, H, D], D even
    cos, sin  [T, D/2] float32, the table's rows at each token's position
    returns   [T, H, D] in x.dtype; computed in float32

    Source: Su et al. 2021, with the halves split as in the Llama weights on Hugging Face.
    """
    half = x.shape[-1] // 2
    left, right = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU of the first half of each row with the second half.

    gate_up  [T, 2·F]
    returns  [T, F]
    Source: Shazeer 2020 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up
