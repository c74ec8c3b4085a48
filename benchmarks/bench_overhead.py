"""What a step costs beside the model: CPU µs a decode step, by part and batch.

    .venv/bin/python benchmarks/bench_overhead.py [--steps 400] [--batches 1,8,32,256] [--out FILE]

The engine, scheduler and cache are the real ones, with a tokenizer that costs a look-up a token;
the executor builds the batch that a model would read, and answers with tokens known beforehand.
Each sequence has a prompt of its own, of 100 to 115 tokens, so that in each step some fill one of
their blocks, of 16 tokens.  Tokens are among 2,000, as those of most texts are.  A step's parts:

    schedule  room for the newest tokens, and the plan
    build     the plan as tensors
    apply     counts, published blocks, drawn tokens
    output    detokenising, stops, limits, news

CPU is that of this thread: the median of all steps, and the 99th percentile.  Python's collector is
as it is after the start of a server, or left alone (`--gc on`).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixcache import CacheConfig, RadixCache
from radixcache.tokens import pack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.executor.batch import build_batch
from runtime.plan import Difference, StepPlan, StepResult
from runtime.request import Request, SamplingParams

BLOCK_SIZE, PROMPT_LEN, VOCAB_SIZE = 16, 100, 2000
PARTS = ("schedule", "build", "apply", "output")


class Stopwatch:
    """Adds up the CPU time of the parts of a step."""

    def __init__(self) -> None:
        self.parts: dict[str, int] = defaultdict(int)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds its time to a part."""

        def call(*args: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args)
            finally:
                self.parts[name] += time.thread_time_ns() - began

        return call


class Words:
    """A tokenizer that costs what a real one does for a token: one look-up."""

    drops_first_space = False

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self._bytes = [f" word{token}".encode() for token in range(VOCAB_SIZE)]

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """The bytes of these ids."""
        return b"".join([self._bytes[token] for token in ids])


class KnownTokens:
    """Builds the batch of a plan, and answers with tokens known beforehand."""

    def __init__(self, watch: Stopwatch) -> None:
        self._rng = np.random.default_rng(1)
        self._build = watch.timed("build", self._build_batch)

    def _build_batch(self, plan: StepPlan) -> int:
        batch = build_batch(
            plan.pieces, plan.rows, block_size=BLOCK_SIZE, device=torch.device("cpu")
        )
        return len(batch.draws)

    def execute(self, plan: StepPlan) -> StepResult:
        """Answer each draw with another token."""
        count = self._build(plan)
        return StepResult(
            step=plan.step, token_ids=tuple(self._rng.integers(0, VOCAB_SIZE, count).tolist())
        )

    def first_difference(
        self, ours: Sequence[int], theirs: Sequence[int], num_tokens: int
    ) -> Difference | None:
        """Blocks hold nothing here, so that none differ."""
        return None


def measure(batch: int, *, steps: int) -> dict[str, Any]:
    """Decode `batch` sequences for so many steps; return µs by part."""
    watch = Stopwatch()
    num_blocks = batch * (-(-(PROMPT_LEN + steps + 24) // BLOCK_SIZE) + 1)
    cache = RadixCache(CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))
    executor = KnownTokens(watch)
    engine = Engine(
        cache,
        EngineConfig(max_len=PROMPT_LEN + steps + 24, max_step_tokens=8192, max_running=batch),
        executor,
        tokenizer=Words(),  # type: ignore[arg-type]
        eos_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        draw_seed=lambda: 0,
    )
    engine.scheduler.schedule = watch.timed("schedule", engine.scheduler.schedule)
    engine.scheduler.apply = watch.timed("apply", engine.scheduler.apply)
    executor.execute = watch.timed("execute", executor.execute)
    rng = np.random.default_rng(2)
    for index in range(batch):
        engine.submit(
            Request(
                request_id=f"r{index}",
                prompt=pack_tokens(
                    rng.integers(0, VOCAB_SIZE, PROMPT_LEN + index % BLOCK_SIZE).tolist()
                ),
                sampling=SamplingParams(max_tokens=steps + 8, ignore_eos=True),
            )
        )
    while engine.scheduler.waiting or any(s.num_behind > 1 for s in engine.scheduler.running):
        engine.step()
    return _summary(batch, [_one_step(engine, watch) for _ in range(steps)])


def _one_step(engine: Engine, watch: Stopwatch) -> dict[str, float]:
    watch.parts.clear()
    began = time.thread_time_ns()
    news = engine.step()
    total = time.thread_time_ns() - began
    assert news
    parts = watch.parts
    rest = total - parts["schedule"] - parts["execute"] - parts["apply"]
    fake = parts["execute"] - parts["build"]
    named = {name: parts[name] / 1e3 for name in ("schedule", "build", "apply")}
    return {**named, "output": rest / 1e3, "step": (total - fake) / 1e3}


def _summary(batch: int, steps: list[dict[str, float]]) -> dict[str, Any]:
    medians = {name: statistics.median(s[name] for s in steps) for name in (*PARTS, "step")}
    ordered = sorted(s["step"] for s in steps)
    return {
        "batch": batch,
        **{name: round(value, 1) for name, value in medians.items()},
        "mean": round(statistics.mean(ordered), 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "max": round(ordered[-1], 1),
        "a_token": round(medians["step"] / batch, 2),
    }


def main() -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8,32,256")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--gc", choices=("on", "frozen"), default="frozen")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.gc == "frozen":
        gc.collect()
        gc.freeze()
    rows = [measure(int(batch), steps=args.steps) for batch in args.batches.split(",")]
    columns = ("batch", *PARTS, "step", "mean", "p99", "max", "a_token")
    print(" ".join(f"{name:>9}" for name in columns))
    for row in rows:
        print(" ".join(f"{row[name]:>9}" for name in columns))
    if args.out:
        result = {"date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "rows": rows}
        args.out.write_text(json.dumps({**result, "gc": args.gc}, indent=2) + "\n")


if __name__ == "__main__":
    main()
