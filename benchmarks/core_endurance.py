"""What bench_core.py measures over a long run: does memory grow?  Ours alone.

Owns: the random operations.  Does not know: how memory is read.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from typing import Any

import numpy as np
from core_replay import memory_bytes
from core_workloads import VOCABULARY, token_ids

now = time.perf_counter


class Soak:
    """Random operations in a pool of fixed size; what is allocated is counted when all is gone."""

    def __init__(self, cache: Any, *, operations: int) -> None:
        cache.build(16, 2048)
        self.cache, self.random, self.leases = cache.cache, random.Random(1), []
        self.key = cache.new_key
        self.namespace = cache.namespace
        self.prompts = [
            token_ids(np.random.default_rng(seed), 2000).tobytes() for seed in range(100)
        ]
        self.result = self.measure(operations)

    def measure(self, operations: int, checkpoints: int = 10) -> dict[str, Any]:
        blocks, resident, share = [], [], operations // checkpoints
        self.run(max(1000, share // 10))  # warm: numpy's and Python's own caches
        began = now()
        for _ in range(checkpoints):
            self.run(share)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            resident.append(memory_bytes("VmRSS"))
        return {
            "us": (now() - began) / operations * 1e6,
            "allocated_blocks": blocks,
            "resident_bytes": resident,
            "growth_bytes": resident[-1] - resident[0],
            "growth_blocks": blocks[-1] - blocks[0],
        }

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.step()
        while self.leases:
            self.cache.release(self.leases.pop())
        self.cache.evict(self.cache.config.num_blocks)
        self.cache.check()

    def step(self) -> None:
        choose, cache = self.random.random, self.cache
        kind = choose()
        if kind < 0.4 and len(self.leases) < 12:
            prompt = self.random.choice(self.prompts)[: 4 * int(choose() * 1500 + 1)]
            fresh = token_bytes(self.random, 8)
            self.leases.append(cache.acquire(self.key(self.namespace, prompt + fresh)))
        elif kind < 0.5 or not self.leases:
            cache.match(self.key(self.namespace, self.random.choice(self.prompts)))
        elif kind < 0.9:
            self.change(self.random.choice(self.leases), kind)
        else:
            cache.evict(int(choose() * 4))

    def change(self, lease: Any, kind: float) -> None:
        cache = self.cache
        if kind < 0.6 and lease.num_tokens < 1600:
            cache.append(lease, token_bytes(self.random, 1))
        elif kind < 0.75:
            cache.commit(lease, lease.num_tokens)
        elif kind < 0.77 and len(self.leases) < 12:
            self.leases.append(cache.fork(lease))
        elif kind < 0.8:
            cache.truncate(lease, self.random.randint(lease.num_committed, lease.num_tokens))
        else:
            self.leases.remove(lease)
            cache.release(lease)

    def sample(self) -> dict[str, Any]:
        return self.result


def token_bytes(source: random.Random, count: int) -> bytes:
    """Return `count` packed random ids."""
    return b"".join(source.randrange(VOCABULARY).to_bytes(4, "little") for _ in range(count))
