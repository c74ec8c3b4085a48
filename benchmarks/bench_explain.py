"""What explanations cost the engine's thread: a look-up, and the memory of evictions.

    .venv/bin/python benchmarks/bench_explain.py [--runs 5] [--out FILE]

Without a model: the cache alone, full, with blocks of 16.  The floor of a look-up is the match that
every request pays anyway; that of the memory is the same requests in a cache without it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from radixcache import CacheConfig, Namespace, PrefixKey, RadixCache, pack_tokens
from runtime.config import RuntimeConfig
from runtime.misses.finding import find_miss

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS = 4096, 16, 8192


def cache_of(max_ghosts: int) -> RadixCache:
    """Return an empty cache."""
    config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_ghosts=max_ghosts)
    return RadixCache(config, clock=time.monotonic)


def prompts(count: int) -> list[PrefixKey]:
    """Return prompts that have nothing in common."""
    rng = random.Random(1)  # reproducible
    return [
        PrefixKey(Namespace(), pack_tokens([rng.randrange(49_152) for _ in range(NUM_TOKENS)]))
        for _ in range(count)
    ]


def serve(cache: RadixCache, keys: list[PrefixKey]) -> float:
    """Serve prompts by a full cache, so that each evicts as much as it publishes; µs a block."""
    began = time.process_time()
    for key in keys:
        lease = cache.acquire(key)
        cache.commit(lease, key.num_tokens)
        cache.release(lease)
    return 1e6 * (time.process_time() - began) / (len(keys) * NUM_TOKENS // BLOCK_SIZE)


def spent(call: Callable[[], object]) -> float:
    """Return the time of a call, in µs: the best of twenty."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times)


def main() -> None:
    """Measure and print, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keys, default = prompts(48), RuntimeConfig().max_ghosts
    rows: dict[str, list[float]] = {}
    for _ in range(args.runs):
        for max_ghosts in (0, default):
            cache = cache_of(max_ghosts)
            serve(cache, keys[:16])  # fills it
            rows.setdefault(f"us_a_block_with_{max_ghosts}_ghosts", []).append(
                serve(cache, keys[16:])
            )
        half = NUM_TOKENS * 2
        mixed = PrefixKey(Namespace(), keys[-1].tokens[:half] + keys[-2].tokens[half:])
        for name, key in (("hit", keys[-1]), ("evicted", keys[0]), ("diverged", mixed)):
            look, explain = partial(cache.match, key), partial(find_miss, cache, key, now=0.0)
            rows.setdefault(f"us_match_{name}", []).append(spent(look))
            rows.setdefault(f"us_explain_{name}", []).append(spent(explain))
    report = {
        name: {
            "median": round(statistics.median(values), 2),
            "min": round(min(values), 2),
            "max": round(max(values), 2),
        }
        for name, values in rows.items()
    }
    whole = {"machine": platform.machine(), "tokens": NUM_TOKENS, "runs": args.runs} | report
    print(json.dumps(whole, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
