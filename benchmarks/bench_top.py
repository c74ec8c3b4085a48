"""What `radixcache top` costs with a large tree, and what KV events cost the engine's thread.

.venv/bin/python benchmarks/bench_top.py [--nodes 100000] [--runs 7] [--out FILE]

begin   a snapshot of so many nodes: decoding its JSON, and building the tree that is drawn
frame   one change, and a frame of 120 columns and 50 lines after it
events  µs to hand over what a step published, and of a step that published nothing; needs the
        extra `events`
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from radixcache import CacheConfig, EventRecorder, PrefixKey, RadixCache
from runtime.kv_events import KVEventPublisher
from runtime.top.frame import frame
from runtime.top.model import Change, Columns, Label, Snapshot
from runtime.top.screen import Screen
from runtime.tree.records import Sample

NOW = 1000.0


def columns(parents: dict[int, int]) -> Columns:
    """Rows of nodes, by their parents."""
    draw, count = random.Random(len(parents)), len(parents)
    return Columns(
        id=list(parents),
        parent=list(parents.values()),
        tokens=[16] * count,
        blocks=[1] * count,
        hits=[draw.randrange(9) for _ in parents],
        used=[NOW - 1000 * draw.random() for _ in parents],
        pins=[0] * count,
        state=["e"] * count,
        tier=["gpu"] * count,
        namespace=[0] * count,
        namespaces=[Label("default", None)],
    )


def snapshot(num_nodes: int) -> bytes:
    """A tree of conversations: each node hangs below one of the last 3,000, some 70 deep."""
    draw = random.Random(0)
    parents = {1: 0, 2: 1}
    for node in range(3, num_nodes + 2):
        parents[node] = draw.randrange(max(2, node - 3000), node)
    counts: dict[str, Any] = dict.fromkeys(Sample.__struct_fields__[1:13], 0)
    sample = Sample(time=NOW, **counts, ttft_warm=None, ttft_cold=None)
    return msgspec.json.encode(
        Snapshot(
            seq=1,
            time=NOW,
            block_size=16,
            num_blocks=2 * num_nodes,
            nodes=columns(parents),
            sample=sample,
            show_text=False,
        )
    )


def spread(measure: Callable[[], float], runs: int, *, unit: float) -> dict[str, float]:
    """Median, least and most of some runs."""
    times = [unit * measure() for _ in range(runs)]
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure_top(num_nodes: int, runs: int) -> dict[str, Any]:
    """Begin and frames of a screen."""
    encoded = snapshot(num_nodes)
    decoded = msgspec.json.decode(encoded, type=Snapshot)
    screen = Screen("", details=lambda node: b"", reconnect=lambda: None)

    def draw() -> None:
        number = screen.view.model.seq + 1
        nodes = columns({10**9 + number: 1 + number})
        screen.take(Change(seq=number, time=NOW, nodes=nodes, removed=[]))
        screen.lay_out(120, 50)
        frame(screen.view, 120, 50)

    decode = lambda: timed(lambda: msgspec.json.decode(encoded, type=Snapshot))  # noqa: E731
    return {
        "nodes": num_nodes,
        "megabytes": len(encoded) / 1e6,
        "decode_ms": spread(decode, runs, unit=1e3),
        "build_ms": spread(lambda: timed(lambda: screen.take(decoded)), runs, unit=1e3),
        "change_and_frame_ms": spread(lambda: timed(draw), 20 * runs, unit=1e3),
    }


def measure_events(runs: int) -> dict[str, Any]:
    """What the engine's thread pays for a hand-over, of one block and of nothing."""
    recorder = EventRecorder()
    cache = RadixCache(CacheConfig(num_blocks=4096, block_size=16), observers=[recorder])
    publisher = KVEventPublisher(recorder, endpoint="tcp://127.0.0.1:*")
    numbers = iter(range(10**6))

    def step() -> float:
        lease = cache.acquire(PrefixKey.of([next(numbers)] * 16))
        cache.commit(lease, 16)
        cache.release(lease)
        return timed(publisher.turned)

    def steps() -> float:
        return statistics.median(step() for _ in range(500))

    def nothing() -> float:
        return timed(lambda: [publisher.turned() for _ in range(10_000)]) / 10_000

    told = {
        "hand_over_us": spread(steps, runs, unit=1e6),
        "nothing_us": spread(nothing, runs, unit=1e6),
    }
    publisher.close()
    return told


def main() -> None:
    """Run, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/top.json"))
    args = parser.parse_args()
    told = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "top": measure_top(args.nodes, args.runs),
        "events": measure_events(args.runs),
    }
    print(json.dumps(told, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
