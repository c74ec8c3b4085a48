"""From the command to the first token: `radixcache serve`, with the model's file in memory.

    .venv/bin/python benchmarks/bench_start.py [--runs 5] [--out FILE] [-- FLAG …]

Each run starts the server, reads the line that says it is ready, sends one streamed completion and
stops the clock at its first piece.  One run before them warms the file cache.  CPU is that of all
threads until then, memory the most that was resident.  Flags behind `--` go to `radixcache serve`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BODY = json.dumps({"prompt": "The capital of France is", "max_tokens": 1, "stream": True})


def first_token(url: str) -> None:
    """Ask for one token, and return when it has come."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.readline().startswith(b"data: ")
    connection.close()


def peak_mb(pid: int) -> float:
    """Return the most memory that a process has had resident, in 10⁶ bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_start(flags: list[str]) -> dict[str, float]:
    """Start a server, ask it once, and stop it."""
    command = [sys.executable, "-c", "from runtime.cli.entry import main; raise SystemExit(main())"]
    began = time.perf_counter()
    server = subprocess.Popen(
        [*command, "serve", "--port", "0", "--json", "--log-level", "error", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        loaded = time.perf_counter()
        first_token(ready["url"])
        done = time.perf_counter()
        return {
            "ready_s": loaded - began,
            "first_token_s": done - began,
            "cpu_s": cpu_s(server.pid),
            "peak_mb": peak_mb(server.pid),
        }
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="of `radixcache serve`, behind --")
    args = parser.parse_args()
    one_start(args.flags)
    runs = [one_start(args.flags) for _ in range(args.runs)]
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}
    for name in ("ready_s", "first_token_s", "cpu_s", "peak_mb"):
        values = [run[name] for run in runs]
        result[name] = [round(v, 2) for v in (statistics.median(values), min(values), max(values))]
        print(f"{name:14} median {result[name][0]}, {result[name][1]} to {result[name][2]}")
    if args.out:
        args.out.write_text(json.dumps({**result, "flags": args.flags}, indent=2) + "\n")


if __name__ == "__main__":
    main()
