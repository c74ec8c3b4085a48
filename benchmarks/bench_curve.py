"""The live curve: its error against full simulation on every trace, and what it costs an engine.

    .venv/bin/python benchmarks/bench_curve.py --data FOLDER [--model] [--out FILE]

Error: in points of hit rate, over sizes √2 apart from the longest request to all the blocks,
for several seeds of the sample; as sampled, and moved to the hits that a cache of a tenth of the
blocks counts itself.  Cost: the time in the curve as a share of the engine's steps, with the real
model (`--model`) on solved examples in front of questions, and for one long prompt by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does; before torch

import numpy as np
from core_traces import made_up, read_trace
from sim_traces import traces

from radixcache.curve import LiveCurve
from radixcache.lease import Lease
from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.sim import Trace, lru_curve
from radixcache.tokens import pack_tokens
from runtime.curves import LiveCurves
from runtime.llm import LLM
from runtime.request import Request, SamplingParams

SEEDS = range(6)
SAMPLES = (1024, 8192)


class Timed(LiveCurves):
    """Live curves that know how long they took."""

    seconds = 0.0

    def look_up(self, namespace: Namespace, tokens: bytes, *, found: int) -> None:
        """Note a prompt."""
        began = time.perf_counter()
        super().look_up(namespace, tokens, found=found)
        self.seconds += time.perf_counter() - began

    def touch(self, lease: Lease) -> None:
        """Note a sequence's end."""
        began = time.perf_counter()
        super().touch(lease)
        self.seconds += time.perf_counter() - began


def errors(trace: Trace, max_samples: int) -> dict[str, float]:
    """Mean and largest error over sizes and seeds, in points."""
    exact = lru_curve(trace)
    powers = range(2, 2 * trace.num_distinct.bit_length())
    sizes = [size for p in powers if (size := round(2 ** (p / 2))) >= trace.longest]
    anchor = max(trace.longest, trace.num_distinct // 10)
    sampled, anchored, share = [], [], 0.0
    for seed in SEEDS:
        live = LiveCurve(block_size=1, max_samples=max_samples, seed=seed)
        for request in trace.requests:
            live.look_up(DEFAULT_NAMESPACE, request.prompt.tobytes(), found_blocks=0)
            if request.answer:
                live.touch(DEFAULT_NAMESPACE, (request.prompt + request.answer).tobytes())
        estimate, share = live.estimate(), live.sampled_share
        moved = type(estimate)(
            estimate.references,
            estimate.tokens_per_s,
            float(exact.hits(anchor)),
            estimate.hits_below,
        ).anchored(anchor)
        for size in sizes:
            sampled.append(100 * abs(estimate.hit_rate(size) - exact.hit_rate(size)))
            anchored.append(100 * abs(moved.hit_rate(size) - exact.hit_rate(size)))
    return {
        "sampled_share": share,
        "mean": statistics.mean(sampled),
        "max": max(sampled),
        "anchored_mean": statistics.mean(anchored),
        "anchored_max": max(anchored),
    }


def cost_of_a_prompt(num_tokens: int, *, runs: int = 200) -> dict[str, float]:
    """Microseconds to note a prompt of 16-token blocks, once the sample is full."""
    live = LiveCurve(block_size=16, seed=1)
    for number in range(200):
        live.look_up(DEFAULT_NAMESPACE, made_up(number, 8192).tobytes())
    prompts = [made_up(1000 + n % 20, num_tokens).tobytes() for n in range(runs)]
    took = []
    for prompt in prompts:
        began = time.perf_counter()
        live.look_up(DEFAULT_NAMESPACE, prompt)
        took.append(1e6 * (time.perf_counter() - began))
    return {"median_us": statistics.median(took), "sampled_share": live.sampled_share}


def cost_in_an_engine(folder: str, *, most: int) -> dict[str, float]:
    """Share of the engine's time that the curves take, with the real model."""
    llm = LLM(dtype="float32", num_blocks=1024, max_len=2048, num_threads=1)
    engine = llm.runtime.engine
    curves = Timed(block_size=16, clock=time.monotonic, seed=1)
    engine.scheduler.admission.curves = curves
    began = time.perf_counter()
    for number, (prompt, _) in enumerate(
        read_trace("gsm8k", folder, tokens_per_hash=512, most=most)
    ):
        ids = pack_tokens((np.asarray(prompt)[-1500:] % 49_000).tolist())
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        engine.submit(Request(request_id=f"r{number}", prompt=ids, sampling=sampling))
        while engine.is_full or len(engine.scheduler.waiting) > 8:
            engine.step()
    while engine.has_work:
        engine.step()
    took = time.perf_counter() - began
    stats = engine.stats()
    return {
        "requests": most,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "engine_s": took,
        "curve_s": curves.seconds,
        "share_percent": 100 * curves.seconds / took,
    }


def main() -> None:
    """Run, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the traces")
    parser.add_argument("--model", action="store_true", help="measure the cost in a real engine")
    parser.add_argument("--most", type=int, default=48, help="requests of that engine")
    parser.add_argument("--out", type=Path, default=Path("results/curve.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d")}
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    result["prompt_cost"] = {n: cost_of_a_prompt(n) for n in (1024, 8192, 131_072)}
    for num_tokens, cost in result["prompt_cost"].items():
        print(f"a prompt of {num_tokens:,} tokens: {cost['median_us']:.0f} µs", flush=True)
    if args.model:
        result["engine"] = cost_in_an_engine(args.data, most=args.most)
        print(f"engine: {result['engine']}", flush=True)
    result["errors"] = []
    print("| trace | samples | of all | mean | max | mean, moved | max, moved |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for trace, _ in traces(args.data):
        for max_samples in SAMPLES:
            row = errors(trace, max_samples)
            result["errors"].append({"trace": trace.title, "samples": max_samples} | row)
            numbers = " | ".join(f"{v:.2f}" for k, v in row.items() if k != "sampled_share")
            share = f"{row['sampled_share']:.1%}"
            print(f"| {trace.title} | {max_samples:,} | {share} | {numbers} |", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
