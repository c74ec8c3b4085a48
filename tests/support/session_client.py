"""Sessions over HTTP as a client sees them, and a clock for the cache behind them.

Owns: the calls, and what it takes to be in the middle of one.  Does not know: what is tested.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from tests.support.served import HashExecutor

USER = {"role": "user", "content": "Hello"}
FOUR = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG = FOUR | {"max_tokens": 900}


class Clock:
    """The cache's clock, turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


class SessionClient:
    """One session, by its URL."""

    def __init__(self, http: httpx.Client, session: dict[str, Any]) -> None:
        self.http = http
        self.path = f"/v1/sessions/{session['id']}"
        self.id: str = session["id"]

    @classmethod
    def open(cls, http: httpx.Client, **body: Any) -> SessionClient:
        """Create a session."""
        answer = http.post("/v1/sessions", json=body)
        assert answer.status_code == 200, answer.text
        return cls(http, answer.json())

    def post(self, verb: str, status: int = 200, **body: Any) -> dict[str, Any]:
        """Call a verb; expect a status."""
        answer = self.http.post(f"{self.path}/{verb}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def state(self) -> dict[str, Any]:
        """What the server says of it."""
        return self.http.get(self.path).json()  # type: ignore[no-any-return]

    def settled(self) -> dict[str, Any]:
        """Its state once no turn is under way any more."""
        for _ in range(500):
            if not (state := self.state())["is_busy"]:
                return state
            time.sleep(0.01)
        raise AssertionError("the turn does not end")

    def close(self) -> dict[str, Any]:
        """Delete it."""
        return self.http.delete(self.path).json()  # type: ignore[no-any-return]


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events, checked to end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def slow(runtime: Runtime, step_s: float) -> None:
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    executor.step_s = step_s


def leave(session: SessionClient, *, stream: bool) -> None:
    """Ask for a long turn, and go away in the middle of it."""
    path, body = f"{session.path}/generate", LONG | {"stream": stream}
    if not stream:
        with pytest.raises(httpx.ReadTimeout):
            session.http.post(path, json=body, timeout=0.3)
        return
    with session.http.stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(4):
            next(lines)


def begin(session: SessionClient, *, stream: bool) -> tuple[threading.Thread, list[httpx.Response]]:
    """Let somebody else begin a long turn; return once it is under way."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = LONG | {"stream": stream}
        answers.append(httpx.post(url, json=body, timeout=30))

    url = str(session.http.base_url.join(f"{session.path}/generate"))
    thread = threading.Thread(target=ask)
    thread.start()
    while not session.state()["is_busy"]:
        time.sleep(0.005)
    return thread, answers
