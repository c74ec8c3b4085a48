"""Rotary frequencies, scaled as a model asks.

Owns: the formulae.  Does not know: tensors of a model, kernels.
"""

from __future__ import annotations

import math

import torch

from runtime.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the angle that each pair turns per position, in radians.

    returns  [head_dim / 2] float64
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    freq = 1.0 / config.rope_theta**half
    if config.rope_freq_factors is not None:
        freq = freq / torch.tensor(config.rope_freq_factors, dtype=torch.float64)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    return _llama3(freq, scaling)


def _llama3(freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow down waves longer than the trained context, keep short ones, blend between.

    Source: Llama 3.1 model card.
    """
    wavelengths_per_context = scaling.original_max_len * freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((wavelengths_per_context - low) / (high - low)).clamp(0, 1)
    return freq * (keep + (1 - keep) / scaling.factor)
