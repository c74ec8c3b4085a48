"""Readers of the tree's feed, as a page is one.

Owns: from the bytes of a stream to events, and keeping the rows that they tell of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import msgspec


class Event(NamedTuple):
    """One event; `seq` is its id, None where it has none."""

    name: str
    seq: int | None
    data: Any


def event_of(text: str) -> Event:
    """Read one framed event."""
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n"))
    seq = fields.get("id")
    return Event(fields["event"], seq and int(seq), msgspec.json.decode(fields["data"]))


def events_of(answer: httpx.Response) -> Iterator[Event]:
    """Iterate over the events of a stream."""
    assert answer.status_code == 200, answer.read()
    lines: list[str] = []
    for line in answer.iter_lines():
        if line:
            lines.append(line)
        else:
            yield event_of("\n".join(lines))
            lines = []


class Watcher:
    """Keeps what the events of a feed tell of.

    rows     by id: each a dict of its columns, the namespace as its label
    samples  those that came
    """

    def __init__(self) -> None:
        self.seq = 0
        self.num_snapshots = 0
        self.rows: dict[int, dict[str, Any]] = {}
        self.samples: list[Any] = []

    def take(self, event: Event) -> None:
        """Take one event."""
        if event.name == "sample":
            self.samples.append(event.data)
            return
        assert event.data["seq"] == event.seq
        assert event.seq is not None
        if event.name == "snapshot":
            self.num_snapshots += 1
            self.rows = {}
            self.samples.append(event.data["sample"])
        else:
            assert event.name == "change"
            assert event.seq == self.seq + 1
        self.seq = event.seq
        for node_id in event.data.get("removed", ()):
            del self.rows[node_id]
        nodes = event.data["nodes"]
        labels = nodes.pop("namespaces")
        for values in zip(*nodes.values(), strict=True):
            row = dict(zip(nodes, values, strict=True))
            row["namespace"] = labels[row["namespace"]]["label"]
            self.rows[row["id"]] = row

    def edges(self) -> list[int]:
        """Tokens of each edge, sorted; roots have none."""
        return sorted(row["tokens"] for row in self.rows.values())


def snapshot(http: httpx.Client, **options: Any) -> Watcher:
    """Open a feed, take its first event, and close it."""
    watcher = Watcher()
    with http.stream("GET", "/tree/feed", **options) as answer:
        watcher.take(next(events_of(answer)))
    return watcher
