"""Time to first token, cold and warm, and tokens per second beside this machine's floors.

    .venv/bin/python benchmarks/bench_serving.py [--dtype float32] [--runs 5] [--batches 1,8,32]
                                                 [--out FILE]

Cold: a prompt of 1,560 tokens that nothing shares.  Warm: the same length, of which the first
1,500 were computed for an earlier request.  Cold and warm runs alternate.  The floor of a prefill
is its FLOPs at the measured matmul speed, that of a decode step its bytes at the measured read
bandwidth; see limits.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does; before torch

import torch
from limits import (
    BATCHES,
    NEW,
    PREFIX,
    Limits,
    decode_floor_s,
    extend_floor_s,
    kv_copy_floor_s,
    measure_limits,
)

from runtime.config import DEFAULT_MODEL
from runtime.llm import LLM
from runtime.request import SamplingParams


def main() -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="decoded together")
    parser.add_argument("--out", type=Path, default=Path("results/serving.json"))
    args = parser.parse_args()
    llm = LLM(
        args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        max_step_tokens=2048,
        kv_memory_bytes=4 << 30,
    )
    limits = measure_limits(getattr(torch, args.dtype))
    result = {
        "model": args.model,
        "dtype": args.dtype,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {limits.num_threads} threads",
        "torch": torch.__version__,
        "matmul_gflop_s": round(limits.matmul_flop_s / 1e9, 1),
        "read_gb_s": round(limits.read_bytes_s / 1e9, 1),
        "copy_gb_s": round(limits.copy_bytes_s / 1e9, 1),
        "first_token": first_token(llm, limits, runs=args.runs),
        "decode": [decode(llm, int(batch), limits) for batch in args.batches.split(",")],
        "kv_copy_floor_ms": round(kv_copy_ms(llm, limits), 2),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return token ids that no other call returns."""
    return [rng.randrange(100, 49_000) for _ in range(count)]


def width_of(llm: LLM) -> int:
    """Return the bytes of a number of the weights and of K/V."""
    dtype: torch.dtype = getattr(torch, llm.runtime.memory.dtype)
    return dtype.itemsize


def kv_copy_ms(llm: LLM, limits: Limits) -> float:
    """Return the least time to copy the K/V of the context."""
    config = llm.runtime.model_config
    width = width_of(llm)
    return 1e3 * kv_copy_floor_s(config, limits, num_tokens=PREFIX, dtype_bytes=width)


def first_token(llm: LLM, limits: Limits, *, runs: int) -> dict[str, Any]:
    """Measure the time from submission to the first token, cold and warm."""
    rng = random.Random(1)
    once = SamplingParams(max_tokens=1, ignore_eos=True)
    shared = random_ids(rng, PREFIX)
    llm.generate([shared + random_ids(rng, NEW)], once)  # computes the prefix; warms up
    cold, warm = [], []
    for _ in range(runs):
        for times, prefix in ((cold, random_ids(rng, PREFIX)), (warm, shared)):
            prompt = prefix + random_ids(rng, NEW)
            began = time.perf_counter()
            (done,) = llm.generate([prompt], once)
            times.append(time.perf_counter() - began)
            expected = 0 if times is cold else PREFIX
            assert done.usage.cached_tokens == expected, done.usage
    config = llm.runtime.model_config
    floors = {
        "cold": extend_floor_s(config, limits, prefix=0, new=PREFIX + NEW),
        "warm": extend_floor_s(config, limits, prefix=PREFIX, new=NEW),
    }
    table: dict[str, Any] = {"warm_speedup": statistics.median(cold) / statistics.median(warm)}
    for name, times in (("cold", cold), ("warm", warm)):
        median = statistics.median(times)
        table[name] = {
            "median_ms": round(median * 1e3, 1),
            "min_ms": round(min(times) * 1e3, 1),
            "max_ms": round(max(times) * 1e3, 1),
            "floor_ms": round(floors[name] * 1e3, 1),
            "times_floor": round(median / floors[name], 2),
        }
    table["warm_speedup"] = round(table["warm_speedup"], 1)
    return table


def decode(llm: LLM, batch: int, limits: Limits) -> dict[str, Any]:
    """Measure decode steps of `batch` sequences behind contexts of 1,500 tokens of their own."""
    rng = random.Random(batch)
    steps = 16
    prompts = [random_ids(rng, PREFIX) for _ in range(batch)]
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
    stamps: list[float] = []
    seen = {"tokens": 0}

    def news(output: Any) -> None:
        if output.token_ids and output.usage.completion_tokens > 1:
            seen["tokens"] += 1
            if seen["tokens"] % batch == 0:
                stamps.append(time.perf_counter())

    llm.generate(
        [[*prompt, 7] for prompt in prompts], SamplingParams(max_tokens=1, ignore_eos=True)
    )
    llm.generate([[*prompt, 7] for prompt in prompts], sampling, on_news=news)
    step_s = statistics.median(b - a for a, b in pairwise(stamps))
    floor = decode_floor_s(
        llm.runtime.model_config,
        limits,
        contexts=[PREFIX] * batch,
        dtype_bytes=width_of(llm),
    )
    return {
        "batch": batch,
        "step_ms": round(step_s * 1e3, 1),
        "tokens_per_s": round(batch / step_s, 1),
        "floor_ms": round(floor * 1e3, 1),
        "floor_tokens_per_s": round(batch / floor, 1),
        "times_floor": round(step_s / floor, 2),
    }


if __name__ == "__main__":
    main()
