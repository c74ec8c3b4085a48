"""What this machine can do at most: the floors that benchmarks compare with.

Owns: measuring matmul FLOP/s and read bandwidth, and the least work of a model's steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch

from runtime.models.config import ModelConfig


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Measured with torch's present number of threads."""

    num_threads: int
    matmul_flop_s: float
    read_bytes_s: float


def median_seconds(function: Callable[[], object], *, runs: int = 7) -> float:
    """Return the median duration of a call, after one call to warm up."""
    function()
    durations = []
    for _ in range(runs):
        began = time.perf_counter()
        function()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def measure_limits(dtype: torch.dtype) -> Limits:
    """Measure the machine; about a second.

    FLOP/s on a 512 × 2048 × 2048 product; bandwidth on a sum over 256 MB, far beyond the caches.
    """
    x, w = (torch.randn(n, 2048).to(dtype) for n in (512, 2048))
    product = median_seconds(lambda: torch.nn.functional.linear(x, w))
    big = torch.ones(64 << 20, dtype=torch.float32)
    return Limits(
        num_threads=torch.get_num_threads(),
        matmul_flop_s=2 * 512 * 2048 * 2048 / product,
        read_bytes_s=big.numel() * 4 / median_seconds(big.sum),
    )


def linear_weights(config: ModelConfig) -> int:
    """Return how many numbers the matrices of all layers hold, the vocabulary's not counted."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    ffn = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + ffn)


def extend_flop(config: ModelConfig, *, prefix: int, new: int) -> float:
    """Return the least floating-point operations to compute `new` tokens behind a prefix."""
    pairs = new * prefix + new * (new + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    head = 2 * config.hidden_size * config.vocab_size
    return 2 * linear_weights(config) * new + attention + head


def decode_bytes(config: ModelConfig, *, contexts: list[int], dtype_bytes: int) -> float:
    """Return the least bytes that one decode step reads: all weights once, each sequence's K/V."""
    weights = linear_weights(config) + config.hidden_size * config.vocab_size
    return weights * dtype_bytes + sum(contexts) * config.kv_bytes_per_token(dtype_bytes)
