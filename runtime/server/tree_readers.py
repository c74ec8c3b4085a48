"""Who reads the feed of the tree: what waits for each, and how an event is written.

Owns: the queues, their limits, and the form of events.  Does not know: the engine, or HTTP.
Idea: an event is encoded once for all who see the same.  What waits for a reader is bounded: one
who falls behind loses what waits, and gets a new snapshot when it has room again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakSet

import msgspec

from runtime.tree.mirror import Mirror, SeenRow, encode_nodes

MAX_EVENTS, MAX_BYTES = 64, 4 << 20
"""What may wait for one reader; one event alone may be larger."""


class Reader:
    """One open feed: what waits to be sent to it; for one event loop.

    is_behind  True where it needs a snapshot: at the beginning, and after it was too slow
    has_ended  True once nothing more comes
    """

    def __init__(self) -> None:
        self.is_behind = True
        self.has_ended = False
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: bytes) -> None:
        """Queue an event; where too much waits, all of it is dropped for a new snapshot."""
        if self.is_behind:
            return
        self._events.append(event)
        self._num_bytes += len(event)
        if len(self) > MAX_EVENTS or (len(self) > 1 and self._num_bytes > MAX_BYTES):
            self._clear()
            self.is_behind = True
        self._news.set()

    def begin(self) -> None:
        """From now on queue what follows; a snapshot of this moment is on its way."""
        self._clear()
        self.is_behind = False

    def end(self) -> None:
        """Let the reader go."""
        self.has_ended = True
        self._news.set()

    async def next(self) -> bytes | None:
        """Return the next event; None where a new snapshot is due, or the feed has ended."""
        while not (self._events or self.is_behind or self.has_ended):
            self._news.clear()
            await self._news.wait()
        if self.is_behind or self.has_ended:
            return None
        event = self._events.popleft()
        self._num_bytes -= len(event)
        return event

    def _clear(self) -> None:
        self._events.clear()
        self._num_bytes = 0


class Audience:
    """All readers that see the same: everything, or one tenant's own.

    tenant     whose; None for everything
    last_used  when somebody asked last, in seconds of the server's clock
    """

    def __init__(self, tenant: str | None, mirror: Mirror, *, now: float) -> None:
        self.tenant = tenant
        self.mirror = mirror
        self.readers: WeakSet[Reader] = WeakSet()  # a feed that nobody began to read just goes
        self.last_used = now

    def send(self, event: bytes) -> None:
        """Queue an event for every reader."""
        for reader in self.readers:
            reader.put(event)


def framed(name: str, body: bytes, seq: int | None = None) -> bytes:
    """Return a server-sent event; `seq` is its id.

    >>> framed("change", b"{}", 7)
    b'event: change\\nid: 7\\ndata: {}\\n\\n'
    """
    number = b"" if seq is None else b"id: %d\n" % seq
    return b"event: %b\n%bdata: %b\n\n" % (name.encode(), number, body)


def change_event(mirror: Mirror, rows: list[SeenRow], removed: list[int], *, time: float) -> bytes:
    """Return the event that takes a reader from the state before to `mirror.seq`."""
    head = msgspec.json.encode({"seq": mirror.seq, "time": time, "removed": removed})
    body = head[:-1] + b',"nodes":' + encode_nodes(rows, mirror.namespaces) + b"}"
    return framed("change", body, mirror.seq)
