"""One stream on a laptop: prefill and decode of the default model's own file, beside llama.cpp.

    .venv/bin/python -m benchmarks.bench_stream --llama HOME [--rounds 3] [--out FILE]

Each round plays ours (weights as in the file, then with 8-bit rows, then float32) and llama.cpp's
own server (the environments of benchmarks/peers/environments.py), each in a process of its own and
alone, on the same file and number of threads.  Prefill is a prompt of 500 tokens that share
nothing with one before; decode is 64 tokens behind it.  llama.cpp tells its own times; ours are
those of `radixcache bench`.  Tokens a second, the median and the spread of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.bench_perplexity import LLAMA, ask
from benchmarks.peers.servers import free_port
from runtime.config import DEFAULT_MODEL
from runtime.weights.pull import cached

TOKENS, NEW = 500, 64
OURS = {
    "ours, the file's weights": ("--weights", "file"),
    "ours, the file's weights, 8-bit rows": ("--weights", "file", "--activations", "int8"),
    "ours, float32 weights": ("--weights", "float32"),
}


def ours(flags: tuple[str, ...]) -> tuple[float, float]:
    """Return tokens a second of prefill and decode."""
    command = [
        *(sys.executable, "-m", "runtime.cli.main", "bench", "--json", "--dtype", "float32"),
        *("--context", str(TOKENS - 60), "--batches", "1", "--steps", str(NEW), "--runs", "3"),
        *flags,
    ]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    report = json.loads(run.stdout)
    cold, [decode] = report["cold"], report["decode"]
    return cold["computed_tokens"] / cold["median_ms"] * 1e3, decode["tokens_per_s"]


def llama(home: Path, threads: int) -> tuple[float, float]:
    """The same of llama.cpp's server, as it tells it."""
    port, model, draw = free_port(), cached(DEFAULT_MODEL), random.Random(0)
    python = str(home / "llama" / "bin" / "python")
    command = [python, str(LLAMA), str(model), str(port), str(threads), "1", "1024"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            found = []
            for _ in range(4):
                prompt = [draw.randrange(1000, 40_000) for _ in range(TOKENS)]
                body = {"prompt": prompt, "n_predict": NEW, "temperature": 0.0, "ignore_eos": True}
                found.append(ask(port, body | {"cache_prompt": False})["timings"])
        finally:
            server.terminate()
    rates = [(t["prompt_per_second"], t["predicted_per_second"]) for t in found[1:]]
    prefill, decode = zip(*rates, strict=True)
    return statistics.median(prefill), statistics.median(decode)


def main() -> None:
    """Play the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, metavar="HOME", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    threads = os.cpu_count() or 1
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for name, flags in OURS.items():
            found.setdefault(name, []).append(ours(flags))
        found.setdefault("llama.cpp", []).append(llama(args.llama, threads))
    print(f"| {threads} threads, tokens a second | prefill of {TOKENS} | decode |\n|---|---|---|")
    for name, rates in found.items():
        cells = [
            f"{statistics.median(column):.0f} ({min(column):.0f} to {max(column):.0f})"
            for column in zip(*rates, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    if args.out:
        args.out.write_text(json.dumps({"threads": threads, "rates": found}, indent=1))


if __name__ == "__main__":
    main()
