"""What this machine can do at most: the floors that benchmarks compare with.

    .venv/bin/python benchmarks/limits.py [--dtype bfloat16] [--threads 2]

Owns: measuring matmul FLOP/s, read and copy bandwidth, and the least work of a model's steps.  Does
not know: how long a step takes.
Idea: a step takes at least as long as its operations at the best rate of a product, and at least as
long as its bytes at the best rate of a read; the floor is the longer of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from runtime.config import DEFAULT_MODEL
from runtime.models.config import ModelConfig
from runtime.weights.checkpoint import open_checkpoint

PREFIX, NEW = 1500, 60  # tokens of the context, and of a suffix behind it
BATCHES = (1, 8, 32)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Measured with torch's present number of threads.

    copy_bytes_s  bytes copied a second: each is read and written
    """

    num_threads: int
    matmul_flop_s: float
    read_bytes_s: float
    copy_bytes_s: float


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
    """Measure the machine; about two seconds.

    FLOP/s on a 512 × 2048 × 2048 product; bandwidth on a sum over 256 MB, far beyond the caches,
    and on a copy of them.
    """
    x, w = (torch.randn(n, 2048).to(dtype) for n in (512, 2048))
    product = median_seconds(lambda: torch.nn.functional.linear(x, w))
    big = torch.ones(64 << 20, dtype=torch.float32)
    other = torch.empty_like(big)
    return Limits(
        num_threads=torch.get_num_threads(),
        matmul_flop_s=2 * 512 * 2048 * 2048 / product,
        read_bytes_s=big.numel() * 4 / median_seconds(big.sum),
        copy_bytes_s=big.numel() * 4 / median_seconds(lambda: other.copy_(big)),
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


def extend_floor_s(config: ModelConfig, limits: Limits, *, prefix: int, new: int) -> float:
    """Return the least seconds to compute `new` tokens of one sequence behind a prefix."""
    return extend_flop(config, prefix=prefix, new=new) / limits.matmul_flop_s


def decode_floor_s(
    config: ModelConfig,
    limits: Limits,
    *,
    contexts: Sequence[int],
    dtype_bytes: int,
    shared: int = 0,
) -> float:
    """Return the least seconds of one decode step.

    contexts  tokens of each sequence, the new one not counted
    shared    tokens that all of them begin with: their K/V must be read only once
    """
    own = [context - shared for context in contexts]
    moved = decode_bytes(config, contexts=[shared, *own], dtype_bytes=dtype_bytes)
    flop = sum(extend_flop(config, prefix=context, new=1) for context in contexts)
    return max(moved / limits.read_bytes_s, flop / limits.matmul_flop_s)


def kv_copy_floor_s(
    config: ModelConfig, limits: Limits, *, num_tokens: int, dtype_bytes: int
) -> float:
    """Return the least seconds to copy the K/V of so many tokens to another place."""
    return num_tokens * config.kv_bytes_per_token(dtype_bytes) / limits.copy_bytes_s


def floors_ms(config: ModelConfig, limits: Limits, *, dtype_bytes: int) -> dict[str, float]:
    """Return the floors of the steps that docs/performance.md speaks of, in milliseconds."""
    behind = f"behind {PREFIX}"
    floors = {
        f"prefill {PREFIX + NEW}": extend_floor_s(config, limits, prefix=0, new=PREFIX + NEW),
        f"prefill {NEW} {behind}": extend_floor_s(config, limits, prefix=PREFIX, new=NEW),
    }
    for batch in BATCHES:
        contexts = [PREFIX] * batch
        for name, shared in ((behind, 0), (f"{behind} that all share", PREFIX)):
            floors[f"decode {batch} {name}"] = decode_floor_s(
                config, limits, contexts=contexts, dtype_bytes=dtype_bytes, shared=shared
            )
    floors[f"copy K/V of {PREFIX}"] = kv_copy_floor_s(
        config, limits, num_tokens=PREFIX, dtype_bytes=dtype_bytes
    )
    return {name: round(seconds * 1e3, 2) for name, seconds in floors.items()}


def main() -> None:
    """Measure the machine and print the floors of the default model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype: torch.dtype = getattr(torch, args.dtype)
    limits = measure_limits(dtype)
    config = open_checkpoint(args.model).config
    found = {
        "dtype": args.dtype,
        "threads": limits.num_threads,
        "matmul_gflop_s": round(limits.matmul_flop_s / 1e9, 1),
        "read_gb_s": round(limits.read_bytes_s / 1e9, 1),
        "copy_gb_s": round(limits.copy_bytes_s / 1e9, 1),
        "floors_ms": floors_ms(config, limits, dtype_bytes=dtype.itemsize),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
