"""Items of a benchmark in child processes: a crash, a hang or a poisoned device loses one of them.

Owns: the lines that a child prints, restarting it with what is left, and the time that there is.
Does not know: what an item does.
Idea: after a fault in a kernel a process can't use the device any more, and some faults kill it.  A
child says which item it begins and what came of it; whatever ends it, another takes up the rest.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

MARK: Final = "@row "
POISONED: Final = 3
"""Exit status of a child whose device no longer answers."""
MOST_RESTARTS: Final = 6
PATIENCE_S: Final = 0.5
"""How often a parent looks up from waiting, and how long a dead child's last words may take."""

Row = dict[str, Any]


def emit(row: Row) -> None:
    """Print a row for the parent."""
    print(MARK + json.dumps(row), flush=True)


def run_items(
    names: Sequence[str],
    run: Callable[[str], Row],
    *,
    settle: Callable[[], None],
    deadline: float,
) -> int:
    """In the child: run items in order; return the exit status.

    settle    waits for the device and raises where it is lost
    deadline  on `time.time()`: no item begins after it
    """
    for name in names:
        if time.time() > deadline:
            emit({"item": name, "skipped": "no time left"})
            continue
        emit({"item": name, "begun": True})
        began = time.perf_counter()
        try:
            row = run(name)
            settle()
        except Exception as error:
            text = str(error).strip() or "no message"
            kind = type(error).__name__
            row = {"error": f"{kind}: {text.splitlines()[0][:300]}", "kind": kind}
            row["trace"] = traceback.format_exc()[-2000:]
        emit({"item": name, **row, "took_s": round(time.perf_counter() - began, 2)})
        try:
            settle()
        except Exception:
            return POISONED
    return 0


@dataclass
class Collection:
    """What came of a list of items.

    command  of a child; it reads the names of its items from its standard input, as JSON
    show     is called with each row as it comes
    """

    command: Sequence[str]
    env: Mapping[str, str]
    deadline: float
    item_limit_s: float
    show: Callable[[Row], None] = lambda row: None
    rows: dict[str, Row] = field(default_factory=dict)

    def collect(self, names: Sequence[str]) -> dict[str, Row]:
        """Run children until each item has a row: a result, an error, or `skipped`."""
        for _ in range(1 + MOST_RESTARTS):
            left = [name for name in names if name not in self.rows]
            if not left or time.time() > self.deadline:
                break
            before = len(self.rows)
            self._one_child(left)
            if len(self.rows) == before:
                break
        for name in names:
            if name not in self.rows:
                late = time.time() > self.deadline
                self._add({"item": name, "skipped": "no time left" if late else "no child ran it"})
        return self.rows

    def _add(self, row: Row) -> None:
        self.rows[row["item"]] = row
        self.show(row)

    def _one_child(self, names: list[str]) -> None:
        """Run one child to its end, and blame the item that it was at if it came early."""
        with tempfile.TemporaryFile("w+") as said:
            child = subprocess.Popen(
                self.command,
                env={**os.environ, **self.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                process_group=0,
            )
            lines: queue.Queue[str] = queue.Queue()
            reader = threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True)
            reader.start()
            try:
                assert child.stdin is not None
                child.stdin.write(json.dumps(names))
                child.stdin.close()
            except BrokenPipeError:
                pass  # it died at once, and its exit status says so
            current, reason = self._follow(child, lines)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and the compilers that it started
            status = child.wait()
            reader.join(PATIENCE_S)
            if not reader.is_alive() and child.stdout is not None:
                child.stdout.close()
            if status not in (0, POISONED) or reason is not None:
                said.seek(0)
                reason = reason or f"the process ended with {status}"
                row = {"item": current or names[0], "error": reason, "kind": "Died"}
                self._add(row | {"trace": said.read()[-2000:]})

    def _follow(
        self, child: subprocess.Popen[str], lines: queue.Queue[str]
    ) -> tuple[str | None, str | None]:
        """Take rows until the child ends or must; return the item it was at, and why it must."""
        current, heard = None, time.time()
        while True:
            ended = child.poll() is not None
            try:
                line = lines.get(timeout=PATIENCE_S)
            except queue.Empty:
                if ended:  # before the last look, so nothing more comes
                    return current, None
                if time.time() > self.deadline:
                    return current, "the time was up"
                if time.time() - heard > self.item_limit_s:
                    return current, f"it took longer than {self.item_limit_s:.0f} s"
                continue
            if not line.startswith(MARK):
                continue
            heard = time.time()
            row = json.loads(line[len(MARK) :])
            if row.get("begun"):
                current = row["item"]
                continue
            current = None
            self._add(row)


def _pass_on(stream: IO[str], lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)


def names_from_parent() -> list[str]:
    """In the child: read which items to run."""
    names: list[str] = json.load(sys.stdin)
    return names
