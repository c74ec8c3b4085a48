"""A stream put together is the whole answer, whatever is asked for."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.loading import Runtime
from tests.support.served import quick_runtime, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Rome", "Köln"]}},
                "required": ["town"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime()


@pytest.fixture(scope="module")
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body | {"stream": True})
    *events, done = [line for line in answer.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream amount to, as the whole answer has them."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"finish_reason": None})
    for chunk in pieces:
        for piece in chunk["choices"]:
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None, "nothing follows the end"
            choice |= {"index": piece["index"], "finish_reason": piece["finish_reason"]}
            for name in ("text", "token_ids"):
                if name in piece:
                    choice[name] = choice.get(name, type(piece[name])()) + piece[name]
            if "prompt_token_ids" in piece:
                assert "prompt_token_ids" not in choice
                choice["prompt_token_ids"] = piece["prompt_token_ids"]
            _add_logprobs(choice, piece["logprobs"])
            if "delta" in piece:
                _add_delta(choice, piece["delta"])
    return [choices[index] for index in sorted(choices)]


def _add_logprobs(choice: dict[str, Any], piece: dict[str, Any] | None) -> None:
    so_far = choice.setdefault("logprobs", None)
    if piece is None:
        return
    if so_far is None:
        choice["logprobs"] = piece
        return
    for name, values in piece.items():
        so_far[name] = None if values is None else so_far[name] + values


def _add_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    message = choice.setdefault("message", {"content": "", "refusal": None})
    message["content"] += delta.get("content", "")
    message.setdefault("role", delta.get("role"))
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": "", "type": call["type"], "function": {"arguments": ""}})
            calls[-1]["function"]["name"] = call["function"]["name"]
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices whose calls bear no names, which are new each time, and with "" for no content."""
    for choice in choices:
        if "message" in choice:
            choice["message"]["content"] = choice["message"]["content"] or ""
            for call in choice["message"].get("tool_calls", ()):
                call["id"] = ""
    return choices


fields = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12), "seed": st.just(1)},
    optional={
        "n": st.integers(1, 3),
        "return_token_ids": st.booleans(),
        "stop": st.lists(st.sampled_from(["a", "e", "in", " s", "é", "the"]), max_size=3),
        "ignore_eos": st.just(True),
    },
)
searching = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@searching
@given(
    body=fields,
    words=st.text("abc ü", min_size=1, max_size=9),
    logprobs=st.none() | st.integers(0, 3),
)
def test_a_streamed_chat_put_together_is_the_whole_answer(
    http: httpx.Client, body: dict[str, Any], words: str, logprobs: int | None
) -> None:
    body = body | {"messages": [{"role": "user", "content": words}]}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    whole = post(http, CHAT, body)
    pieces = chunks(http, CHAT, body | {"stream_options": {"include_usage": True}})
    assert without_ids(put_together(pieces)) == without_ids(whole["choices"])
    assert pieces[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert pieces[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    assert sum("prompt_token_ids" in piece for piece in pieces) == ("prompt_token_ids" in whole)


@searching
@given(
    body=fields,
    prompt=st.lists(st.text("abc ü", min_size=1, max_size=9), min_size=1, max_size=3)
    | st.lists(st.integers(0, 49151), min_size=1, max_size=9),
    more=st.fixed_dictionaries({}, optional={"logprobs": st.integers(0, 3), "echo": st.booleans()}),
)
def test_a_streamed_completion_put_together_is_the_whole_answer(
    http: httpx.Client, body: dict[str, Any], prompt: Any, more: dict[str, Any]
) -> None:
    body = body | {"prompt": prompt} | more
    whole = post(http, COMPLETIONS, body)
    pieces = chunks(http, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert put_together(pieces) == whole["choices"]
    assert pieces[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert pieces[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_streamed_calls_put_together_are_the_calls_of_the_whole_answer(
    http: httpx.Client, choice: Any, parallel: bool
) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is it like in Rome?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 300,
    }
    whole = post(http, CHAT, body)
    message, reason = whole["choices"][0]["message"], whole["choices"][0]["finish_reason"]
    assert message["content"] is None
    assert reason == ("tool_calls" if choice == "required" else "stop")
    for call in message["tool_calls"]:
        assert call["function"]["name"] in ("weather", "time")
        assert json.loads(call["function"]["arguments"])["town"] in ("Rome", "Köln")
    if choice != "required" or not parallel:
        assert len(message["tool_calls"]) == 1
    assert without_ids(put_together(chunks(http, CHAT, body))) == without_ids(whole["choices"])


def test_a_demanded_call_comes_as_it_is_written_and_is_cut_where_the_limit_is(
    http: httpx.Client,
) -> None:
    long = {"type": "string", "minLength": 200, "maxLength": 300}
    parameters = {"type": "object", "properties": {"a": long}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    body = {
        "messages": [{"role": "user", "content": "Note it."}],
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 40,
        "seed": 3,
    }
    whole = post(http, CHAT, body)["choices"]
    assert whole[0]["finish_reason"] == "length"
    assert whole[0]["message"]["content"] is None
    (call,) = whole[0]["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith("{")
    pieces = chunks(http, CHAT, body)
    deltas = [c["delta"] for piece in pieces for c in piece["choices"]]
    assert sum("tool_calls" in delta for delta in deltas) > 10
    assert without_ids(put_together(pieces)) == without_ids(whole)


def test_beside_tools_a_format_of_json_leaves_the_choice_to_the_model(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "What is it like in Rome?"}],
        "tools": TOOLS,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
        "max_tokens": 600,
    }
    reasons = set()
    questions = [[{"role": "user", "content": "Rome?" * number}] for number in range(1, 12)]
    answers = [post(http, CHAT, body | {"messages": question}) for question in questions]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        message, reason = choice["message"], choice["finish_reason"]
        reasons.add(reason)
        if reason == "tool_calls":
            assert message["content"] is None
            assert json.loads(message["tool_calls"][0]["function"]["arguments"])["town"]
        elif reason == "stop":
            assert json.loads(message["content"])["a"] in (1, 2)
    assert {"tool_calls", "stop"} <= reasons
    (choice,) = post(http, CHAT, body | {"n": 1, "tool_choice": "none"})["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)


def test_usage_stands_in_every_chunk_where_it_is_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream_options": options}
    counts = [piece["usage"]["completion_tokens"] for piece in chunks(http, COMPLETIONS, body)]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_every_choice_of_a_streamed_chat_begins_with_its_role(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "max_tokens": 2}
    first: dict[int, Any] = {}
    for piece in chunks(http, CHAT, body):
        for choice in piece["choices"]:
            first.setdefault(choice["index"], choice["delta"].get("role"))
    assert first == {0: "assistant", 1: "assistant", 2: "assistant"}


def test_a_long_prompt_that_is_echoed_comes_whole_whatever_steps_it_took(
    http: httpx.Client, runtime: Runtime
) -> None:
    ids = [1000 + i * i % 40_000 for i in range(900)]
    assert len(ids) > runtime.engine.config.max_step_tokens
    body = {"prompt": [ids, ids[::-1]], "echo": True, "logprobs": 1, "n": 2, "max_tokens": 2}
    whole = post(http, COMPLETIONS, body)
    for place, choice in enumerate(whole["choices"]):
        assert choice["index"] == place
        numbers = choice["logprobs"]["token_logprobs"]
        assert len(numbers) == len(choice["logprobs"]["text_offset"]) == 902
        assert numbers[0] is None
        assert None not in numbers[1:]
    again = put_together(chunks(http, COMPLETIONS, body))  # out of the cache, this time
    assert again == whole["choices"]
