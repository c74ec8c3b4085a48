"""Rotary frequencies, scaled as a model asks.

Owns: which scaling a model's configuration means.  Does not know: the formulae, which the kernels
have; tensors of a model.
"""

from __future__ import annotations

import torch

from kernels.rotary_scaling import rotary_frequencies, scale_linear, scale_llama3
from runtime.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the angle that each pair turns per position, in radians.

    returns  [head_dim / 2] float64
    """
    freq = rotary_frequencies(config.head_dim, theta=config.rope_theta)
    if config.rope_freq_factors is not None:
        freq = freq / torch.tensor(config.rope_freq_factors, dtype=torch.float64)
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return scale_linear(freq, factor=scaling.factor)
    return scale_llama3(
        freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_len=scaling.original_max_len,
    )
