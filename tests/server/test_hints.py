"""Hints over HTTP: what is held, what is released, what goes first; and why sessions missed."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import quick_runtime, serving, wait_until_idle
from tests.support.session_client import FOUR, USER, SessionClient, begin, slow

ONE, TWO = [7] * 48, [8] * 48


@pytest.fixture
def runtime() -> Runtime:
    return quick_runtime(num_blocks=16)


def ask(http: httpx.Client, prompt: Any, num: int = 1, **options: Any) -> int:
    """Serve a prompt; return how much of it was cached."""
    body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True} | options
    answer = http.post("/v1/completions", json=body).json()
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def hint(http: httpx.Client, verb: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = http.post(f"/cache/{verb}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_an_abandoned_prompt_makes_room_before_what_was_used_longer_ago(http: httpx.Client) -> None:
    for prompt in (ONE, TWO):
        ask(http, prompt)
    assert hint(http, "abandon", prompt=TWO) == {"abandoned_blocks": 3}
    ask(http, [9] * 190)
    assert ask(http, ONE) == 47
    assert ask(http, TWO) == 16  # of three blocks, two were needed


def test_what_is_retained_outlasts_others_until_it_is_released(http: httpx.Client) -> None:
    ask(http, ONE)
    held = hint(http, "retain", prompt=ONE, seconds=60, temperature=0.5)
    assert (held["held_tokens"], 0 < held["held_for_s"] <= 60) == (48, True)
    for token in (9, 10):
        ask(http, [token] * 190)
    assert ask(http, ONE) == 47
    assert hint(http, "release", id=held["id"]) == {"id": held["id"], "released": True}
    hint(http, "release", status=404, id=held["id"])
    for token in (9, 10):
        ask(http, [token] * 220)
    assert ask(http, ONE) == 0


def test_nothing_is_held_of_what_is_not_cached(http: httpx.Client) -> None:
    nothing = {"id": None, "held_tokens": 0, "held_for_s": 0.0}
    assert hint(http, "retain", prompt=ONE, seconds=60) == nothing
    ask(http, ONE)
    assert hint(http, "retain", prompt=ONE, seconds=60, cache_salt="x") == nothing
    assert hint(http, "abandon", prompt=ONE, cache_salt="x") == {"abandoned_blocks": 0}


def test_what_would_hold_nothing_is_no_session_too_many(runtime: Runtime) -> None:
    settings = ServerConfig(max_sessions=1)
    with (
        serving(runtime, settings=settings) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        ask(http, ONE)
        SessionClient.open(http)
        assert hint(http, "retain", prompt=TWO, seconds=60)["id"] is None
        assert hint(http, "retain", prompt=ONE, seconds=0)["id"] is None
        assert "close" in hint(http, "retain", 429, prompt=ONE, seconds=60)["error"]["message"]


def test_a_conversation_is_abandoned_with_its_last_reply(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Say a lot. " * 12}]
    body = {"messages": messages, "max_tokens": 40, "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert hint(http, "abandon", messages=messages)["abandoned_blocks"] == 0  # a reply goes on
    reply = answer["choices"][0]["message"]
    body = {"messages": [*messages, {"role": "assistant", "content": reply["content"]}]}
    tokens = answer["usage"]["total_tokens"]
    assert hint(http, "abandon", **body)["abandoned_blocks"] == tokens // 16


@pytest.mark.parametrize(
    ("verb", "body", "status"),
    [
        ("retain", {"prompt": ONE}, 400),
        ("retain", {"prompt": ONE, "seconds": -1}, 400),
        ("retain", {"prompt": ONE, "seconds": 4000}, 400),
        ("retain", {"seconds": 1}, 400),
        ("retain", {"prompt": ONE, "seconds": 1, "model": "x"}, 404),
        ("release", {"id": "sess-x"}, 404),
        ("release", {}, 400),
        ("abandon", {}, 400),
        ("abandon", {"prompt": ONE, "nonsense": 1}, 400),
        ("abandon", {"prompt": [49152]}, 400),
        ("retain", {"prompt": [49152], "seconds": 1}, 400),
    ],
)
def test_a_wrong_hint_is_refused_and_leaves_nothing_behind(
    http: httpx.Client, runtime: Runtime, verb: str, body: dict[str, Any], status: int
) -> None:
    ask(http, ONE)
    hint(http, verb, status=status, **body)
    assert runtime.engine.stats().cache.num_holds == 0


def test_no_tenant_holds_or_abandons_what_is_anothers() -> None:
    named = {name: Tenant(keys=(f"key-{name}-12345678",)) for name in ("a", "b")}
    tenants = Tenants(named, secret=b"s" * 32)
    with serving(quick_runtime(num_blocks=32), tenants=tenants) as url:
        a, b = (
            httpx.Client(base_url=url, headers={"x-api-key": f"key-{name}-12345678"})
            for name in ("a", "b")
        )
        with a, b:
            ask(a, ONE)
            assert hint(b, "abandon", prompt=ONE) == {"abandoned_blocks": 0}
            assert hint(b, "retain", prompt=ONE, seconds=9)["held_tokens"] == 0
            held = hint(a, "retain", prompt=ONE, seconds=9)
            hint(b, "release", status=404, id=held["id"])
            hint(a, "release", id=held["id"])


def test_a_sessions_answer_tells_why_its_branch_missed(http: httpx.Client) -> None:
    session = SessionClient.open(http, messages=[USER])
    explain = {"radixcache": {"explain": True}}
    first = session.post("generate", **FOUR | explain)["radixcache"]["explanations"]
    assert [report["cause"] for report in first] == ["never_seen"]
    assert "radixcache" not in session.post("generate", **FOUR)
    again = session.post("generate", **FOUR | explain)["radixcache"]["explanations"]
    assert again[0]["cached_tokens"] > 0
    with http.stream(
        "POST", session.path + "/generate", json=FOUR | explain | {"stream": True}
    ) as answer:
        assert answer.headers["x-radixcache-explain"].startswith("cause=")
        chunks = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert json.loads(chunks[-1].removeprefix("data: "))["radixcache"]["explanations"]


def test_a_session_that_is_closed_while_it_generates_is_abandoned_whole(
    http: httpx.Client, runtime: Runtime
) -> None:
    ask(http, ONE)
    session = SessionClient.open(http, prompt=TWO)
    slow(runtime, 0.01)
    thread, _ = begin(session, stream=True)
    while session.state()["cached_tokens"] < 48:
        time.sleep(0.005)
    session.close()
    thread.join()
    wait_until_idle(runtime)
    slow(runtime, 0.0)
    ask(http, [9] * 190)
    assert ask(http, ONE) == 47
    assert ask(http, TWO) < 48
