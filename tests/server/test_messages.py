"""Anthropic's endpoints over an engine without a model: errors, marks under pressure, failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from runtime.decoding.grammar import GrammarFailure
from runtime.grammar import Grammar
from runtime.request import RequestOutput, Usage
from runtime.server.anthropic import MessagesRequest
from runtime.server.messages import Reply, parser_of
from runtime.server.tenants import Tenant, Tenants
from runtime.tokenizer.demanded_calls import CallArguments, CallBegin
from runtime.tokenizer.tool_format import HERMES
from tests.support.served import JSON, NAME, quick_runtime, serving, wait_until_idle
from tests.support.smollm2 import open_smollm2
from tests.support.workloads import sentences

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(quick_runtime()) as url, httpx.Client(base_url=url) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 4, "messages": HELLO} | fields


class Failing:
    """A constraint that breaks down at its third token."""

    def __init__(self) -> None:
        self.left = 2

    def allowed(self) -> bytes:
        if not self.left:
            raise GrammarFailure("the grammar failed: too many items")
        return b""

    def accept(self, token_id: int) -> None:
        self.left -= 1

    @property
    def is_done(self) -> bool:
        return False

    def fork(self) -> Failing:
        return Failing()


class Compiler:
    """Compiles every grammar to one that fails."""

    def compile(self, grammar: Grammar) -> Failing:
        return Failing()


def test_a_grammar_that_fails_while_it_is_followed_ends_its_own_request_alone() -> None:
    runtime = msgspec.structs.replace(quick_runtime(), constrainer=Compiler())
    demanded = {"format": {"type": "json_schema", "schema": {}}}
    with serving(runtime) as url, httpx.Client(base_url=url) as client:
        answer = client.post("/v1/messages", json=body(output_config=demanded))
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "too many items" in answer.json()["error"]["message"]
        answer = client.post("/v1/messages", json=body(output_config=demanded, stream=True))
        assert "event: error" in answer.text
        assert "message_stop" not in answer.text
        answer = client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"})
        assert answer.status_code == 400
        assert client.post("/v1/messages", json=body()).status_code == 200
        wait_until_idle(runtime)


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "claude"}, 404, "not_found_error"),
        ({"messages": 1}, 400, "invalid_request_error"),
        ({"color": "red"}, 400, "invalid_request_error"),
        ({"system": "word " * 9000}, 400, "invalid_request_error"),
        ({"system": "x" * 9_000_000}, 413, "request_too_large"),
    ],
)
def test_errors_have_anthropics_shape_and_kinds(
    client: httpx.Client, fields: dict[str, Any], status: int, kind: str
) -> None:
    whole = body(**fields)
    counted = {name: value for name, value in whole.items() if name != "max_tokens"}
    for path, sent in (("/v1/messages", whole), ("/v1/messages/count_tokens", counted)):
        if "system" in fields and status == 400 and "count" in path:
            continue  # counting has no limit but that of the body
        answer = client.post(path, json=sent)
        assert answer.status_code == status
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == kind
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert answer.json()["request_id"] == answer.headers["request-id"]
        assert "color" not in fields or "color" in answer.json()["error"]["message"]


def test_what_is_no_json_or_no_such_method_has_the_shape_too(client: httpx.Client) -> None:
    assert client.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    broken = client.post("/v1/messages", content=b"{", headers=JSON)
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"


def test_the_clients_header_is_the_key_and_its_lack_is_an_error_of_its_shape() -> None:
    key = "k" * 32
    tenants = Tenants({"ada": Tenant(keys=(key,))}, secret=b"s" * 32)
    with serving(quick_runtime(), tenants=tenants) as url, httpx.Client(base_url=url) as client:
        refused = client.post("/v1/messages", json=body())
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["request_id"] == refused.headers["request-id"]
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        assert client.post("/v1/messages", json=body(), headers=headers).status_code == 200


def reply(text: str, ids: list[int], reason: Any = "stop", **fields: Any) -> tuple[Reply, Any]:
    """A reply that one piece of output ends."""
    usage = Usage(prompt_tokens=9, cached_tokens=0, computed_tokens=9, completion_tokens=len(ids))
    output = RequestOutput(
        request_id="a", text=text, token_ids=tuple(ids), usage=usage, finish_reason=reason
    )
    request = msgspec.convert(body(**fields), MessagesRequest)
    parser, tokenizer = parser_of(request, HERMES), open_smollm2().tokenizer()
    return Reply("msg_1", request, parser, tokenizer, marked_tokens=0), output


CALLS = '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
TOOLS = [{"name": name, "input_schema": {}} for name in "fg"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "auto"}, ["f", "g"]),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["f"]),
        ({"type": "none"}, []),
    ],
)
def test_a_client_that_wants_one_call_gets_one(choice: Any, names: list[str]) -> None:
    said, output = reply(CALLS, [5, 2], tools=TOOLS, tool_choice=choice)
    parts = said.add(output)
    assert [part.name for part in parts if isinstance(part, CallBegin)] == names
    assert sum(isinstance(part, CallArguments) for part in parts) == len(names)
    assert said.end(output).delta.stop_reason == ("tool_use" if names else "end_turn")
    assert names or parts == [CALLS]


def test_the_reason_of_a_message_is_the_one_that_ended_it() -> None:
    tokenizer = open_smollm2().tokenizer()
    ids = tokenizer.encode("six 8, nine")
    for stops, named in ((["8, n", "8,", "x"], "8,"), (["9", " 8"], None), (None, None)):
        said, output = reply("six ", ids, stop_sequences=stops)
        said.add(output)
        delta = said.end(output).delta
        assert delta.stop_sequence == named
        assert delta.stop_reason == ("stop_sequence" if named else "end_turn")
    for num, reason in ((4, "max_tokens"), (3, "model_context_window_exceeded")):
        said, output = reply("six", [5] * num, "length", max_tokens=4)
        assert said.end(output).delta.stop_reason == reason
    said, output = reply("8", [*ids[:1], 2], stop_sequences=["8"])  # an end of sequence came first
    said.add(output)
    assert said.end(output).delta.stop_reason == "end_turn"


def marked_tokens_that_survive(policy: str, control: dict[str, str] | None) -> int:
    """Cached tokens of a marked prompt after others filled the pool."""
    runtime = quick_runtime(num_blocks=64, eviction_policy=policy)
    system: list[dict[str, Any]] = [{"type": "text", "text": sentences(12, seed=1)}]
    if control:
        system[0]["cache_control"] = control
    asked = body(system=system, max_tokens=1)
    with serving(runtime) as url, httpx.Client(base_url=url) as client:
        first = client.post("/v1/messages", json=asked).json()["usage"]
        assert first["cache_read_input_tokens"] == 0
        assert bool(first["cache_creation_input_tokens"]) == bool(control)
        for seed in range(2, 14):
            filler = [{"role": "user", "content": sentences(10, seed=seed)}]
            assert client.post("/v1/messages", json=body(messages=filler)).status_code == 200
        again: dict[str, int] = client.post("/v1/messages", json=asked).json()["usage"]
    return again["cache_read_input_tokens"]


def test_what_is_marked_stays_when_others_need_room_where_the_policy_knows_marks() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    assert marked_tokens_that_survive("priority", mark) > 100
    assert marked_tokens_that_survive("priority", None) < 50
    assert marked_tokens_that_survive("lru", mark) < 50


def demanding(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request whose answer must be a call of one tool, whose `a` meets a schema."""
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool = {"name": "f", "input_schema": schema | {"additionalProperties": False}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return body(tools=[tool], tool_choice=choice, **fields)


@pytest.mark.parametrize(
    ("schema", "max_tokens", "reason"),
    [
        ({"const": "Rome is far"}, 60, "tool_use"),
        ({"type": "string", "minLength": 900}, 40, "max_tokens"),
    ],
)
def test_a_demanded_call_is_told_while_it_is_written(
    client: httpx.Client, schema: dict[str, Any], max_tokens: int, reason: str
) -> None:
    asked = demanding(schema, max_tokens=max_tokens)
    whole = client.post("/v1/messages", json=asked).json()
    (block,) = whole["content"]
    is_whole = reason == "tool_use"
    assert whole["stop_reason"] == reason
    assert (block["type"], block["name"]) == ("tool_use", "f")
    assert block["input"] == ({"a": "Rome is far"} if is_whole else {})
    lines = client.post("/v1/messages", json=asked | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[1]["content_block"]["input"] == {}
    assert events[-2]["delta"]["stop_reason"] == reason
    pieces = [event["delta"]["partial_json"] for event in events[3:-3]]
    assert len(pieces) > 3
    came = "".join(pieces)
    assert json.loads(came) == block["input"] if is_whole else came.startswith('{"a"')


def test_beside_tools_a_format_leaves_the_choice_to_the_model(client: httpx.Client) -> None:
    def whole_schema(name: str) -> dict[str, Any]:
        values = {name: {"enum": [1, 2]}}
        closed = {"required": [name], "additionalProperties": False}
        return {"type": "object", "properties": values} | closed

    asked = {
        "tools": [{"name": "count", "input_schema": whole_schema("b")}],
        "output_config": {"format": {"type": "json_schema", "schema": whole_schema("a")}},
        "max_tokens": 600,
        "temperature": 0,
    }
    reasons = set()
    for number in range(1, 25):
        question = [{"role": "user", "content": "How many?" * number}]
        message = client.post("/v1/messages", json=body(**asked, messages=question)).json()
        first = message["content"][0]
        reasons.add(message["stop_reason"])
        if message["stop_reason"] == "tool_use":
            assert first["input"]["b"] in (1, 2)
        elif message["stop_reason"] == "end_turn":
            assert json.loads(first["text"])["a"] in (1, 2)
    assert {"tool_use", "end_turn"} <= reasons
    message = client.post("/v1/messages", json=body(**asked, tool_choice={"type": "none"})).json()
    assert json.loads(message["content"][0]["text"])["a"] in (1, 2)
