"""What bench_core.py measures over long runs: memory a node, memory over time, a trace.

Owns: how memory is read.  Does not know: which cache it is, but for the soak, which is ours alone.
"""

from __future__ import annotations

import ctypes
import gc
import gzip
import json
import random
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from core_ours import Ours
from core_workloads import VOCABULARY, Leaves, serve, token_ids

now = time.perf_counter


class Memory:
    """Bytes a cached node costs, everything counted that building and filling a cache takes."""

    def __init__(self, cache: Any, *, block_size: int, leaves: int) -> None:
        self.result: dict[str, float] = {}
        cache.build(block_size, 16)  # imports
        if cache.name.startswith(Ours.name):
            tracemalloc.start()
            Leaves(cache, block_size=block_size, leaves=leaves)
            gc.collect()
            traced = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            self.result["traced_beside_tokens_bytes"] = traced / leaves - block_size * 4
            cache.build(block_size, 16)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = memory_bytes("VmRSS")
        Leaves(cache, block_size=block_size, leaves=leaves)
        gc.collect()
        self.result["bytes"] = (memory_bytes("VmRSS") - before) / leaves

    def sample(self) -> dict[str, float]:
        return self.result


def memory_bytes(field: str) -> int:
    """Return a size that the kernel keeps of this process, such as VmRSS."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


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


class Trace:
    """Requests of a trace, prompts only, in a pool of `num_blocks` times 512 tokens."""

    def __init__(self, cache: Any, *, path: str, block_size: int, num_blocks: int) -> None:
        with gzip.open(path, "rt") as lines:
            requests = [json.loads(line) for line in lines]
        self.prompts = [(r["hash_ids"], r["input_length"]) for r in requests]
        self.cache, self.block_size, self.num_blocks = cache, block_size, num_blocks

    def sample(self) -> dict[str, float]:
        cache, offsets = self.cache, np.arange(512, dtype=np.int32)
        cache.build(self.block_size, 16)  # lets go of the one before, or two would be counted
        gc.collect()
        cache.build(self.block_size, self.num_blocks * 512 // self.block_size)
        took: list[float] = []
        for hashes, length in self.prompts:
            ids = (np.array(hashes, np.int32)[:, None] * 512 + offsets).reshape(-1)[:length]
            run = cache.run_of(ids)
            began = now()
            serve(cache, run)
            took.append(now() - began)
        return {
            "us": statistics.fmean(took) * 1e6,
            "requests_per_s": len(took) / sum(took),
            "peak_bytes": memory_bytes("VmHWM"),
        }
