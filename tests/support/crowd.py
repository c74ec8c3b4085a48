"""A crowd of HTTP clients on one event loop, part of which leave before their answer is whole.

Owns: what a client sends, when it leaves, what came of it and how long it took.  Does not know:
what is asked, the server.
Idea: one connection a request, read as bytes and looked at a line at a time, so that hundreds of
clients cost little beside the server they share a machine with.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

import msgspec

LEAVINGS = ("while sending", "before headers", "in prefill", "mid-stream")
"""Moments at which a client may go away, each as likely as the others."""

_LOST = (ConnectionError, asyncio.IncompleteReadError)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed request.

    path       of the endpoint
    body       without `stream`
    follow_up  what the user says to the answer of a chat, in a request that comes after this one
    """

    path: str
    body: dict[str, Any]
    follow_up: str = ""

    def answered(self, text: str) -> Ask:
        """Return the next turn of the conversation."""
        turns = [("assistant", text), ("user", self.follow_up)]
        messages = [{"role": role, "content": said} for role, said in turns]
        return Ask(path=self.path, body=self.body | {"messages": self.body["messages"] + messages})


class Visit(msgspec.Struct, kw_only=True):
    """What came of a request.

    outcome  "whole", "left: <where>", "status <code>", "error event", "cut": the server ended the
             stream before its end, or "lost": the connection broke
    ttft_s   from sending to the first text; None where none came
    gaps_s   between two pieces of text
    """

    outcome: str
    ttft_s: float | None = None
    gaps_s: list[float] = []
    text: str = ""


class Crowd:
    """So many clients at once; each takes the next request when it has done with its last.

    port         of the server on this machine
    leave_share  part of the requests whose client leaves early
    patience_s   the longest that a client which leaves in prefill looks at an empty stream
    seed         of who leaves, and when

    A client that is told 429 comes again after about a second, and that is counted.
    """

    def __init__(
        self,
        port: int,
        *,
        num_clients: int,
        leave_share: float = 0.3,
        patience_s: float = 8.0,
        seed: int = 0,
    ) -> None:
        self._port = port
        self._num_clients = num_clients
        self._leave_share = leave_share
        self._patience_s = patience_s
        self._dice = random.Random(seed)
        self._waiting_asks: list[Ask] = []
        self.visits: list[Visit] = []
        self.refusals = 0

    @property
    def outcomes(self) -> Counter[str]:
        """How many visits ended how."""
        return Counter(visit.outcome for visit in self.visits)

    async def run(self, asks: Iterable[Ask]) -> None:
        """Send all requests, and those that follow from their answers."""
        coming = iter(asks)
        await asyncio.gather(*(self._client(coming) for _ in range(self._num_clients)))

    async def _client(self, coming: Any) -> None:
        while True:
            ask = self._waiting_asks.pop(0) if self._waiting_asks else next(coming, None)
            if ask is None:
                return
            leaves = self._dice.random() < self._leave_share
            where = self._dice.choice(LEAVINGS) if leaves else ""
            visit = await self._visit(ask, where)
            while visit.outcome == "status 429":
                self.refusals += 1
                await asyncio.sleep(self._dice.uniform(1, 2))
                visit = await self._visit(ask, where)
            self.visits.append(visit)
            if ask.follow_up and visit.outcome == "whole":
                self._waiting_asks.append(ask.answered(visit.text))

    async def _visit(self, ask: Ask, where: str) -> Visit:
        began = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return Visit(outcome="lost")
        try:
            return await self._talk(reader, writer, _request(ask), where, began)
        except _LOST:
            return Visit(outcome="lost")
        finally:
            writer.transport.abort()

    async def _talk(
        self, reader: Any, writer: Any, request: bytes, where: str, began: float
    ) -> Visit:
        if where == "while sending":
            writer.write(request[: self._dice.randrange(1, len(request))])
            await asyncio.sleep(self._dice.uniform(0, 0.05))
            return Visit(outcome=f"left: {where}")
        writer.write(request)
        if where == "before headers":
            await asyncio.sleep(self._dice.uniform(0, 0.005))
            return Visit(outcome=f"left: {where}")
        head = await reader.readuntil(b"\r\n\r\n")
        status = head[9:12].decode()
        if status != "200":
            return Visit(outcome=f"status {status}")
        news = Visit(outcome="cut", gaps_s=[])
        if where != "in prefill":
            most = self._dice.randrange(1, 4) if where else 0
            return await _read(reader, news, began, most_pieces=most)
        patience = self._dice.uniform(0, 1) ** 3 * self._patience_s
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await _read(reader, news, began, most_pieces=1)
        return Visit(outcome=f"left: {where}")


async def _read(reader: Any, visit: Visit, began: float, *, most_pieces: int) -> Visit:
    """Read a stream to its end, or to as many pieces of text as the client stays for (0: all)."""
    last, num_pieces = began, 0
    async for event in _events(reader):
        if event is None:
            visit.outcome = "whole"
            return visit
        if "error" in event:
            visit.outcome = "error event"
            return visit
        text = _text_of(event)
        if not text:
            continue
        now = time.perf_counter()
        if visit.ttft_s is None:
            visit.ttft_s = now - began
        else:
            visit.gaps_s.append(now - last)
        last, num_pieces = now, num_pieces + 1
        visit.text += text
        if num_pieces == most_pieces:
            visit.outcome = "left: mid-stream"
            return visit
    return visit


async def _events(reader: Any) -> AsyncIterator[dict[str, Any] | None]:
    """Iterate over what the events hold; None stands for the proper end."""
    while line := await reader.readline():
        if line == b"data: [DONE]\n":
            yield None
        elif line.startswith(b"data: "):
            event = msgspec.json.decode(line[6:])
            yield None if event.get("type") == "message_stop" else event


def _text_of(event: dict[str, Any]) -> str:
    """The new text of an event, in OpenAI's words or Anthropic's."""
    for choice in event.get("choices", ()):
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return str(event.get("delta", {}).get("text", ""))


def _request(ask: Ask) -> bytes:
    body = msgspec.json.encode(ask.body | {"stream": True})
    head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
