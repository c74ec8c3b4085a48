"""KV events over ZeroMQ, as vLLM sends them.  Needs the optional extra `events`.

Owns: the sockets, the numbers of messages, which of them are kept for replay, and one thread.  Does
not know: what an event means, or who reads.
Idea: the engine's thread hands over values and goes on.  Everything that can wait, from encoding to
sockets, belongs to a thread of its own, and a reader that is slow or away only loses messages,
which it may ask for again.

    published  topic | number, 8 bytes, big-endian | message
    replay     asked [b"", number], answers [b"", topic, number, message] …, then
               [b"", b"", −1, b""]

Source: vLLM's `ZmqEventPublisher`, whose frames these are.
"""

from __future__ import annotations

import logging
import queue
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from radixcache.events import Event, EventRecorder, encode_batch
from runtime.errors import InvalidSetting, PortTaken

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""What stands for a number behind the last message of a replay."""

_LINGER_MS = 1000  # for which the end of the process waits for readers to take what was sent
_MAX_ASKED_BYTES = 4096  # of what readers send: numbers and topics
_TCP = re.compile(r"tcp://[^/]+:(\*|\d{1,5})")
_LAST_PORT = 65535  # beyond which ZeroMQ begins again at 0

_log = logging.getLogger("radixcache.events")


class KVEventPublisher:
    """Sends what a recorder notes to whoever subscribes.

    recorder         listens to the engine's cache, from its begin on
    endpoint         where it is published, such as tcp://127.0.0.1:5557; `*` or 0 for a free port
    replay_endpoint  where readers ask for what they missed; None: nowhere
    topic            what subscribers filter by
    buffer           messages kept for replay, and for each reader that falls behind
    clock            seconds since 1970

    `turned` and `ended` belong to the engine's thread: about 20 µs where something was noted, else
    0.2.  `close` belongs to whoever made this.  Raises InvalidSetting for an endpoint that is none,
    PortTaken for one that can't be had.

    `endpoint` and `replay_endpoint` name the ports that were found.
    """

    def __init__(
        self,
        recorder: EventRecorder,
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        buffer: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if buffer < 1:
            raise InvalidSetting(f"{buffer} messages are kept for replay: at least 1")
        self.recorder = recorder
        self._topic = topic.encode()
        self._clock = clock
        self._handed: queue.SimpleQueue[tuple[float, list[Event]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._num_sent = 0
        self._is_open = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._published = self._bind(zmq.PUB, endpoint, most=buffer)
            self._replay = None
            if replay_endpoint is not None:  # with room for a whole replay and its end
                self._replay = self._bind(zmq.ROUTER, replay_endpoint, most=buffer + 1)
        except Exception:
            self._context.destroy(linger=0)
            raise
        # Read here, as from now on the sockets are the thread's.
        self.endpoint = _endpoint_of(self._published)
        self.replay_endpoint = None if self._replay is None else _endpoint_of(self._replay)
        self._bell, self._ringing = socket.socketpair()
        self._bell.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="KV events", daemon=True)
        self._thread.start()

    def turned(self) -> None:
        """Hand over what was noted since the last time; never waits, never raises."""
        if self.recorder.num_pending:
            self._hand_over(self.recorder.take())

    def ended(self) -> None:
        """Tell readers that no block counts any more: the engine has stopped, or broke down."""
        self.recorder.cleared()
        self._hand_over(self.recorder.take())

    def close(self) -> None:
        """Send what was handed over, and let go of the sockets; waits a second for readers."""
        self._handed.put(None)
        self._ring()
        self._thread.join()
        self._bell.close()

    def _hand_over(self, events: list[Event]) -> None:
        if self._is_open:
            self._handed.put((self._clock(), events))
            self._ring()

    def _ring(self) -> None:
        # A bell that is full rings already, and one that is gone has nobody to hear it.
        with suppress(OSError):
            self._bell.send(b"\0")

    def _bind(self, kind: int, endpoint: str, *, most: int) -> zmq.Socket[bytes]:
        if not _is_endpoint(endpoint):
            raise InvalidSetting(
                f"KV events can't be sent to {endpoint!r}: give an endpoint such as "
                "tcp://127.0.0.1:5557"
            )
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, most)
        bound.setsockopt(zmq.LINGER, _LINGER_MS)
        bound.setsockopt(zmq.MAXMSGSIZE, _MAX_ASKED_BYTES)
        bound.setsockopt(zmq.IPV6, "[" in endpoint)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise PortTaken(
                f"KV events can't be sent from {endpoint}: {error.strerror}; choose another "
                "endpoint"
            ) from None
        return bound

    def _run(self) -> None:
        """The thread: send what is handed over, answer who missed something."""
        poller = zmq.Poller()
        poller.register(self._ringing, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while self._is_open:
                ready = dict(poller.poll())
                if self._ringing.fileno() in ready:
                    self._ringing.recv(4096)
                    self._send_all()
                if self._replay is not None and self._replay in ready:
                    self._answer(self._replay)
        except Exception:
            _log.exception("KV events are not sent any more")
        finally:
            self._is_open = False
            self._ringing.close()
            self._context.destroy()

    def _send_all(self) -> None:
        with suppress(queue.Empty):
            while True:
                handed = self._handed.get_nowait()
                if handed is None:
                    self._is_open = False
                    return
                at, events = handed
                message = encode_batch(events, at, as_arrays=self.recorder.as_arrays)
                number = self._num_sent.to_bytes(8, "big")
                self._num_sent += 1
                self._kept.append((number, message))
                self._published.send_multipart((self._topic, number, message))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send a reader the messages that are kept, from the number on that it asks for."""
        asked = replay.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            _log.warning("a request for replay has another form than [b'', 8 bytes]: left out")
            return
        reader, _, first = asked
        for number, message in self._kept:
            if number >= first:  # big-endian, so bytes compare as numbers do
                replay.send_multipart((reader, b"", self._topic, number, message), zmq.NOBLOCK)
        replay.send_multipart((reader, b"", b"", END_OF_REPLAY, b""), zmq.NOBLOCK)


def _is_endpoint(text: str) -> bool:
    tcp = _TCP.fullmatch(text)
    if tcp is None:
        return text.startswith("ipc://")
    return tcp[1] == "*" or int(tcp[1]) <= _LAST_PORT


def _endpoint_of(bound: zmq.Socket[bytes]) -> str:
    return bytes(bound.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
