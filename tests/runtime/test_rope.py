"""Rotary frequencies against formulae written out."""

from __future__ import annotations

import math

import pytest
import torch

from runtime.models.config import RopeScaling
from runtime.models.rope import inverse_frequencies
from tests.support.tiny_models import tiny_config


def llama3_reference(freq: float, scaling: RopeScaling) -> float:
    """As Meta and transformers write it: three cases by wave length."""
    low_wave = scaling.original_max_len / scaling.low_freq_factor
    high_wave = scaling.original_max_len / scaling.high_freq_factor
    wave = 2 * math.pi / freq
    if wave < high_wave:
        return freq
    if wave > low_wave:
        return freq / scaling.factor
    smooth = (scaling.original_max_len / wave - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def plain(head_dim: int, theta: float) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def test_plain_frequencies_are_powers_of_theta():
    freq = inverse_frequencies(tiny_config(head_dim=16, rope_theta=10_000.0))
    assert freq.dtype == torch.float64
    assert freq.tolist() == pytest.approx(plain(16, 10_000.0), rel=1e-14)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        # Llama 3.1, Llama 3.2, and one whose middle band holds most waves
        (500_000.0, RopeScaling(kind="llama3", factor=8.0)),
        (500_000.0, RopeScaling(kind="llama3", factor=32.0)),
        (
            10_000.0,
            RopeScaling(
                kind="llama3",
                factor=4.0,
                low_freq_factor=0.5,
                high_freq_factor=300.0,
                original_max_len=2048,
            ),
        ),
    ],
    ids=["3.1", "3.2", "wide-band"],
)
def test_llama3_scaling_follows_the_three_cases(head_dim, theta, scaling):
    config = tiny_config(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling)
    expected = [llama3_reference(freq, scaling) for freq in plain(head_dim, theta)]
    assert inverse_frequencies(config).tolist() == pytest.approx(expected, rel=1e-12)
    unscaled = plain(head_dim, theta)
    assert expected[0] == unscaled[0]  # the fastest wave is kept, the slowest divided
    if scaling.low_freq_factor == 1.0:
        assert expected[-1] == pytest.approx(unscaled[-1] / scaling.factor)


def test_linear_scaling_divides_every_frequency():
    config = tiny_config(head_dim=16, rope_scaling=RopeScaling(kind="linear", factor=2.5))
    expected = [freq / 2.5 for freq in plain(16, config.rope_theta)]
    assert inverse_frequencies(config).tolist() == pytest.approx(expected, rel=1e-14)


def test_factors_of_a_file_divide_one_frequency_each():
    factors = tuple(1.0 + i for i in range(8))
    config = tiny_config(head_dim=16, rope_freq_factors=factors)
    pairs = zip(plain(16, config.rope_theta), factors, strict=True)
    expected = [freq / factor for freq, factor in pairs]
    assert inverse_frequencies(config).tolist() == pytest.approx(expected, rel=1e-14)
