"""One process an implementation: it builds and samples workloads as told.

Owns: the pipe.  Does not know: what the rows mean.  Runs in the peers' environments too.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from core_endurance import Soak
from core_ours import Ours
from core_replay import Memory, Replay
from core_workloads import Chat, Cycle, Evict, Floor, Full, Lookup, Match

HERE = Path(__file__).resolve().parent
WORKLOADS: dict[str, Any] = {
    "match": Match,
    "lookup": Lookup,
    "cycle": Cycle,
    "evict": Evict,
    "full": Full,
    "chat": Chat,
    "memory": Memory,
    "soak": Soak,
    "trace": Replay,
}


def work(name: str) -> None:
    """Build and sample workloads as told on stdin, one JSON object a line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    gc.disable()
    workload: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "row" in order:
                workload = None
                gc.collect()
                workload = build(name, order["row"], order["params"])
                gc.collect()
                answer: dict[str, Any] = {}
            else:
                answer = workload.sample()
        except Exception as error:  # a peer that can't do a row must not end the run
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=out, flush=True)


def build(name: str, row: str, params: dict[str, Any]) -> Any:
    """Return a workload on a new cache of the named implementation."""
    if name == "floor":
        return Floor(params["length"], params["block_size"])
    if name.startswith(Ours.name):
        return WORKLOADS[row](Ours(), **params)
    import peers_core

    return WORKLOADS[row](peers_core.make(name), **params)


class Worker:
    """A process that holds one implementation."""

    def __init__(self, name: str, python: str, tree: str = "") -> None:
        self.name, self.python, self.tree = name, python, tree
        self.process: subprocess.Popen[str] | None = None

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        if self.process is None:
            threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
            self.process = subprocess.Popen(
                [self.python, "-B", str(HERE / "core_worker.py"), self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | threads | ({"PYTHONPATH": self.tree} if self.tree else {}),
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


if __name__ == "__main__":
    work(sys.argv[1])
