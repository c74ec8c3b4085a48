"""A crowd against the server, part of it leaving early: errors, times, memory, what is left behind.

    .venv/bin/python -m benchmarks.bench_load --data FOLDER [--requests 5000] [--fake] [--out FILE]

The server is `radixcache serve` in a process of its own (`--fake`: the one of fake_server.py), the
clients are in this one.  Requests are real texts (load_texts.py) and are all streamed; so many
clients are always there, each with one request, and 30 % of the requests are left before their end.
The pool is smaller than what the requests would fill, and the queue shorter than the crowd, so
blocks are evicted and some clients are told 429 and come again.  At the end everything cached is
given up: a block that something still held would not be freed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.load_texts import Texts
from tests.support.crowd import Crowd, Visit

IDLE_LIMIT_S = 60
SAMPLE_S = 10.0
STEADY_FROM, STEADY_TO = 0.25, 0.9  # of the requests: before, caches fill; after, the crowd thins


class Server:
    """The server's process; what it logs goes to a file.

    command  prints a line of JSON with `url` when it serves
    """

    def __init__(self, command: list[str], *, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the server did not start: {log.read_text()}")
        self.ready = json.loads(line)
        self.url: str = self.ready["url"]

    def metrics(self) -> dict[str, float]:
        """Return the latest metrics, labels as part of the name: `radixcache_blocks{free}`."""
        with urlopen(f"{self.url}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        found = {}
        for family in families:
            for sample in family.samples:
                labels = ",".join(v for k, v in sample.labels.items() if k not in ("tier",))
                name = sample.name.removeprefix("radixcache_")
                found[f"{name}{{{labels}}}" if labels else name] = sample.value
        return found

    def when_idle(self) -> dict[str, float]:
        """Return the metrics once nothing runs or waits."""
        for _ in range(IDLE_LIMIT_S * 10):
            seen = self.metrics()
            if not seen["requests_running"] and not seen["requests_waiting"]:
                return seen
            time.sleep(0.1)
        sys.exit("the server is busy though nobody waits for it")

    def reset(self) -> int:
        """Give up all that is cached; returns the blocks that were freed."""
        ask = Request(f"{self.url}/reset_prefix_cache", method="POST", data=b"")
        with urlopen(ask) as answer:
            return int(json.loads(answer.read())["freed_blocks"])

    def sample(self) -> dict[str, int]:
        """Return resident kilobytes, open files and threads."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1)
            for line in (folder / "status").read_text().splitlines()
            if ":" in line
        )
        return {
            "rss_kb": int(status["VmRSS"].split()[0]),
            "files": len(list((folder / "fd").iterdir())),
            "threads": int(status["Threads"]),
        }

    def stop(self) -> int:
        """End it as an operator does; returns its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


async def drive(server: Server, crowd: Crowd, texts: Texts, count: int) -> list[dict[str, Any]]:
    """Send all requests; returns samples of the server's memory over time."""
    began, samples = time.perf_counter(), []
    running = asyncio.ensure_future(crowd.run(texts.requests(count)))
    while not running.done():
        await asyncio.wait({running}, timeout=SAMPLE_S)
        at = round(time.perf_counter() - began, 1)
        samples.append({"s": at, "visits": len(crowd.visits), **server.sample()})
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    await running
    return samples


def percentiles(values: list[float]) -> dict[str, float]:
    """Return median, 90th and 99th percentile and the largest, in ms."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return {name: round(value * 1e3, 1) for name, value in shown.items()}


def memory(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return resident memory over the steady part, and its trend (Theil-Sen)."""
    total = samples[-1]["visits"]
    steady = [s for s in samples if STEADY_FROM <= s["visits"] / total <= STEADY_TO]
    if len(steady) < 3:
        return {"samples": samples}
    slopes = [
        (b["rss_kb"] - a["rss_kb"]) / (b["visits"] - a["visits"])
        for i, a in enumerate(steady)
        for b in steady[i + 1 :]
        if b["visits"] > a["visits"]
    ]
    return {
        "rss_mb_steady_begin": round(steady[0]["rss_kb"] / 1024, 1),
        "rss_mb_steady_end": round(steady[-1]["rss_kb"] / 1024, 1),
        "kb_per_request": round(statistics.median(slopes), 2),
        "files_at_end": samples[-1]["files"],
        "threads_at_end": samples[-1]["threads"],
        "samples": samples,
    }


def cache(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Return what the cache did between two looks at the metrics."""

    def grown(name: str) -> int:
        return int(after[f"{name}_total"] - before[f"{name}_total"])

    prompt, cached = grown("prompt_tokens"), grown("cached_prompt_tokens")
    counted = ("steps", "failed_steps", "preemptions", "evicted_blocks", "generation_tokens")
    finished = {k: int(v) for k, v in after.items() if k.startswith("requests_finished_total{")}
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "hit_rate": round(cached / max(1, prompt), 4),
        **{name: grown(name) for name in counted},
        "finished": {k.split("{")[1].rstrip("}"): v for k, v in finished.items()},
    }


def left_behind(server: Server) -> dict[str, Any]:
    """Return the blocks by state once all is quiet, and again when the cache was given up."""
    idle = server.when_idle()
    names = ("cache_leases", "cache_holds", "requests_running", "requests_waiting")

    def blocks(seen: dict[str, float]) -> dict[str, int]:
        states = ("free", "private", "pinned", "evictable")
        return {state: int(seen[f"blocks{{{state}}}"]) for state in states}

    freed = server.reset()
    server.metrics()  # a look shows the engine as it was before the call that came with it
    time.sleep(0.5)
    after = server.metrics()
    return {
        "blocks_when_idle": blocks(idle),
        **{name: int(idle[name]) for name in names},
        "freed_by_reset": freed,
        "blocks_after_reset": blocks(after),
        "tree_nodes_after_reset": int(after["tree_nodes"]),
    }


def server_command(args: argparse.Namespace) -> list[str]:
    limits = [
        f"--num-blocks={args.num_blocks}",
        f"--max-running={args.max_running}",
        f"--max-waiting={args.max_waiting}",
    ]
    if args.fake:
        return [sys.executable, "-m", "benchmarks.fake_server", *limits]
    radixcache = Path(sys.executable).with_name("radixcache")
    flags = ["--port=0", "--json", "--dtype=float32", "--log-level=warning", *limits]
    return [str(radixcache), "serve", f"--max-step-tokens={args.max_step_tokens}", *flags]


def report(args: argparse.Namespace, crowd: Crowd, seconds: float) -> dict[str, Any]:
    visits: list[Visit] = crowd.visits
    outcomes: Counter[str] = crowd.outcomes
    bad = {k: n for k, n in outcomes.items() if k != "whole" and not k.startswith("left: ")}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": server_command(args)[1:],
        "clients": args.clients,
        "requests": len(visits),
        "seconds": round(seconds, 1),
        "requests_per_s": round(len(visits) / seconds, 2),
        "outcomes": dict(sorted(outcomes.items())),
        "told_429_and_came_again": crowd.refusals,
        "unintended": bad,
        "ttft_ms": percentiles([v.ttft_s for v in visits if v.ttft_s is not None]),
        "inter_token_ms": percentiles([gap for v in visits for gap in v.gaps_s]),
    }


def main() -> None:
    """Run, print the result, and write it as JSON; exit with 1 where something was not as meant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--fake", action="store_true", help="no model: HTTP, scheduler, cache")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--leave", type=float, default=0.3, help="share that leaves early")
    parser.add_argument("--num-blocks", type=int, default=2000)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=176)
    parser.add_argument("--max-step-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/load.json"))
    args = parser.parse_args()
    server = Server(server_command(args), log=args.out.with_suffix(".log"))
    texts = Texts(args.data, model=server.ready["model"], seed=args.seed)
    crowd = Crowd(
        int(server.url.rpartition(":")[2]),
        num_clients=args.clients,
        leave_share=args.leave,
        seed=args.seed,
    )
    before, began = server.metrics(), time.perf_counter()
    samples = asyncio.run(drive(server, crowd, texts, args.requests))
    result = report(args, crowd, time.perf_counter() - began)
    result |= {"cache": cache(before, server.when_idle()), "left_behind": left_behind(server)}
    result["exit_status"] = server.stop()
    result["log_lines"] = server.log.read_text().splitlines()[:20]
    args.out.write_text(json.dumps(result | {"memory": memory(samples)}, indent=1) + "\n")
    del (shown := memory(samples))["samples"]
    print(json.dumps(result | {"memory": shown}, indent=1))
    blocks = result["left_behind"]["blocks_after_reset"]
    as_meant = not result["unintended"] and sum(blocks.values()) == blocks["free"]
    sys.exit(0 if as_meant and not result["exit_status"] else 1)


if __name__ == "__main__":
    main()
