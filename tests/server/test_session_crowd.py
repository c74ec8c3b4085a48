"""Many sessions at once whose clients do as they like; and answers that nobody waits for.

In the end no turn is left, nothing is held, and every session that was not closed still works.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from runtime.loading import Runtime
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from tests.support.served import assert_nothing_held, quick_runtime, serving
from tests.support.session_client import FOUR, slow

LONG = FOUR | {"max_tokens": 200, "stream": True}


class Agent:
    """Somebody with sessions of its own, who is not always polite."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http = http
        self._dice = random.Random(seed)
        self._sessions: list[str] = []
        self.statuses: set[int] = set()

    async def live(self, num_steps: int) -> None:
        """Do something so many times, then check that what is left works, and close it."""
        await self._post("/v1/sessions", {"prompt": "Once upon a time " * 8})
        for _ in range(num_steps):
            path = self._dice.choice(self._sessions)
            await self._dice.choice(self.DEEDS)(self, path)
        for path in self._sessions:
            while (await self._http.get(path)).json()["is_busy"]:
                await asyncio.sleep(0.01)
            answer = await self._http.post(f"{path}/generate", json=FOUR | {"max_tokens": 1})
            assert answer.status_code == 200, answer.text
            assert (await self._http.delete(path)).status_code == 200

    async def _post(self, path: str, body: Any) -> httpx.Response:
        answer = await self._http.post(path, json=body)
        self.statuses.add(answer.status_code)
        if answer.status_code == 200 and answer.json().get("object") == "session":
            path = f"/v1/sessions/{answer.json()['id']}"
            if path not in self._sessions:
                self._sessions.append(path)
        return answer

    async def _generate(self, path: str) -> None:
        await self._post(f"{path}/generate", FOUR)

    async def _leave(self, path: str) -> None:
        num_events = self._dice.randrange(5)
        async with self._http.stream("POST", f"{path}/generate", json=LONG) as answer:
            self.statuses.add(answer.status_code)
            lines = answer.aiter_lines()
            for _ in range(num_events):
                await anext(lines, None)

    async def _give_up(self, path: str) -> None:
        waiting = asyncio.create_task(self._http.post(f"{path}/generate", json=LONG))
        await asyncio.sleep(self._dice.random() / 50)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def _fork(self, path: str) -> None:
        if len(self._sessions) < 4:
            await self._post(f"{path}/fork", {})

    async def _hold(self, path: str) -> None:
        await self._post(f"{path}/hold", {"seconds": self._dice.choice([0, 5, 500])})

    async def _append(self, path: str) -> None:
        await self._post(f"{path}/append", {"prompt": f" and {self._dice.random()}"})

    async def _score(self, path: str) -> None:
        await self._post(f"{path}/score", {"choices": [" yes", " no"]})

    async def _close(self, path: str) -> None:
        if len(self._sessions) > 1:
            self._sessions.remove(path)
            assert (await self._http.delete(path)).status_code == 200

    async def _close_in_the_middle(self, path: str) -> None:
        if len(self._sessions) > 1:
            self._sessions.remove(path)
            answer, closed = await asyncio.gather(
                self._http.post(f"{path}/generate", json=FOUR | {"max_tokens": 200}),
                self._http.delete(path),
            )
            self.statuses.add(answer.status_code)
            assert closed.status_code == 200

    DEEDS = (
        _generate,
        _leave,
        _give_up,
        _fork,
        _hold,
        _append,
        _score,
        _close,
        _close_in_the_middle,
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_a_crowd_of_agents_leaves_nothing_behind(seed: int) -> None:
    runtime = quick_runtime(num_blocks=128, max_running=4)
    slow(runtime, 0.001)

    async def crowd(url: str) -> list[Agent]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            agents = [Agent(http, seed * 1000 + i) for i in range(12)]
            await asyncio.gather(*(agent.live(12) for agent in agents))
        return agents

    with serving(runtime) as url:
        agents = asyncio.run(crowd(url))
        seen = set().union(*(agent.statuses for agent in agents))
        assert seen <= {200, 400, 404, 409}  # 400: a branch as long as the model allows
        assert 200 in seen
    assert runtime.engine.stats().finished["abort"] > 0


async def _call(app: Starlette, method: str, path: str, body: bytes, *, gone: bool) -> list[Any]:
    """Call an application directly; `gone`: the client leaves before it reads anything."""
    sent: list[Any] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if received:
            return received.pop()
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if gone:
            raise OSError("nobody there")
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "app": app,
    }
    await app(scope, receive, send)
    return sent


def test_a_stream_whose_client_left_before_its_first_event_ends_its_turn() -> None:
    runtime: Runtime = quick_runtime()
    app = create_app(runtime, ServerConfig())
    long = b'{"stream": true, "max_tokens": 500, "ignore_eos": true}'

    async def play() -> None:
        async with app.router.lifespan_context(app):
            opened = await _call(app, "POST", "/v1/sessions", b'{"prompt": "Once"}', gone=False)
            session = opened[1]["body"].split(b'"')[3].decode()
            path = f"/v1/sessions/{session}"
            for _ in range(3):
                await _call(app, "POST", f"{path}/generate", long, gone=True)
            answer = await _call(app, "GET", path, b"", gone=False)
            assert b'"is_busy":false' in answer[1]["body"]

    asyncio.run(play())
    assert_nothing_held(runtime)
