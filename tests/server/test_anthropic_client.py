"""The official `anthropic` client against the real model: events, tools, the cache, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from radixcache import Retention
from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.loading import Runtime, load_runtime
from tests.support.served import serving, wait_until_idle
from tests.support.workloads import sentences

BLOCK = 16
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "get_time", "input_schema": {"type": "object", "maxProperties": 0}}
GREEDY: Any = {"temperature": 0}  # a field that the client no longer names
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load_runtime(RuntimeConfig(num_blocks=1024, block_size=BLOCK))


@pytest.fixture(scope="module")
def url(runtime: Runtime) -> Iterator[str]:
    with serving(runtime) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def ask(
    client: anthropic.Anthropic, messages: Any = HELLO, **options: Any
) -> anthropic.types.Message:
    given: dict[str, Any] = {"max_tokens": 12, "messages": messages} | options
    return client.messages.create(model=DEFAULT_MODEL, **{"extra_body": GREEDY, **given})


def num_input_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_each_turn_of_a_chat_reads_everything_of_the_turn_before_from_the_cache(
    client: anthropic.Anthropic, runtime: Runtime
) -> None:
    system = f"Answer briefly. {sentences(4, seed=11)}"
    messages: list[Any] = []
    whole_turn = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: {sentences(1, seed=turn)}"})
        answer = ask(client, messages, system=system, extra_body={"temperature": 0.9})
        usage = answer.usage
        if turn:
            assert usage.cache_read_input_tokens >= whole_turn // BLOCK * BLOCK
        counted = client.messages.count_tokens(
            model=DEFAULT_MODEL, messages=messages, system=system
        )
        assert num_input_tokens(usage) == counted.input_tokens
        whole_turn = counted.input_tokens + usage.output_tokens
        # The client's own objects, with all their fields.
        messages.append({"role": "assistant", "content": answer.content})
    wait_until_idle(runtime)


def test_a_stream_has_the_events_that_clients_expect_and_the_whole_answer(
    client: anthropic.Anthropic,
) -> None:
    whole = ask(client)
    options: Any = {
        "model": DEFAULT_MODEL,
        "messages": HELLO,
        "max_tokens": 12,
        "extra_body": GREEDY,
    }
    events = list(client.messages.create(stream=True, **options))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert [block.text for block in streamed.content if block.type == "text"] == [
        block.text for block in whole.content if block.type == "text"
    ]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert streamed.usage.cache_read_input_tokens >= BLOCK


def test_events_carry_their_names_and_a_ping(url: str) -> None:
    body = {"model": DEFAULT_MODEL, "messages": HELLO, "max_tokens": 2, "stream": True}
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"]
    names = [line[7:] for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-1] == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_called_as_its_schema_wants(
    client: anthropic.Anthropic, stream: bool
) -> None:
    options: Any = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 200,
    }
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.name == "get_weather"
    assert block.input in ({"city": "Paris"}, {"city": "Rome"})
    assert answer.stop_reason == "tool_use"


def test_the_turn_after_a_tool_reads_the_call_from_the_cache(
    client: anthropic.Anthropic, runtime: Runtime
) -> None:
    system = f"Use tools. {sentences(3, seed=5)}"
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    options: Any = {"system": system, "tools": [WEATHER, CLOCK], "max_tokens": 300}
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    called = ask(client, messages, tool_choice=choice, extra_body={}, **options)
    (use,) = called.content
    assert use.type == "tool_use"
    messages.append({"role": "assistant", "content": called.content})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "Well?"}]})
    answer = ask(client, messages, tool_choice={"type": "none"}, **options)
    before = num_input_tokens(called.usage) + called.usage.output_tokens
    assert answer.usage.cache_read_input_tokens >= before // BLOCK * BLOCK
    assert answer.stop_reason in ("end_turn", "max_tokens")
    wait_until_idle(runtime)


def test_the_output_meets_a_schema_that_is_demanded(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(client, output_config=config, max_tokens=60, extra_body={})
    (block,) = answer.content
    assert block.type == "text"
    assert 1 <= json.loads(block.text)["age"] <= 99
    assert answer.stop_reason == "end_turn"
    config["format"]["schema"] = {"type": "integer", "multipleOf": 99999999}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.*multipleOf"):
        ask(client, output_config=config)


def test_system_messages_and_results_stand_where_they_were_sent(
    client: anthropic.Anthropic, runtime: Runtime
) -> None:
    result: Any = {"type": "tool_result", "tool_use_id": "t", "content": "no", "is_error": True}
    use: Any = {"type": "tool_use", "id": "t", "name": "get_time", "input": {}}
    messages: Any = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Then guess."}]},
        {"role": "system", "content": "Be brief."},
    ]
    counted = client.messages.count_tokens(model=DEFAULT_MODEL, messages=messages, system="Hi")
    written = (
        "<|im_start|>system\nHi<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nError: no\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nThen guess.<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert counted.input_tokens == len(runtime.tokenizer.encode(written, parse_special=True))


def test_a_stop_sequence_ends_the_message_and_is_named(client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": "Count from 1 to 9."},
        {"role": "assistant", "content": "1, 2, 3, 4, 5,"},
    ]
    answer = ask(client, messages, max_tokens=40, stop_sequences=["never", " 8", " 8,"])
    (block,) = answer.content
    assert block.type == "text"
    assert block.text.startswith(" 6, 7,")
    assert " 8" not in block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " 8")
    cut = ask(client, messages, max_tokens=2)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_a_mark_keeps_the_prefix_and_is_counted_as_created(
    client: anthropic.Anthropic, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Retention, ...]] = []
    submit = runtime.engine.submit

    def watched(request: Any) -> Any:
        seen.append(request.retentions)
        return submit(request)

    monkeypatch.setattr(runtime.engine, "submit", watched)
    marked: Any = [
        {"type": "text", "text": sentences(6, seed=77), "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    hour = {"type": "ephemeral", "ttl": "1h"}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": hour}]}
    ]
    first = ask(client, messages, system=marked).usage
    ((system, turn),) = seen
    assert (system.start, system.priority, system.duration_s) == (0, 1, 300)
    assert (turn.start, turn.priority, turn.duration_s) == (0, 1, 3600)
    text = runtime.tokenizer.encode(marked[0]["text"])
    assert system.end is not None
    assert turn.end is not None
    assert len(text) <= system.end <= len(text) + 8
    assert system.end < turn.end <= num_input_tokens(first)
    assert first.cache_creation_input_tokens == turn.end - (first.cache_read_input_tokens or 0)
    again = ask(client, messages, system=marked).usage
    assert again.cache_creation_input_tokens == max(0, turn.end - again.cache_read_input_tokens)
    assert again.cache_read_input_tokens >= num_input_tokens(again) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"thinking": {"type": "hard"}}}, "thinking"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{**WEATHER, "name": "a\nb"}]}, r"tools\[0\].name"),
        ({"tools": [WEATHER, WEATHER]}, r"tools\[1\].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\]\.content\[0\]|messages\[.*\].*image",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    }
                ]
            },
            r"messages\[0\]\.content\[0\]",
        ),
    ],
)
def test_what_is_wrong_or_not_served_is_named(
    client: anthropic.Anthropic, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named) as caught:
        ask(client, **options)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id


def test_errors_are_the_clients_own_kinds(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="smollm2"):
        client.messages.create(model="claude", messages=HELLO, max_tokens=5)
    long: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        ask(client, long)
    many = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 5
    with pytest.raises(anthropic.BadRequestError, match="cache_control"):
        ask(client, [{"role": "user", "content": many}])
