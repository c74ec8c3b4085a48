"""Whole workloads on our server and on others, the same model and prompts, one server at a time.

    python -m benchmarks.peers.environments HOME                      # once: minutes, 10 GB
    .venv/bin/python -m benchmarks.serve_peers --home HOME [--docs docs/performance.md]
    … --only ours-float32,vllm-float32 --workloads chat,tree          # some of it
    … --quick                                                         # do all servers work?

Every server is started in its own environment (peers/servers.py), asked for one token, warmed up,
and given the workloads of peers/workloads.py one after another by eight clients over HTTP.  Ours
runs the checkout with its defaults, once before each of the first peers of its precision, so that
ours and theirs alternate.  What a server takes is told in wall time, in CPU seconds of its
processes, and beside what others took of the machine meanwhile.  A server that fails is reported
and skipped; logs stay in HOME/logs.

Where the answer of a server of the same precision can be compared with that of our first run (the
prompts are equal), it is: `same_answers` of `same_prompts`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.client import Answer, ask
from benchmarks.peers.driver import Played, agreement, play, see
from benchmarks.peers.meter import Meter
from benchmarks.peers.report import replace_section, report
from benchmarks.peers.servers import (
    DEFAULT,
    PEERS,
    Peer,
    Server,
    Start,
    free_port,
    versions,
)
from benchmarks.peers.workloads import QUICK, Ideal, Node, Sizes, ideal, make_workloads, warm_up
from runtime.config import DEFAULT_MODEL
from runtime.weights.checkpoint import open_checkpoint

WORKLOADS = ("chat", "tree", "few-shot", "control")


class Comparison:
    """The run: what is played, until when, and what was seen.

    workloads  by name, in the order in which they are played
    deadline   on the monotonic clock
    """

    def __init__(
        self,
        start: Start,
        workloads: dict[str, list[Node]],
        warm: list[Node],
        *,
        deadline: float,
        limit_s: float,
    ) -> None:
        self._start, self._workloads, self._warm = start, workloads, warm
        self._deadline, self._limit_s = deadline, limit_s
        self._ours: dict[tuple[str, str], Played] = {}
        self.runs: list[dict[str, Any]] = []

    def run(self, peer: Peer) -> None:
        """Start a server, play all workloads, and end it; whatever fails is noted and told."""
        row: dict[str, Any] = {"server": peer.name, "dtype": peer.dtype, "workloads": {}}
        row["versions"] = {}
        self.runs.append(row)
        if self._left_s() < 20:
            row["error"] = "there was no time left"
            return
        start = msgspec.structs.replace(self._start, port=free_port())
        number = sum(1 for run in self.runs if run["server"] == peer.name)
        server: Server | None = None
        try:
            server = Server(peer, start, log=start.home / "logs" / f"{peer.name}-{number}.log")
            row["command"] = server.command
            row["start_s"] = server.wait_for_first_token(min(self._limit_s, self._left_s()))
            row["versions"] = versions(peer, start)
            self._play(self._warm, server, limit_s=min(self._limit_s, self._left_s()))
            for name, nodes in self._workloads.items():
                row["workloads"][name] = self._measure(name, nodes, server)
        except Exception as error:  # any: one server must not end the run of the others
            row["error"] = f"{type(error).__name__}: {error}"
            print(f"{peer.name}: {row['error']}", file=sys.stderr, flush=True)
        finally:
            if server is not None:
                server.stop()

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _play(self, nodes: Sequence[Node], server: Server, *, limit_s: float) -> Played:
        def send(prompt: list[int], max_tokens: int) -> Answer:
            api = server.peer.api
            return ask(server.port, api, prompt, max_tokens, timeout_s=self._limit_s)

        return play(nodes, send, clients=server.peer.clients, limit_s=limit_s)

    def _measure(self, name: str, nodes: Sequence[Node], server: Server) -> dict[str, Any]:
        peer = server.peer
        asked = nodes[: peer.most.get(name, len(nodes))]
        meter = Meter(server.process.pid).start()
        try:
            played = self._play(asked, server, limit_s=min(self._limit_s, self._left_s()))
        finally:
            usage = meter.stop()
        row = msgspec.to_builtins(see(played, of=len(nodes))) | msgspec.to_builtins(usage)
        if (ours := self._ours.get((peer.dtype, name))) is not None:
            row |= agreement(ours, played)
        elif peer.family == "ours":
            self._ours[peer.dtype, name] = played
        print(f"{peer.name} {name}: {json.dumps(row)}", file=sys.stderr, flush=True)
        return row


def in_turns(peers: Sequence[Peer], *, ours_runs: int) -> Iterator[Peer]:
    """Iterate over the runs: ours before each peer of its precision, at most so many times."""
    left = {peer.dtype: ours_runs for peer in peers if peer.family == "ours"}
    ours = {peer.dtype: peer for peer in peers if peer.family == "ours"}
    for peer in peers:
        if peer.family == "ours":
            continue
        if left.get(peer.dtype, 0):
            left[peer.dtype] -= 1
            yield ours[peer.dtype]
        yield peer
    for dtype, count in left.items():
        yield from [ours[dtype]] * count


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    flag = parser.add_argument
    flag("--home", type=Path, default=Path("build/peers"), help="environments, models, logs")
    flag("--only", default=",".join(DEFAULT), help=f"of {', '.join(PEERS)}")
    flag("--workloads", default=",".join(WORKLOADS), help="which, in this order")
    flag("--ours-runs", type=int, default=2, help="how often ours runs in each precision")
    flag("--model", default=DEFAULT_MODEL, help="that ours serves; a try of the driver's")
    flag("--quick", action="store_true", help="tiny workloads; no measurement")
    flag("--minutes", type=float, default=20, help="after which nothing more is begun")
    flag("--limit", type=float, default=180, help="seconds for a start or a workload")
    flag("--threads", type=int, default=os.cpu_count(), help="of each peer")
    flag("--out", type=Path, help="JSON, written anew after each server")
    flag("--docs", type=Path, help="page whose table is replaced")
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Peer]:
    """Return the servers that were asked for, in the order of PEERS."""
    names = args.only.split(",")
    families = {peer.family for peer in PEERS.values()}
    if unknown := set(names) - PEERS.keys() - families:
        sys.exit(f"no server {', '.join(sorted(unknown))}: choose of {', '.join(PEERS)}")
    return [
        p for p in PEERS.values() if p.name in names or (p.family in names and p.name in DEFAULT)
    ]


def main() -> None:
    """Run, and write what was seen; exit with 1 where nothing was."""
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no server outlives this process
    tokenizer = open_checkpoint(args.model).tokenizer()
    everything = make_workloads(tokenizer, QUICK if args.quick else Sizes())
    workloads = {name: everything[name] for name in args.workloads.split(",")}
    ideals: dict[str, Ideal] = {name: ideal(nodes) for name, nodes in workloads.items()}
    home = args.home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    start = Start(home=home, model=args.model, port=0, threads=args.threads)
    warm = warm_up(tokenizer.vocab_size, count=8, length=20 if args.quick else 200)
    began = time.monotonic()
    comparison = Comparison(
        start, workloads, warm, deadline=began + 60 * args.minutes, limit_s=args.limit
    )
    date = time.strftime("%Y-%m-%d")
    out = args.out or Path(f"results/serve-peers{'-quick' * args.quick}-{date}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for peer in in_turns(chosen(args), ours_runs=args.ours_runs):
        comparison.run(peer)
        result = {
            "date": date,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "quick": args.quick,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "ideal": msgspec.to_builtins(ideals),
            "runs": comparison.runs,
        }
        out.write_text(json.dumps(result, indent=1) + "\n")  # as far as it went
    print(report(result))
    if args.docs:
        replace_section(args.docs, report(result))
    sys.exit(0 if any(run["workloads"] for run in comparison.runs) else 1)


if __name__ == "__main__":
    main()
