"""Work that ends when its client goes away.

Owns: watching the connection while something runs.  Does not know: what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

_BURST = 3  # asyncio warns of each write to a lost connection from the fifth on; an end is two


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise ClientDisconnect if the client goes away.

    Call it after the request's body was read whole.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for either in (task, gone):
            either.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one for each piece of `events`, which is closed whatever happens.

    is_framed  whether the pieces are whole events already, as those with names are; else each is
               the text of one
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, is_framed: bool = False) -> None:
        self.events = events
        self._is_framed = is_framed
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes away."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            return
        finally:  # also where nothing was sent, so that `_send_all` has closed nothing
            await self.events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self.events):
            num_sent = 1
            async for event in self.events:
                body = event if self._is_framed else b"data: " + event + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
                num_sent += 1
                if num_sent % _BURST == 0:  # events that wait already would keep the loop from
                    await asyncio.sleep(0)  # other streams, and from seeing that this client left
        await send({"type": "http.response.body", "body": b"", "more_body": False})
