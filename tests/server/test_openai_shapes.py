"""Every answer has exactly the fields that the official client's types know, and of their types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import Completion, Model
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from runtime.loading import Runtime
from runtime.server.chat_bodies import ChatRequest
from runtime.server.openai import CompletionRequest
from tests.support.served import NAME, quick_runtime, serving, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"properties": {"town": {"enum": ["Rome"]}}, "required": ["town"]},
    },
}
USAGE = {"include_usage": True}
OURS = {".prompt_token_ids", ".choices.token_ids", ".choices.prompt_token_ids"}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime()


@pytest.fixture(scope="module")
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def unknown(value: Any, path: str = "") -> set[str]:
    """Paths of the fields that the client's types don't have."""
    if isinstance(value, BaseModel):
        inner = {name: getattr(value, name) for name in type(value).model_fields}
        extra = {f"{path}.{name}" for name in value.model_extra or ()}
        return extra.union(*(unknown(item, f"{path}.{name}") for name, item in inner.items()))
    if isinstance(value, list):
        return set().union(*(unknown(item, path) for item in value))
    return set()


def read(kind: type[BaseModel], answer: dict[str, Any]) -> set[str]:
    """Read an answer strictly; returns the paths of fields that the client does not know."""
    if kind is Completion:  # OpenAI sends null in both places, which its own types don't have
        for choice in answer["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
                choice["logprobs"]["token_logprobs"][0] = 0.0
                choice["logprobs"]["top_logprobs"][0] = {}
    return unknown(kind.model_validate_json(json.dumps(answer), strict=True))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"n": 2, "stop": "e", "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"return_token_ids": True}),
        (COMPLETIONS, {}),
        (COMPLETIONS, {"n": 2, "prompt": ["a", "b"], "logprobs": 0}),
        (COMPLETIONS, {"echo": True, "logprobs": 2}),
        (COMPLETIONS, {"return_token_ids": True}),
    ],
)
def test_an_answer_has_the_fields_that_the_client_knows_and_no_others(
    http: httpx.Client, runtime: Runtime, path: str, fields: dict[str, Any], is_streamed: bool
) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    body = {"model": NAME, "max_tokens": 4} | asked | fields
    if is_streamed:
        body |= {"stream": True, "stream_options": USAGE}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    extra: set[str] = set()
    if is_streamed:
        *events, done = answer.text.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        kind: type[BaseModel] = ChatCompletionChunk if path == CHAT else Completion
        for event in events:
            extra |= read(kind, json.loads(event.removeprefix("data: ")))
    else:
        extra = read(ChatCompletion if path == CHAT else Completion, answer.json())
    if "return_token_ids" in fields:
        assert extra
        assert extra <= OURS
    else:
        assert not extra
    wait_until_idle(runtime)


def test_a_model_has_vllms_length_and_what_anthropics_client_reads(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed.keys() == {"object", "data", "first_id", "has_more", "last_id"}
    mine = read(Model, listed["data"][0])
    assert mine == {".max_model_len", ".type", ".display_name", ".created_at"}
    assert http.get(f"/v1/models/{NAME}").json() == listed["data"][0]


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (text_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_parameter_of_the_client_is_served_ignored_or_refused_by_name(
    params: Any, body: Any
) -> None:
    assert set(params.__annotations__) - set(body.__struct_fields__) == set()
