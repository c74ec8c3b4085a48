"""Bad input over HTTP: a clear error of the right kind, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.limits import MAX_CONTAINERS
from runtime.server.operations import MAX_DETOKENIZED
from tests.support.served import JSON, NAME, HashExecutor, quick_runtime, serving, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime()


@pytest.fixture(scope="module")
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4} | fields


def assert_serves(http: httpx.Client, runtime: Runtime) -> None:
    answer = http.post(CHAT, json=chat())
    assert answer.status_code == 200, answer.text
    wait_until_idle(runtime)


# path, body, status, param, a word of the message
WRONG: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, chat(messages=[]), 400, "messages", "empty"),
    (CHAT, {"max_tokens": 4}, 400, "messages", "missing"),
    (CHAT, chat(messages="hello"), 400, "messages", "array"),
    (CHAT, chat(messages=[{"role": "bob", "content": "x"}]), 400, "messages[0].role", "bob"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", "no content"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content", "int"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": None}]),
        400,
        "messages[0].content",
        "content",
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x", "hue": 1}]),
        400,
        "messages[0].hue",
        "h",
    ),
    (CHAT, chat(stop=["x" * 2000]), 400, "stop", "1024"),
    (CHAT, chat(stop_token_ids=[10**30]), 400, "stop_token_ids", "49151"),
    (CHAT, chat(stop_token_ids=[-1]), 400, "stop_token_ids", "49151"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages[0].content[0].type",
        "image_url",
    ),
    (CHAT, chat(temperature=-0.1), 400, "temperature", "from 0"),
    (CHAT, chat(temperature="hot"), 400, "temperature", "float"),
    (CHAT, chat(temperature=1e9), 400, "temperature", "100"),
    (CHAT, chat(top_p=0), 400, "top_p", "above 0"),
    (CHAT, chat(top_p=1.5), 400, "top_p", "1"),
    (CHAT, chat(top_k=-5), 400, "top_k", "0"),
    (CHAT, chat(min_p=2), 400, "min_p", "1"),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", "1"),
    (CHAT, chat(max_tokens=-3), 400, "max_tokens", "1"),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", "1"),
    (CHAT, chat(max_tokens=True), 400, "max_tokens", "bool"),
    (CHAT, chat(seed=2**70), 400, "seed", "from"),
    (CHAT, chat(stop=[""]), 400, "stop", "empty"),
    (CHAT, chat(stop=["x"] * 17), 400, "stop", "16"),
    (CHAT, chat(stop=5), 400, "stop", "int"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", "stream"),
    (CHAT, chat(temprature=1), 400, "temprature", "unknown field"),
    (CHAT, chat(model="gpt-4"), 404, "model", NAME),
    (CHAT, chat(messages=[{"role": "user", "content": "a " * 2000}]), 400, "prompt", "tokens"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt", "mixes"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt", "no tokens"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "token ids"),
    (COMPLETIONS, {"prompt": [2**40]}, 400, "prompt", "token ids"),
    (COMPLETIONS, {"prompt": [49152]}, 400, "prompt", "49151"),
    (COMPLETIONS, {"prompt": ["x"] * 65}, 400, "prompt", "64"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt", "object"),
    (COMPLETIONS, {"prompt": ["ok", [49152]]}, 400, "prompt", "49151"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "word"), WRONG, ids=[json.dumps(w[1])[:60] for w in WRONG]
)
def test_a_wrong_body_is_refused_by_name(
    http: httpx.Client,
    runtime: Runtime,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
    word: str,
) -> None:
    for stream in ({}, {"stream": True}) if "stream_options" not in body else ({},):
        answer = http.post(path, json=body | stream)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert word in error["message"]
    assert_serves(http, runtime)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages": NaN}',
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
        b'"\xff\xfe"',
        b"\x00",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"metadata": ' + b"[" * 100_000,
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_a_body_that_is_no_request_is_refused(
    http: httpx.Client, runtime: Runtime, raw: bytes
) -> None:
    answer = http.post(CHAT, content=raw, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert_serves(http, runtime)


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        (chat(colour=1), "unknown_parameter", "unknown field `colour`"),
        (chat(stream_options={"x": 1}), "unknown_parameter", "unknown field `stream_options.x`"),
        ({}, "missing_required_parameter", "`messages` is missing"),
        (chat(n="two"), "invalid_type", "int"),
        (chat(tool_choice="always"), "invalid_value", "openapi.json"),
    ],
)
def test_an_error_of_shape_has_openais_code(
    http: httpx.Client, body: dict[str, Any], code: str, word: str
) -> None:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert word in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        (None, 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json-seq", 415),
        ("application/json", 200),
        ("Application/JSON ; charset=utf-8", 200),
    ],
)
def test_a_body_is_taken_only_where_it_says_that_it_is_json(
    http: httpx.Client, runtime: Runtime, media_type: str | None, status: int
) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    for path in (CHAT, "/tokenize", "/v1/sessions"):
        body = chat() if path == CHAT else {"prompt": "x"}
        answer = http.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code == status, answer.text
        if status == 415:
            assert answer.json()["error"]["code"] == "unsupported_media_type"
            assert "application/json" in answer.json()["error"]["message"]
    assert_serves(http, runtime)


def test_a_body_over_the_limit_is_refused(http: httpx.Client, runtime: Runtime) -> None:
    body = b'{"messages": "' + b"x" * (9 << 20) + b'"}'
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert_serves(http, runtime)


def test_unknown_paths_and_methods_are_answered_in_the_same_shape(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "x"})
    assert answer.status_code == 404
    assert "`POST /v1/responses`" in answer.json()["error"]["message"]
    assert CHAT in answer.json()["error"]["message"]
    answer = http.get(CHAT)
    assert answer.status_code == 405
    assert f"`GET {CHAT}`" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/models/other").status_code == 404
    assert http.get(f"/v1/models/{NAME}").json()["id"] == NAME


def test_a_neutral_value_of_what_is_not_served_is_taken(
    http: httpx.Client, runtime: Runtime
) -> None:
    neutral = {
        "n": 1,
        "logit_bias": {},
        "logprobs": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "top_k": -1,
        "audio": None,
        "moderation": None,
        "verbosity": "medium",
        "web_search_options": None,
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_options": {"ttl": "30m"},
    }
    assert http.post(CHAT, json=chat(**neutral)).status_code == 200
    wait_until_idle(runtime)


def test_a_step_that_fails_ends_its_requests_and_no_others(
    http: httpx.Client, runtime: Runtime
) -> None:
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    executor.fail_next = RuntimeError("device said no")
    answer = http.post(CHAT, json=chat())
    assert answer.status_code == 500
    assert "device said no" in answer.json()["error"]["message"]
    assert_serves(http, runtime)
    executor.fail_next = RuntimeError("device said no")
    events = http.post(CHAT, json=chat(stream=True)).text
    assert "device said no" in events
    assert events.endswith("data: [DONE]\n\n")
    assert_serves(http, runtime)


def test_a_full_queue_says_when_to_come_back() -> None:
    runtime = quick_runtime(max_waiting=1, max_running=1)
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    executor.step_s = 0.05
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        prompts = [[5, 6, 7]] * 4
        answer = http.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 50})
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        wait_until_idle(runtime)
        assert_serves(http, runtime)


def test_a_broken_engine_is_told_to_everyone_and_to_health_checks() -> None:
    runtime = quick_runtime()
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        assert http.get("/health").status_code == 200
        original = runtime.engine.scheduler.apply
        runtime.engine.scheduler.apply = None  # type: ignore[assignment,method-assign]
        answer = http.post(CHAT, json=chat())
        assert answer.status_code == 500
        assert "broke down" in answer.json()["error"]["message"]
        assert http.get("/health").status_code == 503
        assert http.post(CHAT, json=chat()).status_code == 503
        runtime.engine.scheduler.apply = original  # type: ignore[method-assign]
        for name in list(runtime.engine._live):
            runtime.engine.abort(name)


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"a":[]}'])
def test_a_body_of_a_million_empty_parts_is_refused_before_they_are_built(
    http: httpx.Client, part: bytes
) -> None:
    for count, status in ((MAX_CONTAINERS // 4, 200), (900_000, 400)):
        parts = b",".join([part] * count)
        body = b'{"prompt": "[[[{{{", "max_tokens": 1, "metadata": [' + parts + b"]}"
        answer = http.post("/v1/completions", content=body, headers=JSON)
        assert answer.status_code == status, answer.text
    assert "arrays and objects" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "gzip, identity", "x" * 1000])
def test_a_compressed_body_is_refused_by_what_it_is(http: httpx.Client, coding: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    coded = JSON | {"content-encoding": coding}
    answer = http.post("/v1/completions", content=body, headers=coded)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    coded["content-encoding"] = "Identity"
    plain = http.post("/v1/completions", content=body, headers=coded)
    assert plain.status_code == 200


def test_more_ids_than_can_be_detokenized_at_once_are_refused(http: httpx.Client) -> None:
    for count, status in ((MAX_DETOKENIZED, 200), (MAX_DETOKENIZED + 1, 400)):
        body = b'{"tokens": [' + b",".join([b"9"] * count) + b"]}"
        answer = http.post("/detokenize", content=body, headers=JSON)
        assert answer.status_code == status, answer.text[:200]
    assert answer.json()["error"]["param"] == "tokens"
