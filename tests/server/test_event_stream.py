"""A stream of events gives the loop its turn before asyncio warns of writes to a lost client."""

from __future__ import annotations

import asyncio
from asyncio import constants
from collections.abc import AsyncGenerator

import pytest

from runtime.server.disconnect import EventStream

# A connection that is lost counts one, and each write to it one more; the next one warns.
MOST_WRITES = constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES - 1


@pytest.mark.parametrize("num_events", range(9))
def test_events_that_wait_already_leave_the_loop_its_turn(num_events: int) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for i in range(num_events):
            yield str(i).encode()

    bursts: list[int] = [0]

    async def send(message: dict[str, object]) -> None:
        is_last = message["type"] == "http.response.body" and not message["more_body"]
        bursts[-1] += 2 if is_last else 1  # uvicorn writes an end's body and its chunk by itself

    async def receive() -> dict[str, object]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never done")

    async def watch() -> None:
        while True:
            bursts.append(0)
            await asyncio.sleep(0)

    async def play() -> None:
        watcher = asyncio.ensure_future(watch())
        await EventStream(events())({"type": "http"}, receive, send)  # type: ignore[arg-type]
        watcher.cancel()

    asyncio.run(play())
    assert sum(bursts) == num_events + 3
    assert max(bursts) <= MOST_WRITES
