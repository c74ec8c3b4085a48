"""What it costs to watch the tree: each request, the first walk, and an engine under load.

    .venv/bin/python benchmarks/bench_tree_feed.py [--nodes 100000] [--step-ms 10] [--out FILE]

    request  µs of the engine's thread for one request of two blocks in a tree of so many nodes,
             while nobody watches, and while somebody does, who looks twice a second at 1,000
             requests a second; runs alternate, medians
    walk     the first snapshot: time of each slice on the engine's thread, and on another for
             keeping and encoding all rows
    load     an engine whose steps take as long as a GPU's, under 32 callers: the feed's share of
             its thread, and the time between two steps, with nobody watching, while the first
             reader's snapshot is made, and with one reader

Time of the engine's thread is its processor time, so that neighbours of the machine don't count;
the time between steps is on the wall, and they do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does; before torch
sys.path.insert(0, str(Path(__file__).parents[1]))

from radixcache import CacheConfig, PrefixKey, RadixCache
from radixcache.watch import TreeWatch
from runtime.async_engine import AsyncEngine
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.plan import StepPlan, StepResult
from runtime.request import Request, SamplingParams, pack_prompt
from runtime.server.config import ServerConfig
from runtime.server.context import Served
from runtime.server.middleware import ANYONE
from runtime.server.tree_feed import TreeFeed
from runtime.tree.mirror import Label, Mirror, encode_nodes
from runtime.tree.reading import SLICE, TreeReader
from tests.support.served import quick_runtime

BLOCK = 16
SHARED = [7] * BLOCK


def fill(cache: RadixCache, num_nodes: int) -> None:
    """Cache so many prompts of a shared block and one of their own."""
    for number in range(num_nodes):
        serve(cache, number)


def serve(cache: RadixCache, number: int) -> None:
    """One request from begin to end."""
    key = PrefixKey.of([*SHARED, *([10 + number % 997] * 15), number // 997, 5])
    lease = cache.acquire(key)
    cache.commit(lease, lease.num_tokens)
    cache.release(lease)


def cost_of_a_request(num_nodes: int, *, runs: int = 9, requests: int = 2000) -> dict[str, float]:
    """Median µs of a request, unwatched and watched."""
    cache = RadixCache(CacheConfig(num_blocks=num_nodes + 64, block_size=BLOCK))
    fill(cache, num_nodes)
    took: dict[str, list[float]] = {"unwatched": [], "watched": []}
    numbers = random.Random(1)
    for _ in range(runs):
        for name, times in took.items():
            watch = TreeWatch(cache.tree, cache.pins) if name == "watched" else None
            while watch is not None and watch.num_pending:
                watch.take(10_000)
            began = time.thread_time()
            for place in range(requests):
                serve(cache, numbers.randrange(2 * num_nodes))
                if watch is not None and place % 500 == 499:
                    watch.take(SLICE)
            times.append(1e6 * (time.thread_time() - began) / requests)
            if watch is not None:
                watch.close()
    return {f"{name}_us": statistics.median(times) for name, times in took.items()}


def cost_of_the_walk(num_nodes: int) -> dict[str, float]:
    """Times of the slices of one walk, and of writing all rows."""
    cache = RadixCache(CacheConfig(num_blocks=num_nodes + 64, block_size=BLOCK))
    fill(cache, num_nodes)
    watch, mirror = TreeWatch(cache.tree, cache.pins), Mirror(label=lambda _: Label("all", None))
    slices, applied = [], 0.0
    while watch.num_pending:
        began = time.thread_time()
        changes = watch.take(SLICE)
        slices.append(1e3 * (time.thread_time() - began))
        began = time.thread_time()
        mirror.apply([(row, 0.0) for row in changes.rows], changes.removed)
        applied += time.thread_time() - began
    began = time.thread_time()
    written = encode_nodes(list(mirror.rows.values()), mirror.namespaces)
    return {
        "nodes": len(mirror.rows),
        "slices": len(slices),
        "slice_median_ms": statistics.median(slices),
        "slice_max_ms": max(slices),
        "engine_ms": sum(slices),
        "mirror_ms": 1e3 * applied,
        "encode_ms": 1e3 * (time.thread_time() - began),
        "megabytes": len(written) / 1e6,
    }


class Timed:
    """Sums the processor time of the calls of a `TreeReader`, on whose thread they run."""

    def __init__(self, reader: TreeReader) -> None:
        self.seconds = 0.0
        for name in ("begin", "take", "read"):
            setattr(reader, name, self._timed(getattr(reader, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.thread_time() - began

        return timed


class Gaps:
    """Notes when each step begins."""

    def __init__(self, runtime: Runtime) -> None:
        self.times: list[float] = []
        self._execute = runtime.executor.execute
        runtime.engine._executor = self  # type: ignore[assignment]

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step."""
        self.times.append(time.perf_counter())
        return self._execute(plan)

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Milliseconds between the steps of a stretch of time."""
        times = [t for t in self.times if began <= t <= ended]
        gaps = sorted(1e3 * (b - a) for a, b in pairwise(times))
        return {
            "steps": len(gaps),
            "median_ms": statistics.median(gaps),
            "p99_ms": gaps[int(0.99 * (len(gaps) - 1))],
            "max_ms": gaps[-1],
        }


async def load(runtime: Runtime, seconds: float) -> dict[str, Any]:
    """Run callers, first with nobody watching, then with a reader of the feed."""
    engine, gaps = AsyncEngine(runtime.engine), Gaps(runtime)
    served = Served(
        runtime=runtime,
        engine=engine,
        metrics=ServerMetrics(lambda: engine.latest_stats),
        config=ServerConfig(),
        clock=time.monotonic,
        created=0,
    )
    feed = TreeFeed(served)
    timed, result = Timed(feed._reader), {}
    engine.start()
    async with feed.running():
        callers = [asyncio.ensure_future(call(engine, number)) for number in range(32)]
        await asyncio.sleep(2)
        for name in ("nobody", "first snapshot", "one reader"):
            used, began, num_bytes = timed.seconds, time.perf_counter(), 0
            if name == "nobody":
                await asyncio.sleep(seconds)
            elif name == "first snapshot":
                events = await feed.open(ANYONE)
                num_bytes = len(await anext(events))
            else:
                while time.perf_counter() < began + seconds:
                    num_bytes += len(await anext(events))
            ended = time.perf_counter()
            result[name] = {
                "seconds": ended - began,
                "bytes": num_bytes,
                "feed_cpu_ms": 1e3 * (timed.seconds - used),
                "feed_percent": 100 * (timed.seconds - used) / (ended - began),
            } | gaps.between(began, ended)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await events.aclose()
    await asyncio.to_thread(engine.stop, drain_s=1.0)
    return result


async def call(engine: AsyncEngine, number: int) -> None:
    """Ask for one thing after another behind what all share."""
    drawn = random.Random(number)
    for turn in range(10**6):
        tail = [drawn.randrange(1000, 40_000) for _ in range(drawn.randrange(40, 400))]
        request = Request(
            request_id=f"{number}.{turn}",
            prompt=pack_prompt(SHARED + tail),
            sampling=SamplingParams(max_tokens=drawn.randrange(16, 64), ignore_eos=True),
        )
        async for _ in await engine.submit(request):
            pass


def main() -> None:
    """Run, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part of the load")
    parser.add_argument("--out", type=Path, default=Path("results/tree-feed.json"))
    args = parser.parse_args()
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "step_ms": args.step_ms}
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    result["request"] = cost_of_a_request(args.nodes)
    print("request", result["request"], flush=True)
    result["walk"] = cost_of_the_walk(args.nodes)
    print("walk", result["walk"], flush=True)
    runtime = quick_runtime(num_blocks=args.nodes + 20_000, max_running=32)
    fill(runtime.engine.cache, args.nodes)
    runtime.executor.step_s = args.step_ms / 1e3  # type: ignore[attr-defined]
    result["load"] = asyncio.run(load(runtime, args.seconds))
    for name, numbers in result["load"].items():
        print(name, numbers, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
