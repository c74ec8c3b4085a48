"""Faults on the server's side: each ends the one request, with a clear error, and nobody else's.

Every fault is injected where the fakes let it in: an executor, a constraint, a template, a
tokenizer, a tracer, a handler of logs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from runtime.async_engine import AsyncEngine
from runtime.engine import Engine
from runtime.errors import EngineFailure
from runtime.loading import Runtime
from runtime.plan import Slice
from tests.support.faults import (
    POISON,
    BrokenHandler,
    BrokenTemplate,
    BrokenTracer,
    Compiler,
    FussyTokenizer,
    Panic,
)
from tests.support.served import NAME, HashExecutor, quick_runtime, serving, wait_until_idle

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
GOOD = {"prompt": "All is well", "max_tokens": 40, "seed": 1, "ignore_eos": True}


def executor_of(runtime: Runtime) -> HashExecutor:
    assert isinstance(runtime.executor, HashExecutor)
    return runtime.executor


def text_of(http: httpx.Client, body: Mapping[str, Any] = GOOD) -> str:
    answer = http.post(COMPLETIONS, json=dict(body))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def assert_serves(http: httpx.Client, runtime: Runtime) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert text_of(http, GOOD | {"max_tokens": 2})
    wait_until_idle(runtime)


def beside(
    runtime: Runtime, http: httpx.Client, fail: Callable[[], httpx.Response]
) -> httpx.Response:
    """Return what `fail` returns while a stream of somebody else goes on, which must be whole."""
    executor_of(runtime).step_s = 0.005
    alone = text_of(http)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(text_of, http)
        while not runtime.engine.stats().running:
            time.sleep(0.001)
        answer = fail()
        assert running.result() == alone
    return answer


# A client that is killed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "ignore_eos": True}),
        (CHAT, {"messages": HELLO, "n": 3, "logprobs": True, "ignore_eos": True}),
        (MESSAGES, {"messages": HELLO, "model": NAME}),
    ],
)
def test_a_client_killed_in_the_middle_of_its_stream_ends_alone(
    runtime: Runtime, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    text = json.dumps(body | {"max_tokens": 500, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
    head += f"Content-Length: {len(text)}\r\n\r\n".encode()

    def killed() -> httpx.Response:
        with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as client:
            client.sendall(head + text)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.recv(1)
            reset = struct.pack("ii", 1, 0)  # the system says nothing more for a killed program
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        return http.get("/health")

    assert beside(runtime, http, killed).status_code == 200
    wait_until_idle(runtime)
    assert runtime.engine.stats().finished["abort"] > 0
    assert_serves(http, runtime)


# A kernel that fails for one request


def poisoned(piece: Slice) -> bool:
    return POISON in np.frombuffer(piece.tokens, np.int32)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_kernel_that_fails_for_one_request_ends_it_alone(
    runtime: Runtime,
    http: httpx.Client,
    n: int,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor_of(runtime).fail_on = poisoned
    body = {"prompt": [5, 6, POISON], "n": n, "stream": stream}
    answer = beside(runtime, http, lambda: http.post(COMPLETIONS, json=body))
    assert answer.status_code == (200 if stream else 500)
    assert "the kernel was told to fail" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n") == stream
    assert runtime.engine.stats().finished["error"] == 1, "branches had not begun"
    assert re.search(r"request cmpl-\w+/0 failed\n(.*\n)+.*was told to fail", caplog.text)
    assert_serves(http, runtime)


@pytest.mark.parametrize("n", [1, 3])
def test_a_kernel_that_fails_while_branches_decode_ends_all_of_them(
    runtime: Runtime, http: httpx.Client, n: int
) -> None:
    marked: set[str] = set()

    def fails(piece: Slice) -> bool:
        if poisoned(piece):
            marked.add(piece.request_id)
        return piece.request_id in marked and piece.index == n - 1 and piece.start == 8

    executor_of(runtime).fail_on = fails
    body = {"prompt": [5, 6, POISON], "n": n, "max_tokens": 30, "ignore_eos": True}
    answer = beside(runtime, http, lambda: http.post(COMPLETIONS, json=body))
    assert answer.status_code == 500
    assert "the kernel was told to fail" in answer.json()["error"]["message"]
    assert runtime.engine.stats().finished["error"] == n
    assert_serves(http, runtime)


# A constraint, or the text of a token, that fails for one request


@pytest.fixture
def fussy() -> Runtime:
    runtime = quick_runtime()
    tokenizer: Any = FussyTokenizer(runtime.tokenizer)
    constrainer: Any = Compiler(runtime.tokenizer.vocab_size)
    runtime.engine.tokenizer = tokenizer
    return msgspec.structs.replace(runtime, tokenizer=tokenizer, constrainer=constrainer)


@pytest.mark.parametrize(
    ("where", "n"),
    [*((where, n) for where in ("allowed", "accept", "bytes_of") for n in (1, 3)), ("fork", 2)],
)
def test_a_constraint_or_a_token_that_fails_ends_its_request_alone(
    fussy: Runtime, where: str, n: int
) -> None:
    body = {"prompt": "x", "guided_regex": where, "n": n, "max_tokens": 9}
    with serving(fussy) as url, httpx.Client(base_url=url, timeout=30) as http:
        for stream in (False, True):
            ask = partial(http.post, COMPLETIONS, json=body | {"stream": stream})
            answer = beside(fussy, http, ask)
            assert answer.status_code == (200 if stream else 500)
            assert f"a bug in {where}" in answer.text
            assert answer.text.count("error") <= 2, "it is told once"
            assert_serves(http, fussy)


# A thread that prepares a request


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "poison"}),
        (COMPLETIONS, {"prompt": ["fine", "poison"], "stream": True}),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "compile"}),
        (CHAT, {"messages": HELLO}),
        (CHAT, {"messages": HELLO, "stream": True}),
        (MESSAGES, {"messages": HELLO, "model": NAME, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": HELLO, "model": NAME}),
        ("/tokenize", {"prompt": "poison"}),
        ("/tokenize", {"messages": HELLO}),
        ("/v1/sessions", {"prompt": "poison"}),
        ("/v1/sessions", {"messages": HELLO}),
    ],
)
def test_a_thread_that_fails_ends_its_request_and_says_nothing_of_our_inside(
    fussy: Runtime, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    template: Any = BrokenTemplate()
    template.format = fussy.tool_format
    broken = msgspec.structs.replace(fussy, chat_template=template)
    with serving(broken) as url, httpx.Client(base_url=url, timeout=30) as http:
        answer = http.post(path, json=body, headers={"x-request-id": "req-9"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error; the server's log has it"
        assert re.search(r"request req-9 failed\n(.*\n)+.*a bug in", caplog.text)
        assert_serves(http, broken)


def test_a_session_is_as_it_was_where_a_thread_or_a_step_fails(fussy: Runtime) -> None:
    with serving(fussy) as url, httpx.Client(base_url=url, timeout=30) as http:
        opened = http.post("/v1/sessions", json={"prompt": "Once upon"}).json()
        path = f"/v1/sessions/{opened['id']}"
        assert http.post(f"{path}/append", json={"prompt": "poison"}).status_code == 500
        assert http.post(f"{path}/generate", json={"guided_regex": "compile"}).status_code == 500
        assert http.post(f"{path}/generate", json={"guided_regex": "accept"}).status_code == 500
        streamed = http.post(f"{path}/generate", json={"guided_regex": "bytes_of", "stream": True})
        assert "a bug in bytes_of" in streamed.text
        executor_of(fussy).fail_on = poisoned
        scored = http.post(f"{path}/score", json={"choices": [[5], [6, POISON, 7]]})
        assert scored.status_code == 500
        state = http.get(path).json()
        assert (state["num_tokens"], state["is_busy"]) == (opened["num_tokens"], False)
        assert http.post(f"{path}/generate", json={"max_tokens": 2}).status_code == 200
        assert http.delete(path).status_code == 200
        assert_serves(http, fussy)


# What only watches: metrics, logs, traces


def test_what_only_watches_harms_no_request_when_it_fails(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    tracer, handler = BrokenTracer(), BrokenHandler()
    requests = logging.getLogger("radixcache.requests")
    requests.addHandler(handler)
    try:
        with serving(runtime, tracer=tracer) as url, httpx.Client(base_url=url) as http:
            for _ in range(3):  # over one connection, which stays open
                assert text_of(http)
            streamed = http.post(COMPLETIONS, json=GOOD | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert_serves(http, runtime)
            with caplog.at_level(logging.INFO, "radixcache.requests"):
                assert text_of(http)
            assert 'status="200"' in http.get("/metrics").text
    finally:
        requests.removeHandler(handler)
    assert tracer.num_asked > 3
    assert "could not be noted" in caplog.text


# The engine's thread itself


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_breaks_down_tells_everybody_and_takes_nothing_more(
    runtime: Runtime, stream: bool
) -> None:
    executor = executor_of(runtime)
    executor.step_s = 0.005
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        session = http.post("/v1/sessions", json={"prompt": "Once"}).json()["id"]
        body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "n": 2, "stream": stream}
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(http.post, COMPLETIONS, json=body) for _ in range(2)]
            while runtime.engine.stats().running < 4:
                time.sleep(0.001)
            executor.fail_next = Panic("out of everything")
            answers = [one.result() for one in running]
        for answer in answers:
            assert answer.status_code == (200 if stream else 500)
            assert "the engine broke down: Panic: out of everything" in answer.text
        assert http.get("/health").status_code == http.get("/ready").status_code == 503
        assert "out of everything" in http.get("/health").json()["error"]["message"]
        for path, asked in (
            (COMPLETIONS, body),
            (MESSAGES, {"messages": HELLO, "model": NAME, "max_tokens": 2}),
            ("/reset_prefix_cache", None),
            (f"/v1/sessions/{session}/fork", None),
            (f"/v1/sessions/{session}/generate", {"max_tokens": 2}),
        ):
            assert http.post(path, json=asked).status_code == 503, path
        assert "radixcache_steps_total" in http.get("/metrics").text
        assert not any(thread.name == "engine" for thread in threading.enumerate())
        for name in list(runtime.engine._live):  # what a thread that is gone can't give back
            runtime.engine.abort(name)


def test_a_call_in_whose_middle_the_engine_breaks_down_is_told() -> None:
    engine = AsyncEngine(quick_runtime().engine)

    def break_down(owner: Engine) -> None:
        raise Panic("out of everything")

    async def ask() -> None:
        engine.start()
        with pytest.raises(EngineFailure, match="out of everything"):
            await engine.call(break_down)
        engine.stop(drain_s=1)
        with pytest.raises(EngineFailure, match="out of everything"):
            await engine.call(lambda owner: owner.stats())

    asyncio.run(asyncio.wait_for(ask(), 30))
