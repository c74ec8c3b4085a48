"""Wrong values of OpenAI's fields: each is refused by its name, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from tests.support.served import quick_runtime, serving, wait_until_idle

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
SCHEMA: dict[str, Any] = {"type": "object"}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime()


@pytest.fixture(scope="module")
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def formatted(name: str, schema: Any = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


Row = tuple[dict[str, Any], int, str | None, str]

# fields, status, param, a word of the message
OF_BOTH: list[Row] = [
    ({"n": 0}, 400, "n", "from 1"),
    ({"n": 129}, 400, "n", "128"),
    ({"n": True}, 400, "n", "bool"),
    ({"n": 9}, 400, "n", "8"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", "from -2"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "from -2"),
    ({"frequency_penalty": "x"}, 400, "frequency_penalty", "float"),
    ({"logit_bias": {"no": 1}}, 400, "logit_bias", "token id"),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias", "token id"),
    ({"logit_bias": {"9" * 30: 1}}, 400, "logit_bias", "token id"),
    ({"logit_bias": {"49152": 1}}, 400, "logit_bias", "49151"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "100"),
    ({"logit_bias": {"5": 1, "05": 1}}, 400, "logit_bias", "twice"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "1024"),
    ({"logit_bias": {"5": "x"}}, 400, "logit_bias[...]", "float"),
    ({"logit_bias": [1]}, 400, "logit_bias", "array"),
    ({"priority": 2**40}, 400, "priority", "from"),
    ({"priority": 1.5}, 400, "priority", "int"),
    ({"cache_salt": ""}, 400, "cache_salt", "1 to"),
    ({"cache_salt": "x" * 1025}, 400, "cache_salt", "1024"),
    ({"cache_salt": 7}, 400, "cache_salt", "int"),
    ({"timeout_s": -1}, 400, "timeout_s", "from 0"),
    ({"timeout_s": "soon"}, 400, "timeout_s", "float"),
    ({"return_token_ids": 1}, 400, "return_token_ids", "int"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "missing"),
    (
        {"response_format": formatted("a b")},
        400,
        "response_format.json_schema.name",
        "letters",
    ),
    ({"response_format": formatted("a", 5)}, 400, "response_format.json_schema.schema", "int"),
    ({"response_format": formatted("a", {"type": "no"})}, 400, "response_format", "no"),
    ({"guided_json": "{"}, 400, "guided_json", "JSON"),
    ({"guided_json": "[]"}, 400, "guided_json", "object"),
    ({"guided_json": 4}, 400, "guided_json", "int"),
    ({"guided_regex": "("}, 400, "guided_regex", "regex"),
    ({"guided_regex": "(a{1000}){1000}"}, 400, "guided_regex", "multiply"),
    ({"guided_choice": []}, 400, "guided_choice", "choice"),
    ({"guided_choice": [""]}, 400, "guided_choice", "empty"),
    ({"guided_choice": [1]}, 400, "guided_choice[0]", "int"),
    ({"guided_grammar": "start: nothing"}, 400, "guided_grammar", "nothing"),
    ({"guided_json_object": "yes"}, 400, "guided_json_object", "str"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", "both"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, 400, "guided_json", "both"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        400,
        "structured_outputs.choice",
        "both",
    ),
    ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regexp": "a"}}, 400, "structured_outputs.regexp", "unknown"),
    ({"stream": True, "stream_options": {"usage": 1}}, 400, "stream_options.usage", "unknown"),
]

OF_CHATS: list[Row] = [
    ({"logprobs": 3}, 400, "logprobs", "int"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "goes with"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
    ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs", "from 0"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function", "missing"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "web_search"),
    ({"tools": [named("a b")]}, 400, "tools[0].function.name", "letters"),
    ({"tools": [named("a\u0000")]}, 400, "tools[0].function.name", "letters"),
    ({"tools": [named("x" * 65)]}, 400, "tools[0].function.name", "64"),
    ({"tools": [TOOL, TOOL]}, 400, "tools[1].function.name", "look"),
    ({"tools": [named(f"f{i}") for i in range(129)]}, 400, "tools", "128"),
    ({"tool_choice": "required"}, 400, "tool_choice", "tools"),
    ({"tool_choice": "always", "tools": [TOOL]}, 400, "tool_choice", "always"),
    ({"tool_choice": named("other"), "tools": [TOOL]}, 400, "tool_choice", "other"),
    (
        {"tool_choice": "required", "tools": [TOOL], "guided_regex": "a"},
        400,
        "tool_choice",
        "both",
    ),
    ({"parallel_tool_calls": 1}, 400, "parallel_tool_calls", "int"),
    ({"functions": [{"name": "f"}]}, 400, "functions", "not supported"),
    ({"function_call": {"name": "f"}}, 400, "function_call", "not supported"),
    ({"modalities": ["audio"]}, 400, "modalities", "not supported"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort", "not supported"),
    ({"verbosity": "low"}, 400, "verbosity", "'medium'"),
    ({"web_search_options": {}}, 400, "web_search_options", "leave it out"),
    ({"audio": {"voice": "x", "format": "mp3"}}, 400, "audio", "not supported"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"max_completion_tokens": -1}, 400, "max_completion_tokens", "at least 1"),
    ({"echo": True}, 400, "echo", "unknown field"),
    ({"best_of": 2}, 400, "best_of", "unknown field"),
]

OF_MESSAGES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"role": "assistant", "tool_calls": [{"id": "a"}]}, 400, ".tool_calls[0].type", "missing"),
    (
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "magic"}]},
        400,
        ".tool_calls[0].type",
        "magic",
    ),
    (
        {"role": "user", "content": "x", "tool_calls": [{"id": "a", **TOOL}]},
        400,
        ".tool_calls",
        "assistant",
    ),
    ({"role": "user", "content": "x", "tool_call_id": "a"}, 400, ".tool_call_id", "tool"),
    ({"role": "tool", "tool_call_id": "a"}, 400, ".content", "content"),
    ({"role": "assistant", "content": "", "refusal": "no"}, 400, ".refusal", "not supported"),
]

OF_COMPLETIONS: list[Row] = [
    ({"logprobs": 21}, 400, "logprobs", "20"),
    ({"logprobs": -1}, 400, "logprobs", "from 0"),
    ({"logprobs": True}, 400, "logprobs", "bool"),
    ({"echo": True, "logprobs": 21}, 400, "logprobs", "20"),
    ({"echo": 1}, 400, "echo", "int"),
    ({"best_of": 1, "n": 2}, 400, "best_of", "at least"),
    ({"best_of": 129}, 400, "best_of", "128"),
    ({"best_of": 9}, 400, "best_of", "8"),
    ({"best_of": 2, "stream": True}, 400, "best_of", "stream"),
    ({"suffix": "end"}, 400, "suffix", "not supported"),
    ({"tools": []}, 400, "tools", "unknown field"),
    ({"prompt": [[5]] * 64, "n": 5}, 400, "n", "256"),
    ({"prompt": [[49152]], "echo": True}, 400, "prompt", "49151"),
    ({"max_tokens": -1}, 400, "max_tokens", "from 0"),
    (
        {"prompt": [[5] * 900] * 8, "echo": True, "logprobs": 20, "n": 8},
        400,
        "echo",
        "log-probabilities",
    ),
    ({"max_tokens": 0, "n": 2}, 400, "max_tokens", "nothing is drawn"),
    ({"max_tokens": 0, "best_of": 2}, 400, "max_tokens", "nothing is drawn"),
]

ROWS = [
    *[(CHAT, {"messages": HELLO, "max_tokens": 4} | row[0], *row[1:]) for row in OF_BOTH],
    *[(COMPLETIONS, {"prompt": "x", "max_tokens": 4} | row[0], *row[1:]) for row in OF_BOTH],
    *[(CHAT, {"messages": HELLO, "max_tokens": 4} | row[0], *row[1:]) for row in OF_CHATS],
    *[
        (CHAT, {"messages": [*HELLO, message]}, status, f"messages[1]{param}", word)
        for message, status, param, word in OF_MESSAGES
    ],
    *[(COMPLETIONS, {"prompt": "x", "max_tokens": 4} | row[0], *row[1:]) for row in OF_COMPLETIONS],
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "word"),
    ROWS,
    ids=[f"{row[0]} {json.dumps(row[1])[-60:]}" for row in ROWS],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    http: httpx.Client,
    runtime: Runtime,
    path: str,
    body: dict[str, Any],
    status: int,
    param: str | None,
    word: str,
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert word in error["message"]
    assert not runtime.engine.has_work


NEUTRAL: list[dict[str, Any]] = [
    {"n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0},
    {"stream": None, "stream_options": None, "stop": None, "seed": None, "cache_salt": None},
    {"n": None, "logit_bias": None, "presence_penalty": None, "response_format": None},
    {"response_format": {"type": "text"}, "guided_json": None, "guided_json_object": False},
    {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "top_k": -1},
]


@pytest.mark.parametrize("fields", NEUTRAL)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_value_that_asks_for_nothing_changes_nothing(
    http: httpx.Client, runtime: Runtime, path: str, fields: dict[str, Any]
) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    plain = http.post(path, json=prompt | {"max_tokens": 4}).json()
    answer = http.post(path, json=prompt | {"max_tokens": 4} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]
    wait_until_idle(runtime)
