"""CPU seconds and memory of a server: its process and all that came from it.

Owns: reading /proc.  Does not know: what the processes do.
Idea: the machine is shared, so a server's own CPU time is told beside the wall clock, and what
everybody else took beside that.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What was used while a meter ran.

    cpu_s         CPU seconds of the process tree, children that ended included
    foreign_s     CPU seconds of all other processes but this one
    client_s      CPU seconds of this process, which plays the clients
    peak_rss_mb   most resident memory, summed over the tree: pages that two share count twice
    """

    cpu_s: float
    foreign_s: float
    client_s: float
    peak_rss_mb: float


class _Process(msgspec.Struct, frozen=True):
    parent: int
    cpu_s: float
    rss_bytes: int


class Meter:
    """Measures a process tree from `start` to `stop`; samples its memory on a thread of its own."""

    def __init__(self, pid: int, *, period_s: float = 0.5) -> None:
        self._pid = pid
        self._period_s = period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._peak = 0

    def start(self) -> Meter:
        """Begin."""
        self._cpu, self._busy, self._client = self._look(), _busy_seconds(), _client_seconds()
        self._thread.start()
        return self

    def stop(self) -> Usage:
        """End, and return what was used."""
        self._ended.set()
        self._thread.join()
        cpu = self._look() - self._cpu
        client = _client_seconds() - self._client
        busy = _busy_seconds() - self._busy
        return Usage(
            cpu_s=round(cpu, 2),
            foreign_s=round(max(0.0, busy - cpu - client), 2),
            client_s=round(client, 2),
            peak_rss_mb=round(self._peak / 1e6, 1),
        )

    def _sample(self) -> None:
        while not self._ended.wait(self._period_s):
            self._look()

    def _look(self) -> float:
        tree = process_tree(self._pid)
        self._peak = max(self._peak, sum(process.rss_bytes for process in tree.values()))
        return sum(process.cpu_s for process in tree.values())


def process_tree(pid: int) -> dict[int, _Process]:
    """Return a process and its descendants by process id; empty where it ended."""
    everyone: dict[int, _Process] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (process := _read(folder)) is not None:
            everyone[int(folder.name)] = process
            children.setdefault(process.parent, []).append(int(folder.name))
    found, left = {}, [pid]
    while left:
        if (at := left.pop()) in everyone:
            found[at] = everyone[at]
            left += children.get(at, [])
    return found


def _read(folder: Path) -> _Process | None:
    try:
        line = (folder / "stat").read_text()
    except OSError:  # it has ended meanwhile
        return None
    fields = line[line.rindex(")") + 2 :].split()  # the name before may hold anything
    ticks = sum(map(int, fields[11:15]))  # user and system, its own and its ended children's
    return _Process(int(fields[1]), ticks * _TICK_S, int(fields[21]) * _PAGE)


def _busy_seconds() -> float:
    """CPU seconds that the machine spent on anything, from /proc/stat."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, *interrupts = map(int, lines.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) * _TICK_S


def _client_seconds() -> float:
    times = os.times()
    return times.user + times.system
