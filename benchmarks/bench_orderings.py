"""Hit rate of each ordering on real workloads, through the real scheduler and cache.

    .venv/bin/python benchmarks/bench_orderings.py --data FOLDER [--model] [--out FILE]

The scheduler and the cache are the engine's own; a stand-in for the model answers what the trace
says (`--model` runs the real one instead, on a part of each trace).  Requests come as fast as the
queue takes them, so there is always something to choose from.  The pool holds a share of what a
cache without bounds would hold in the end.  The limit beside the hit rates is that of such a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does; before torch

import numpy as np
from core_traces import TRACES, read_trace

from radixcache import CacheConfig, RadixCache, pack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.llm import LLM
from runtime.plan import StepPlan, StepResult
from runtime.request import Request, SamplingParams

BLOCK_SIZE = 16
ORDERINGS = ("fcfs", "longest_prefix", "depth_first")
LIMITS = {"max_step_tokens": 2048, "max_running": 32, "max_waiting": 128}


class Answers:
    """Stands for the model: draws the tokens that the trace holds."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.prompt_len: dict[str, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the next token of each answer."""
        return StepResult(
            step=plan.step,
            token_ids=tuple(
                int(
                    self.answers[piece.request_id][
                        draw.position - self.prompt_len[piece.request_id]
                    ]
                )
                for piece in plan.slices
                for draw in piece.draws
            ),
        )


def play(engine: Engine, requests: Any, answers: Answers | None, *, most_tokens: int) -> None:
    """Serve all requests; the next one is submitted as soon as the queue takes it."""
    coming = deque(enumerate(requests))
    while coming or engine.has_work:
        while coming and not engine.is_full:
            number, (prompt, answer) = coming.popleft()
            name, ids = f"r{number}", prompt[: engine.config.max_len - 1]
            if not len(ids):
                continue
            count = min(len(answer), engine.config.max_len - len(ids), most_tokens)
            if answers is not None:
                answers.answers[name], answers.prompt_len[name] = answer, len(ids)
            sampling = SamplingParams(max_tokens=count, ignore_eos=True)
            engine.submit(
                Request(request_id=name, prompt=pack_tokens(ids.tolist()), sampling=sampling)
            )
        engine.step()
    engine.check()


def simulate(trace: Any, *, num_blocks: int, max_len: int, ordering: str) -> Any:
    answers = Answers()
    engine = Engine(
        RadixCache(CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)),
        EngineConfig(max_len=max_len, ordering=ordering, **LIMITS),
        answers,
        tokenizer=None,
        eos_ids=frozenset(),
        vocab_size=2**31 - 1,
        draw_seed=lambda: 0,
    )
    began = time.perf_counter()
    play(engine, trace, answers, most_tokens=256)
    return engine.stats(), time.perf_counter() - began


def run_model(trace: list[Any], *, num_blocks: int, max_len: int, ordering: str) -> Any:
    llm = LLM(
        dtype="float32",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_len=max_len,
        ordering=ordering,
        **LIMITS,
    )
    began = time.perf_counter()
    play(llm.runtime.engine, trace, None, most_tokens=4)
    return llm.stats(), time.perf_counter() - began


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    most = args.most or {True: 96, False: 1000}[args.model]
    trace = read_trace(name, args.data, tokens_per_hash=64, most=most)
    vocab_size = 49_000 if args.model else 2**31 - 1
    requests = [
        (np.asarray(p) % vocab_size, np.asarray(a if len(a) else [1]))
        for p, a in islice(trace, most)
    ]
    total = sum(len(prompt) for prompt, _ in requests)
    distinct = trace.distinct_tokens()
    longest = max(len(prompt) + min(len(answer), 256) for prompt, answer in requests)
    max_len = min(longest, 4096) + 1
    num_blocks = max(int(distinct * args.share), 2 * max_len) // BLOCK_SIZE + 1
    row: dict[str, Any] = {"trace": name, "requests": len(requests), "prompt_tokens": total}
    row["pool_tokens"] = num_blocks * BLOCK_SIZE
    for ordering in ORDERINGS:
        run = run_model if args.model else simulate
        stats, seconds = run(requests, num_blocks=num_blocks, max_len=max_len, ordering=ordering)
        row[ordering] = {
            "hit_rate": round(stats.cached_tokens / stats.prompt_tokens, 4),
            "preemptions": stats.preemptions,
            "seconds": round(seconds, 2),
        }
    stats, _ = simulate(requests, num_blocks=2**17, max_len=max_len, ordering="depth_first")
    row["unbounded"] = round(stats.cached_tokens / stats.prompt_tokens, 4)
    return row


def main() -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the traces")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--share", type=float, default=0.1, help="of the distinct tokens")
    parser.add_argument("--most", type=int, default=0, help="requests of each trace")
    parser.add_argument("--model", action="store_true", help="run the real model")
    parser.add_argument("--out", type=Path, default=Path("results/orderings.json"))
    args = parser.parse_args()
    print("| trace | pool, tokens | fcfs | longest prefix | depth first | no bound |")
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for name in args.traces.split(","):
        row = measure(name, args)
        rows.append(row)
        rates = " | ".join(f"{row[o]['hit_rate']:.1%}" for o in ORDERINGS)
        print(f"| {name} | {row['pool_tokens']:,} | {rates} | {row['unbounded']:.1%} |", flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "limits": LIMITS, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result | {"model": args.model, "share": args.share}, indent=1))


if __name__ == "__main__":
    main()
