"""Connections within bounds: what uvicorn has no limit for.

Owns: the timers of a connection, and uvicorn's settings.  Does not know: requests and answers.
Idea: uvicorn waits for headers, and for a client that doesn't read, as long as they like.  Both
have a moment when the waiting begins and one when it ends, so a timer between them is enough; a
token that is sent pays nothing.  What a client sends is bounded too: in how many pieces a body may
come, and how much of one is read that was answered already, as each piece costs the loop its time.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, NamedTuple

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.server.config import ServerConfig

MAX_PIECES = 16384
"""Chunks in which a body may come; each takes about 10 µs, however few bytes it has."""

BURST = 128
"""Connections that asyncio takes in at once; some six times as many are open before the first that
is too many is closed again."""

SPARE_FILES = 64
"""Files kept for all but connections: the model, logs, sockets of events."""

_log = logging.getLogger("radixcache")


class ConnectionRoom(NamedTuple):
    """How many connections the system lets a process have.

    num_files  that it must be allowed to open for them
    num_open   connections open at once; beyond, they are closed unanswered
    burst      connections taken in at once
    """

    num_files: int
    num_open: int
    burst: int


def connection_room(max_connections: int, *, max_files: int) -> ConnectionRoom:
    """Return the room for twice the connections that are served, or as much as files allow.

    A process without files to open takes nobody in, and tries and logs that without end.

    >>> connection_room(1000, max_files=1 << 20)
    ConnectionRoom(num_files=2832, num_open=2000, burst=128)
    >>> connection_room(1000, max_files=1024)
    ConnectionRoom(num_files=1024, num_open=576, burst=64)
    """
    burst = min(BURST, max_files // 16)
    spare = 6 * burst + SPARE_FILES
    num_open = max(1, min(2 * max_connections, max_files - spare))
    return ConnectionRoom(min(max_files, num_open + spare), num_open, burst)


def take_room(config: ServerConfig) -> ConnectionRoom:
    """Let this process open the files that its connections need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 30 if hard == resource.RLIM_INFINITY else hard
    room = connection_room(config.max_connections, max_files=most)
    if soft != resource.RLIM_INFINITY and soft < room.num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (room.num_files, hard))
    if room.num_open < config.max_connections:
        _log.warning(
            "%d connections at most, as the system lets this process open %d files: raise that "
            "limit (ulimit -Hn), or lower --max-connections",
            room.num_open,
            hard,
        )
    return room


def uvicorn_settings(app: Starlette, config: ServerConfig, **other: Any) -> uvicorn.Config:
    """Return what uvicorn is told, so that connections stay within the limits.

    Raises the process' own limit of open files where connections need more.
    """
    room = take_room(config)

    class Protocol(BoundedProtocol):
        limits = config
        max_open = room.num_open

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        h11_max_incomplete_event_size=config.max_header_bytes,
        limit_concurrency=config.max_connections + 1,  # uvicorn counts the one that asks
        backlog=room.burst,
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        timeout_graceful_shutdown=int(config.drain_s) + 5,
        access_log=False,  # our own has one line a request
        server_header=False,
        **other,
    )


class BoundedProtocol(H11Protocol):
    """An HTTP connection that is cut where its client lets it wait for too long.

    limits, max_open  set by a subclass, since uvicorn makes the instances
    """

    limits: ServerConfig
    max_open: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin: the first headers must be whole in time."""
        self._headers_due = _Due(self)
        self._write_due = _Due(self)
        self._num_unread = 0
        self.conn = _Requests(h11.SERVER, self.limits.max_header_bytes)
        super().connection_made(transport)
        # Whatever the client's side of the connection does not take counts as unread.
        transport.set_write_buffer_limits(0)
        if len(self.connections) > self.max_open:
            transport.abort()  # so many don't even send their headers, or 503 would have ended them
        else:
            self._headers_due.begin(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """End: nothing is waited for any more."""
        self._headers_due.end()
        self._write_due.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; the timer runs from a request's first byte to the end of its headers."""
        before = self.cycle
        if self._is_answered:
            self._num_unread += len(data)
        # As much as a body may have is read behind an answer too, so that the connection can go on
        # to the next request; of more, the client sees at once that nothing else will be answered,
        # and may read what was: the rest is dropped until it goes, or the timer cuts it.
        if self._num_unread <= self.limits.max_body_bytes:
            super().data_received(data)
        elif self.transport.can_write_eof():
            self.transport.write_eof()
        if self.cycle is not before:
            self._num_unread = 0
            self._headers_due.end()
        elif before is None or before.response_complete:
            self._headers_due.begin(self.limits.header_timeout_s)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; where an answer has begun already, close is all that is left."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # what its application answers goes nowhere
                self.cycle.message_event.set()
            super().send_400_response(msg)
        else:
            self.transport.close()

    @property
    def _is_answered(self) -> bool:
        """True while the rest of a body arrives whose request has its answer."""
        is_over = self.cycle is not None and self.cycle.response_complete
        return is_over and self.conn.their_state is h11.SEND_BODY

    def pause_writing(self) -> None:
        """The client's buffer is full: it must read on in time."""
        super().pause_writing()
        self._write_due.begin(self.limits.write_timeout_s)

    def resume_writing(self) -> None:
        """The client has read on."""
        self._write_due.end()
        super().resume_writing()


class _Requests(h11.Connection):
    """Reads requests; refuses those that a proxy may read otherwise, and bodies in crumbs.

    A request with two lengths is read by the chunked one, as RFC 9112 has it; a proxy that goes by
    the other one would take what is left for a request of somebody else (section 6.3).
    """

    _num_pieces = 0

    def next_event(self) -> Any:
        """Return the next event.  Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            if self._num_pieces > MAX_PIECES:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class _Due:
    """Cuts a connection unless `end` is called in time after `begin`."""

    __slots__ = ("_protocol", "_timer")

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Start the timer, unless it runs or the connection closes."""
        if self._timer is None and not self._protocol.transport.is_closing():
            self._timer = self._protocol.loop.call_later(seconds, self._cut)

    def end(self) -> None:
        """Stop the timer, if it runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self) -> None:
        self._protocol.transport.abort()
