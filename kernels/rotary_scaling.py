"""Rotary frequencies for contexts longer than a model was trained on.

Owns: the formulae.  Does not know: configurations, files, the tables' use.
Idea: scaling is a function from frequencies to frequencies, done once in float64; the kernels see
the finished table.
"""

from __future__ import annotations

import math

import torch


def rotary_frequencies(head_dim: int, *, theta: float) -> torch.Tensor:
    """Return the angle that each pair turns per position, in radians: [D/2] float64.

    >>> rotary_frequencies(4, theta=100.0)
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def scale_linear(inv_freq: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Stretch every wave `factor` times.  Source: Chen et al. 2023 (position interpolation)."""
    return inv_freq / factor


def scale_llama3(
    inv_freq: torch.Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_len: int,
) -> torch.Tensor:
    """Slow down waves longer than the trained context, keep short ones, blend between.

    low_freq_factor, high_freq_factor  turns in the trained context: below the first a wave is
                                       stretched `factor` times, above the second it is kept
    Source: Llama 3.1 model card.
    """
    turns = original_max_len * inv_freq / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / factor)


def scale_yarn(
    inv_freq: torch.Tensor,
    *,
    factor: float,
    theta: float,
    original_max_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> torch.Tensor:
    """Stretch waves by how often they turn in the trained context, blended by the pair's number.

    beta_fast, beta_slow  turns at and above which a wave is kept, and at and below which it is
                          stretched `factor` times; pairs between are blended linearly

    The table also takes `magnitude=yarn_magnitude(factor)`.  Source: Peng et al. 2023 (YaRN).
    """
    num_pairs = len(inv_freq)

    def pair_that_turns(turns: float) -> float:
        """Say which pair turns so often in the trained context; between two, mostly."""
        return num_pairs * math.log(original_max_len / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(pair_that_turns(beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(beta_slow)), 2 * num_pairs - 1)
    pair = torch.arange(num_pairs, dtype=torch.float64)
    stretch = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
    return inv_freq / factor * stretch + inv_freq * (1 - stretch)


def yarn_magnitude(factor: float) -> float:
    """Return the factor on cosine and sine that keeps the scores' spread.

    >>> round(yarn_magnitude(4.0), 4)
    1.1386
    """
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
