"""Reading a server's feed of its tree, again and again, on a thread of its own.

Owns: the connection, its events as records, and when to try again.  Does not know: the tree, the
screen.
Idea: whatever happens to the connection is an event like all others, so whoever draws has one queue
to look at, and a feed that was lost begins with a snapshot again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from typing import Protocol

import msgspec

from runtime.errors import InvalidRequest, NoAnswer
from runtime.top.model import Change, Snapshot
from runtime.tree.records import Sample

SILENCE_S = 10.0
"""Seconds without an event after which a connection counts as lost; a sample comes each second."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0


class Lost(msgspec.Struct, frozen=True):
    """There is no connection, and the next attempt is so many seconds away."""

    why: str
    wait_s: float


class Refused(msgspec.Struct, frozen=True):
    """The server wants no more attempts: a key is wrong, or it has no feed."""

    why: str


Event = Snapshot | Change | Sample | Lost | Refused
"""What comes of a feed."""

_KINDS = {"snapshot": Snapshot, "change": Change, "sample": Sample}


class Asked(Protocol):
    """Whoever opens a path of the server."""

    def open(self, path: str, *, timeout_s: float) -> HTTPResponse:
        """Return the answer.  Raises InvalidRequest, NoAnswer."""


class Lines(Protocol):
    """Whatever gives lines."""

    def readline(self) -> bytes:
        """Return the next line with its end; nothing at the end of all."""


def events_of(answer: Lines) -> Iterator[Snapshot | Change | Sample]:
    """Yield the events of an open feed until it ends; those of other kinds are left out.

    Raises OSError or HTTPException where it breaks off, msgspec.DecodeError for what is no event.
    """
    name, lines = "", []
    while line := answer.readline():
        field, _, value = line.rstrip(b"\r\n").partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            lines.append(value)
        elif not line.strip():
            if name in _KINDS and lines:
                yield msgspec.json.decode(b"\n".join(lines), type=_KINDS[name])
            name, lines = "", []


class FeedThread:
    """Reads a feed until it is closed, and puts what comes into `events`.

    server  is asked for the feed
    wait    waits so many seconds, and returns True where it was told to stop; None: by the clock
    """

    def __init__(self, server: Asked, *, wait: Callable[[float], bool] | None = None) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._server = server
        self._stop = threading.Event()
        self._wait = wait or self._stop.wait
        self._again = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def reconnect(self) -> None:
        """Begin anew with a snapshot, within a second."""
        self._again.set()

    def close(self) -> None:
        """Read no more; what blocks in a read ends by itself, and holds nobody up."""
        self._stop.set()

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                for event in self._read():
                    failures = 0
                    self.events.put(event)
                    if self._stop.is_set() or self._again.is_set():
                        break
                if self._again.is_set():
                    self._again.clear()
                    continue
                why = "the server ended the feed"
            except InvalidRequest as error:
                self.events.put(Refused(str(error)))
                return
            except (NoAnswer, OSError, HTTPException, ValueError) as error:
                why = str(error) or type(error).__name__
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**failures)
            failures = min(failures + 1, 10)
            self.events.put(Lost(why, wait_s))
            if self._wait(wait_s):
                return

    def _read(self) -> Iterator[Event]:
        with self._server.open("/tree/feed", timeout_s=SILENCE_S) as answer:
            yield from events_of(answer)
