"""Sessions over HTTP: the life of one, whose it is, and what is left where something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import JSON, assert_nothing_held, quick_runtime, serving
from tests.support.session_client import (
    FOUR,
    USER,
    Clock,
    SessionClient,
    begin,
    events,
    leave,
    slow,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runtime(clock: Clock) -> Runtime:
    runtime = quick_runtime()
    runtime.engine.cache.deadlines.clock = clock
    return runtime


@pytest.fixture
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    """A client; sessions left open are closed with the server, which checks for leaks."""
    settings = ServerConfig(max_sessions=8, session_idle_s=60)
    with serving(runtime, settings=settings) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


def test_a_session_from_its_begin_to_its_end(runtime: Runtime, http: httpx.Client) -> None:
    session = SessionClient.open(http, prompt=[5] * 40)
    assert session.state()["num_tokens"] == 40
    answer = session.post("generate", **FOUR)
    assert answer["object"] == "text_completion"
    ids = answer["choices"][0]["token_ids"]
    assert (len(ids), answer["usage"]["prompt_tokens"]) == (4, 40)
    state = session.state()
    assert (state["num_tokens"], state["held_tokens"], state["parent"]) == (44, 32, None)
    assert state["held_for_s"] == state["expires_in_s"] == 60
    assert session.post("append", prompt=" and more")["num_tokens"] > 44
    twin = SessionClient(http, session.post("fork"))
    assert twin.state()["parent"] == session.id
    answer = twin.post("generate", **FOUR)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    scores = session.post("score", choices=[" yes", [7, 8]])
    assert [choice["num_tokens"] for choice in scores["choices"]] == [1, 2]
    assert scores["best"] == max((0, 1), key=lambda i: scores["choices"][i]["logprob"])
    assert session.post("hold", seconds=120)["expires_in_s"] == 120
    assert session.close() == {"id": session.id, "object": "session.deleted", "deleted": True}
    assert twin.close()["deleted"]
    assert_nothing_held(runtime)


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    session = SessionClient.open(http, prompt="Once upon a time")
    twin = SessionClient(http, session.post("fork"))
    fields = FOUR | {"logprobs": 1}
    whole = session.post("generate", **fields)["choices"][0]
    text = http.post(f"{twin.path}/generate", json=fields | {"stream": True}).text
    pieces = [chunk["choices"][0] for chunk in events(text)]
    assert "".join(piece["text"] for piece in pieces) == whole["text"] != ""
    assert [i for piece in pieces for i in piece.get("token_ids", [])] == whole["token_ids"]
    told = [value for piece in pieces for value in piece["logprobs"]["token_logprobs"]]
    assert told == whole["logprobs"]["token_logprobs"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert twin.state()["num_tokens"] == session.state()["num_tokens"]


def test_a_conversation_has_the_tokens_that_chat_would_send(
    runtime: Runtime, http: httpx.Client
) -> None:
    session = SessionClient.open(http, messages=[USER])
    reply = session.post("generate", **FOUR)["choices"][0]["text"]
    state = session.post("append", messages=[{"role": "user", "content": "Why?"}])
    said = [USER, {"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}]
    body = {"messages": said, "max_tokens": 1}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == state["num_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16


def test_a_turn_can_begin_as_soon_as_the_one_before_was_told_to_have_ended(
    http: httpx.Client,
) -> None:
    session = SessionClient.open(http, prompt="Once")
    for _ in range(10):
        body = FOUR | {"stream": True}
        with http.stream("POST", f"{session.path}/generate", json=body) as answer:
            for line in answer.iter_lines():
                if '"finish_reason":"length"' in line:
                    session.post("append", prompt=" more")


TENANTS = {"a": Tenant(keys=("key-of-a-1234",)), "b": Tenant(keys=("key-of-b-1234",), admin=True)}

CALLS: list[tuple[str, Callable[[SessionClient], httpx.Response]]] = [
    ("state", lambda s: s.http.get(s.path)),
    ("delete", lambda s: s.http.delete(s.path)),
    ("append", lambda s: s.http.post(f"{s.path}/append", json={"prompt": "x"})),
    ("generate", lambda s: s.http.post(f"{s.path}/generate", json=FOUR)),
    ("stream", lambda s: s.http.post(f"{s.path}/generate", json=FOUR | {"stream": True})),
    ("fork", lambda s: s.http.post(f"{s.path}/fork")),
    ("score", lambda s: s.http.post(f"{s.path}/score", json={"choices": ["x"]})),
    ("hold", lambda s: s.http.post(f"{s.path}/hold", json={"seconds": 5})),
]


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[name for name, _ in CALLS])
def test_what_is_not_there_any_more_and_what_is_anothers_look_the_same(
    runtime: Runtime, clock: Clock, call: Callable[[SessionClient], httpx.Response]
) -> None:
    tenants = Tenants(TENANTS, secret=b"s" * 16)
    keys = [{"Authorization": f"Bearer {TENANTS[name].keys[0]}"} for name in "ab"]
    settings = ServerConfig(session_idle_s=60)
    with (
        serving(runtime, settings=settings, tenants=tenants) as url,
        httpx.Client(base_url=url, headers=keys[0]) as a,
        httpx.Client(base_url=url, headers=keys[1]) as b,
    ):
        expired = SessionClient.open(b, prompt="x")
        clock.now += 61
        theirs = SessionClient.open(a, prompt="secret")
        closed = SessionClient.open(b, prompt="x")
        closed.close()
        foreign = SessionClient(b, {"id": theirs.id})
        never = SessionClient(b, {"id": "sess-0"})
        for session in (expired, closed, foreign, never):
            answer = call(session)
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("session_not_found", "session")
            assert "secret" not in answer.text
        assert theirs.state()["num_tokens"] > 0


def test_a_session_shares_within_its_salt_only(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": [5] * 40, "cache_salt": "mine"}
    SessionClient.open(http, **fields).post("generate", **FOUR)
    cached = []
    for body in (fields, fields | {"cache_salt": "other"}, {"prompt": [5] * 40}):
        usage = SessionClient.open(http, **body).post("generate", **FOUR)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [32, 0, 0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_turn_and_the_session_is_as_it_was(
    runtime: Runtime, http: httpx.Client, stream: bool
) -> None:
    session = SessionClient.open(http, messages=[USER])
    session.post("generate", **FOUR)
    before = session.state()
    slow(runtime, 0.02)
    leave(session, stream=stream)
    after = session.settled()
    for name in ("num_tokens", "held_tokens"):
        assert after[name] == before[name]
    assert runtime.engine.stats().finished["abort"] == 1
    slow(runtime, 0)
    assert session.post("generate", **FOUR)["choices"][0]["finish_reason"] == "length"


def test_while_it_generates_a_session_can_be_looked_at_and_forked_but_not_changed(
    runtime: Runtime, http: httpx.Client
) -> None:
    session = SessionClient.open(http, prompt="Once")
    before = session.state()["num_tokens"]
    slow(runtime, 0.02)
    thread, _ = begin(session, stream=False)
    for verb, body in (
        ("generate", FOUR),
        ("generate", FOUR | {"stream": True}),
        ("append", {"prompt": "x"}),
        ("score", {"choices": ["x"]}),
    ):
        assert session.post(verb, 409, **body)["error"]["code"] == "session_busy"
    assert session.post("fork")["num_tokens"] == before
    session.close()
    thread.join()


@pytest.mark.parametrize("stream", [True, False])
def test_closing_a_session_ends_what_it_is_doing_and_says_so(
    runtime: Runtime, http: httpx.Client, stream: bool
) -> None:
    session = SessionClient.open(http, prompt="Once")
    slow(runtime, 0.02)
    thread, answers = begin(session, stream=stream)
    assert session.close()["deleted"]
    thread.join()
    (answer,) = answers
    if stream:
        assert answer.status_code == 200
        error = events(answer.text)[-1]["error"]
    else:
        assert answer.status_code == 404
        error = answer.json()["error"]
    assert (error["code"], "closed while" in error["message"]) == ("session_not_found", True)
    assert session.http.delete(session.path).status_code == 404
    assert_nothing_held(runtime)


def test_a_hold_outlasts_the_idle_time_and_the_server_at_rest_lets_it_end(
    runtime: Runtime, clock: Clock, http: httpx.Client
) -> None:
    session = SessionClient.open(http, prompt=[5] * 40)
    session.post("generate", **FOUR)
    session.post("hold", seconds=500)
    clock.now += 499
    state = session.state()
    assert (state["held_tokens"], state["held_for_s"], state["expires_in_s"]) == (32, 1, 1)
    clock.now += 2
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})  # wants room
    assert runtime.engine.stats().cache.num_holds == 0
    assert http.get(session.path).status_code == 404


def test_a_turn_outlasts_the_idle_time(runtime: Runtime, clock: Clock, http: httpx.Client) -> None:
    session = SessionClient.open(http, prompt="Once")
    slow(runtime, 0.02)
    thread, answers = begin(session, stream=False)
    clock.now += 1000
    assert session.state()["is_busy"]
    slow(runtime, 0)
    thread.join()
    assert answers[0].status_code == 200
    assert session.state()["expires_in_s"] == 60


def test_a_step_that_fails_leaves_the_session_as_it_was(
    runtime: Runtime, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SessionClient.open(http, prompt="Once")
    session.post("generate", **FOUR)
    before = session.state()

    def fail(plan: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(runtime.executor, "execute", fail)
        for verb, body in (("generate", FOUR), ("score", {"choices": ["x", "y"]})):
            assert "the device is gone" in session.post(verb, 500, **body)["error"]["message"]
    assert session.settled() == before
    assert session.post("generate", **FOUR)["usage"]["completion_tokens"] == 4


def test_more_sessions_than_allowed_are_refused_until_one_is_closed(http: httpx.Client) -> None:
    sessions = [SessionClient.open(http) for _ in range(8)]
    for path in ("/v1/sessions", f"{sessions[0].path}/fork"):
        answer = http.post(path, json={})
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    sessions[0].close()
    SessionClient.open(http)


WRONG: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("append", {"prompt": 5}, 400, "prompt"),
    ("append", {"prompts": "x"}, 400, "prompts"),
    ("append", {"prompt": "x", "messages": [USER]}, 400, "prompt"),
    ("append", {"prompt": [49152]}, 400, "prompt"),
    ("append", {"prompt": [-1]}, 400, "prompt"),
    ("append", {"prompt": [5] * 2000}, 400, "prompt"),
    ("append", {"messages": [USER]}, 400, "messages"),
    ("append", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ("append", {"messages": [{"role": "x", "content": "y"}]}, 400, "messages[0].role"),
    ("generate", {"n": 2}, 400, "n"),
    ("generate", {"prompt": "x"}, 400, "prompt"),
    ("generate", {"cache_salt": "x"}, 400, "cache_salt"),
    ("generate", {"model": "gpt"}, 404, "model"),
    ("generate", {"temperature": -1}, 400, "temperature"),
    ("generate", {"logprobs": 99}, 400, "logprobs"),
    ("generate", {"priority": 1 << 40}, 400, "priority"),
    ("score", {"choices": []}, 400, "choices"),
    ("score", {"choices": ["x", ""]}, 400, "choices[1]"),
    ("score", {"choices": ["x", [49152]]}, 400, "choices[1]"),
    ("score", {"choices": ["x"] * 257}, 400, "choices"),
    ("score", {"choices": "x"}, 400, "choices"),
    ("score", {"choices": ["x"], "timeout_s": -1}, 400, "timeout_s"),
    ("hold", {"seconds": -1}, 400, "seconds"),
    ("hold", {"seconds": 1e9}, 400, "seconds"),
    ("hold", {"seconds": "5"}, 400, "seconds"),
    ("hold", {}, 400, "seconds"),
]


def test_a_mistake_is_named_and_leaves_the_session_as_it_was(http: httpx.Client) -> None:
    session = SessionClient.open(http, prompt="Once")
    session.post("generate", **FOUR)
    before = session.state()
    for verb, body, status, param in WRONG:
        error = session.post(verb, status, **body)["error"]
        assert error["param"] == param, (verb, body, error)
        assert session.settled() == before, (verb, body)


def test_an_empty_session_can_be_opened_but_neither_continued_nor_scored(
    http: httpx.Client,
) -> None:
    session = SessionClient.open(http)
    assert session.post("hold", seconds=5)["held_tokens"] == 0
    session.post("generate", 400, **FOUR)
    session.post("score", 400, choices=["x"])
    assert session.settled()["num_tokens"] == 0
    session.post("append", prompt="Once")
    session.post("generate", **FOUR)


def test_a_session_can_only_begin_with_what_fits_it(http: httpx.Client) -> None:
    for body, status in (
        ({"prompt": "x", "messages": [USER]}, 400),
        ({"cache_salt": ""}, 400),
        ({"model": "gpt"}, 404),
        ({"stream": True}, 400),
        ({"prompt": [5] * 2000}, 400),
        ([], 400),
    ):
        assert http.post("/v1/sessions", json=body).status_code == status
    assert http.post("/v1/sessions", content=b"", headers=JSON).status_code == 400


def test_stopping_the_server_closes_every_session(runtime: Runtime) -> None:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        for prompt in ("a" * 100, "b" * 100):
            SessionClient.open(http, prompt=prompt).post("generate", **FOUR)
        assert runtime.engine.stats().cache.num_holds == 2
    assert runtime.engine.stats().cache.num_holds == 0


def test_metrics_of_an_engine_at_rest_show_no_hold_whose_time_is_over(
    clock: Clock, http: httpx.Client
) -> None:
    def num_holds() -> str:
        lines = http.get("/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("radixcache_cache_holds ")).split()[1]

    session = SessionClient.open(http, prompt=[5] * 40)
    session.post("generate", **FOUR)
    assert num_holds() == "1.0"
    clock.now += 61
    num_holds()  # the engine's thread tells its counters between two calls
    assert num_holds() == "0.0"
