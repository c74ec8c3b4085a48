"""Streams over HTTP: their form, and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from runtime.async_engine import AsyncEngine
from runtime.loading import Runtime
from runtime.request import Request, RequestOutput, SamplingParams
from tests.support.served import HashExecutor, serving, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "seed": 1}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events, checked to end with [DONE]."""
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def slow(runtime: Runtime, step_s: float) -> None:
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    executor.step_s = step_s


def test_a_streamed_chat_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    whole = http.post(CHAT, json=BODY | {"return_token_ids": True}).json()
    options = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post(CHAT, json=BODY | options))
    *pieces, last = chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"] != ""
    ids = [i for piece in pieces for i in piece["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert all(piece["usage"] is None for piece in pieces)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    cached = last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == whole["usage"]["prompt_tokens"] - 1


def test_usage_stands_in_a_stream_only_where_it_was_asked_for(http: httpx.Client) -> None:
    chunks = events(http.post(CHAT, json=BODY | {"stream": True}))
    assert all("usage" not in chunk for chunk in chunks)


def test_cached_tokens_are_there_even_where_they_are_none(http: httpx.Client) -> None:
    usage = http.post(COMPLETIONS, json={"prompt": "x"}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens"] == 16


def test_several_prompts_are_answered_by_index_streamed_or_not(http: httpx.Client) -> None:
    body = {"prompt": ["one", [5, 6, 7], "three"], "max_tokens": 3, "return_token_ids": True}
    whole = http.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in events(http.post(COMPLETIONS, json=body | {"stream": True})):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_a_client_that_stops_waiting_for_its_answer_frees_its_blocks(
    runtime: Runtime, http: httpx.Client
) -> None:
    slow(runtime, 0.02)
    body = BODY | {"max_tokens": 900, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body, timeout=0.3)
    wait_until_idle(runtime, limit_s=5)
    assert runtime.engine.stats().finished == {"abort": 1}


def test_a_client_that_leaves_a_stream_frees_its_blocks(
    runtime: Runtime, http: httpx.Client
) -> None:
    slow(runtime, 0.02)
    body = BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    wait_until_idle(runtime, limit_s=5)
    assert runtime.engine.stats().finished == {"abort": 1}


def test_clients_that_leave_while_waiting_are_forgotten(runtime: Runtime) -> None:
    slow(runtime, 0.02)
    with serving(runtime) as url:

        def leave() -> None:
            body = BODY | {"max_tokens": 400, "ignore_eos": True}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + CHAT, json=body, timeout=0.5)

        clients = [threading.Thread(target=leave) for _ in range(20)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        wait_until_idle(runtime, limit_s=5)
        assert runtime.engine.stats().finished == {"abort": 20}
        slow(runtime, 0)
        assert httpx.post(url + CHAT, json=BODY, timeout=30).status_code == 200


def test_stopping_lets_requests_end_within_the_drain_time(runtime: Runtime) -> None:
    slow(runtime, 0.01)
    answers: list[httpx.Response] = []
    with serving(runtime, drain_s=10) as url:
        body = BODY | {"max_tokens": 30, "ignore_eos": True}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(url + CHAT, json=body, timeout=30))
        )
        client.start()
        while not runtime.engine.has_work:
            time.sleep(0.005)
    client.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 30


def test_the_engine_thread_stops_within_its_time_and_ends_what_is_left(runtime: Runtime) -> None:
    slow(runtime, 0.02)
    engine = AsyncEngine(runtime.engine)
    engine.start()
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)

    async def follow() -> str | None:
        prompt = (5).to_bytes(4, "little")
        stream = await engine.submit(Request(request_id="a", prompt=prompt, sampling=sampling))
        stopper = threading.Thread(target=engine.stop, kwargs={"drain_s": 0.2})
        stopper.start()
        reasons = [output.finish_reason async for output in stream]
        stopper.join()
        return reasons[-1]

    assert asyncio.run(follow()) == "abort"
    assert not runtime.engine.has_work
    runtime.engine.check()


def test_what_breaks_the_engine_is_told_though_a_hurried_stop_comes_at_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AsyncEngine(runtime.engine)

    def breaking() -> None:
        engine.hurry()
        raise SystemError("out of everything")

    monkeypatch.setattr(runtime.engine, "step", breaking)
    engine.start()

    async def follow() -> list[RequestOutput]:
        prompt = (5).to_bytes(4, "little")
        request = Request(request_id="a", prompt=prompt, sampling=SamplingParams())
        stream = await engine.submit(request)
        return [output async for output in stream]

    (last,) = asyncio.run(follow())
    assert (last.finish_reason, last.is_last) == ("error", True)
    assert "the engine broke down: SystemError: out of everything" in str(last.error)
    engine.stop(drain_s=0)
    monkeypatch.undo()
    runtime.engine.abort("a")  # what a thread that is gone can't give back
