"""What HTTP costs: requests a second and CPU a token, with an engine that computes nothing.

    .venv/bin/python -m benchmarks.bench_http [--runs 5] [--out FILE]

The server of this process is the real one over a stand-in for the model; http_client.py drives it
from a process of its own over 32 connections.  CPU is that of the thread which runs the event loop:
reading and checking bodies, templates, tokenizer, JSON, writing; the engine's thread is told
beside it.  Each request is made with 1 and with 257 tokens: what 256 more cost is the cost of a
token.  The limit is a bare application of Starlette that sends the same number of constant chunks,
under the same server, in the same run.  Rounds of all cases alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from runtime.server.logs import set_up_logs
from tests.support import served

FEW, MANY, USUAL = 1, 257, 16
CONNECTIONS = 32
CHUNK = b"data: " + b"x" * 190 + b"\n\n"  # about the size of a chat's

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": MESSAGES, "ignore_eos": True}
TEXT = {"prompt": "Once upon a time", "ignore_eos": True}
ANTHROPIC = {"messages": MESSAGES, "model": served.NAME}

# name: path, body
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bare": ("/bare", {}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, 5 logprobs": (
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 5},
    ),
    "completions": ("/v1/completions", TEXT),
    "completions, 5 logprobs": ("/v1/completions", TEXT | {"logprobs": 5}),
    "Anthropic": ("/v1/messages", ANTHROPIC),
}


class Measured:
    """One run of a case.

    http_s, engine_s  CPU of the two threads, seconds a request
    """

    def __init__(self, *, per_s: float, http_s: float, engine_s: float, num_bytes: float) -> None:
        self.per_s = per_s
        self.http_s = http_s
        self.engine_s = engine_s
        self.num_bytes = num_bytes


async def bare(request: Request) -> Response:
    """Answer as many constant chunks as there would be tokens; or one, whole."""
    body = json.loads(await request.body())

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(body["max_tokens"]):
            yield CHUNK

    if body["stream"]:
        return StreamingResponse(chunks(), media_type="text/event-stream")
    return Response(CHUNK, media_type="application/json")


@contextmanager
def serving_bare(runtime: Any) -> Iterator[str]:
    """The bare application, under the server's own settings of uvicorn."""
    app = Starlette(routes=[Route("/bare", bare, methods=["POST"])])
    with (
        mock.patch.object(served, "create_app", return_value=app),
        served.serving(runtime) as url,
    ):
        yield url


def cpu_s(thread: threading.Thread | None) -> float:
    """Return the CPU time of a thread so far."""
    if thread is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def thread_named(name: str, *, of: set[threading.Thread]) -> threading.Thread | None:
    """Return the thread that has come since, of that name."""
    found = [t for t in threading.enumerate() if t.name == name and t not in of]
    return found[0] if found else None


class Target:
    """A server, and its two threads."""

    def __init__(self, url: str, *, older: set[threading.Thread]) -> None:
        self._port = url.rpartition(":")[2]
        self._http = thread_named("http", of=older)
        self._engine = thread_named("engine", of=older)

    def measure(self, case: str, *, max_tokens: int, stream: bool, count: int) -> Measured:
        """Send so many requests, and return what each took."""
        path, body = CASES[case]
        sent = json.dumps(body | {"max_tokens": max_tokens, "stream": stream})
        command = [sys.executable, "-m", "benchmarks.http_client", self._port, path]
        http, engine = cpu_s(self._http), cpu_s(self._engine)
        ran = subprocess.run(
            [*command, str(CONNECTIONS), str(count)],
            input=sent.encode(),
            capture_output=True,
            check=True,
        )
        told = json.loads(ran.stdout)
        assert told["statuses"] == {"200": told["statuses"]["200"]}, told
        total = sum(told["statuses"].values())
        return Measured(
            per_s=total / told["s"],
            http_s=(cpu_s(self._http) - http) / total,
            engine_s=(cpu_s(self._engine) - engine) / total,
            num_bytes=told["bytes"] / total,
        )


def spread(values: list[float], digits: int = 1) -> list[float]:
    """Return median, least and most."""
    shown = (statistics.median(values), min(values), max(values))
    return [round(value, digits) for value in shown]


def round_of(case: str, target: Target, count: int) -> dict[str, float]:
    """Measure one case once."""
    few = target.measure(case, max_tokens=FEW, stream=True, count=count)
    many = target.measure(case, max_tokens=MANY, stream=True, count=count // 3)
    streamed = target.measure(case, max_tokens=USUAL, stream=True, count=count)
    whole = target.measure(case, max_tokens=USUAL, stream=False, count=count)
    tokens = MANY - FEW
    return {
        "streamed_per_s": streamed.per_s,
        "whole_per_s": whole.per_s,
        "http_us_a_token": (many.http_s - few.http_s) / tokens * 1e6,
        "engine_us_a_token": (many.engine_s - few.engine_s) / tokens * 1e6,
        "http_us_a_request": few.http_s * 1e6,
        "engine_us_a_request": few.engine_s * 1e6,
        "whole_http_us_a_request": whole.http_s * 1e6,
        "tokens_per_s": many.per_s * MANY,
        "bytes_a_token": (many.num_bytes - few.num_bytes) / tokens,
    }


def measure_all(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    runtime = served.quick_runtime(num_blocks=4096, max_running=64, max_waiting=1024)
    other = served.quick_runtime()  # never started: the bare application has no engine
    older = set(threading.enumerate())
    rounds: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with served.serving(runtime) as url:
        ours = Target(url, older=older)
        older = set(threading.enumerate())
        with serving_bare(other) as bare_url:
            limit = Target(bare_url, older=older)
            for number in range(args.runs + 1):
                for case, found in rounds.items():
                    row = round_of(case, limit if case == "bare" else ours, args.requests)
                    if number:  # the first round warms up
                        found.append(row)
                    print(number, case, row, file=sys.stderr, flush=True)
    return {
        case: {name: spread([row[name] for row in found]) for name in found[0]}
        for case, found in rounds.items()
    }


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    """Return the rows for people; of each number the median, and the spread where it matters."""
    lines = [
        "| | whole, requests/s | streamed, requests/s | tokens/s | HTTP, µs a token "
        "| engine, µs a token | HTTP, µs a request | bytes a token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, row in rows.items():
        cells = [
            f"{row['whole_per_s'][0]:.0f}",
            f"{row['streamed_per_s'][0]:.0f}",
            f"{row['tokens_per_s'][0]:,.0f}",
            "{:.1f} ({:.1f} to {:.1f})".format(*row["http_us_a_token"]),
            f"{row['engine_us_a_token'][0]:.1f}",
            f"{row['http_us_a_request'][0]:.0f}",
            f"{row['bytes_a_token'][0]:.0f}",
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("results/http.json"))
    args = parser.parse_args()
    set_up_logs("text", "warning")
    rows = measure_all(args)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "runs": args.runs,
        "connections": CONNECTIONS,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
