"""Random numbers that are a function of what they are for, the same on every device.

Owns: the generator.  Does not know: requests, sampling.
Idea: a counter-based generator has no state to keep or to lose.  The number of a token is computed
from (seed, position, token), so that a draw can be repeated anywhere, in any batch, at any time.
Source: Salmon et al. 2011 (Philox 4x32, ten rounds).
"""

from __future__ import annotations

from typing import Final

import torch

from kernels.backend import check_dense, check_tensor, choose_backend

ROUNDS: Final = 10
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WORD: Final = 0xFFFFFFFF
TO_UNIT: Final = 2.0**-24
"""The upper 24 bits of a word become a float32 in [0, 1) without rounding."""


def uniform_noise(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return one uniform number for each token of each row.

    seeds      [R] int64   of the request, any value
    positions  [R] int64   of the token that will be drawn, at least 0
    out        [R, V] float32, written and returned; allocated when None
    returns    [R, V] float32 in [0, 1): the same bits on every backend and device

    Cost: about 60 integer operations a number.
    """
    check_seeds(seeds, positions, seeds.shape[0], seeds.device)
    shape = (seeds.shape[0], vocab_size)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=seeds.device)
    check_tensor("out", out, shape, torch.float32, seeds.device)
    if choose_backend(seeds.device, backend) == "triton":
        if out.numel():
            from kernels._sample_triton import noise_triton  # optional: not on every platform

            noise_triton(seeds, positions, out)
        return out
    tokens = torch.arange(vocab_size, device=seeds.device)
    words = philox(
        (seeds & WORD, seeds >> 32 & WORD),
        (tokens, positions[:, None] & WORD, positions[:, None] >> 32 & WORD),
    )
    return out.copy_((words >> 8).float() * TO_UNIT)


def check_seeds(
    seeds: torch.Tensor, positions: torch.Tensor, num_rows: int, device: torch.device
) -> None:
    """Raise unless there is a seed and a position for each row."""
    check_dense("seeds", seeds, (num_rows,), torch.int64, device)
    check_dense("positions", positions, (num_rows,), torch.int64, device)


def philox(
    key: tuple[torch.Tensor, torch.Tensor],
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the first of the four words of Philox, as int64 in [0, 2**32).

    key      [R], [R]              two words a row
    counter  broadcast to [R, V]   the first three words; the fourth is 0
    """
    a, b, c = counter
    d = torch.zeros_like(a)
    first, second = (word[:, None] for word in key)
    for _ in range(ROUNDS):
        low_a, high_a = _product(a, MULTIPLIERS[0])
        low_c, high_c = _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + KEY_STEPS[0] & WORD, second + KEY_STEPS[1] & WORD
    return a


def _product(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower and the upper word of a 64-bit product; int64 has no room for its sign."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = (low >> 16) + (high & 0xFFFF)
    return (middle << 16 | low & 0xFFFF) & WORD, (high >> 16) + (middle >> 16)
