"""What agents send that speak Anthropic's API: it is served as it comes, and found in the cache.

The bodies are those of Claude Code 2.1, whose fields and headers change faster than the API's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.support.served import NAME, quick_runtime, serving
from tests.support.workloads import sentences

BLOCK = 16
EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "effort-2025-11-24"]
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"offset": {"type": "integer", "exclusiveMinimum": 0}},
    "additionalProperties": False,
}
ASKED = {"role": "user", "content": [{"type": "text", "text": "Which files are there?"}]}
READ = {"type": "tool_use", "id": "toolu_1", "name": "tool_3", "input": {"offset": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "none", "is_error": False}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(quick_runtime(num_blocks=512)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def billing(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.197.{number}c0; cch={number:05x};"


def request(turn: int, messages: list[Any]) -> dict[str, Any]:
    """An agent's body; it differs in each turn where the agent's does."""
    tools = [
        {"name": f"tool_{i}", "description": sentences(2, seed=i), "input_schema": SCHEMA}
        for i in range(24)
    ]
    texts = ["You are an agent.", sentences(20, seed=1)]
    system = [{"type": "text", "text": text, "cache_control": EPHEMERAL} for text in texts]
    return {
        "model": NAME,
        "max_tokens": 8,
        "system": [{"type": "text", "text": billing(turn)}, *system],
        "tools": tools,
        "messages": [*messages, {"role": "system", "content": "Agent types: none."}],
        "metadata": {"user_id": '{"session_id":"1"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": BETAS,
    }


def num_tokens(client: anthropic.Anthropic, messages: list[Any], **fields: Any) -> int:
    return client.messages.count_tokens(model=NAME, messages=messages, **fields).input_tokens


def test_an_agents_second_turn_finds_system_prompt_and_tools_cached(
    client: anthropic.Anthropic,
) -> None:
    with client.beta.messages.stream(**request(1, [ASKED])) as stream:
        first = stream.get_final_message().usage
    assert first.cache_creation_input_tokens > 20 * BLOCK
    called = {"role": "assistant", "content": [{"type": "text", "text": "I read."}, READ]}
    result = {"role": "user", "content": [{**RESULT, "cache_control": EPHEMERAL}]}
    with client.beta.messages.stream(**request(2, [ASKED, called, result])) as stream:
        second = stream.get_final_message().usage
    asked = request(1, [ASKED])
    shared = {name: asked[name] for name in ("system", "tools")}
    both = num_tokens(client, [ASKED], **shared) - 3  # less what has the assistant speak
    assert second.cache_read_input_tokens >= both // BLOCK * BLOCK


@pytest.mark.parametrize("as_blocks", [False, True])
def test_a_line_for_whoever_bills_is_no_part_of_the_prompt(
    client: anthropic.Anthropic, as_blocks: bool
) -> None:
    rules = "Be brief.\nx-anthropic-billing-header: as a text"
    plain = num_tokens(client, [ASKED], system=rules)
    system: Any = f"{billing(7)}\n{rules}"
    if as_blocks:
        system = [{"type": "text", "text": text} for text in (billing(8), rules)]
    assert num_tokens(client, [ASKED], system=system) == plain
    nothing = num_tokens(client, [ASKED], system=billing(9))
    assert nothing == num_tokens(client, [ASKED])


def test_what_another_model_thought_is_no_part_of_the_prompt(client: anthropic.Anthropic) -> None:
    thoughts: Any = [
        {"type": "thinking", "thinking": "Hm.", "signature": "abc"},
        {"type": "redacted_thinking", "data": "def"},
    ]
    said: Any = {"type": "text", "text": "It is"}
    plain = num_tokens(client, [ASKED, {"role": "assistant", "content": [said]}])
    for content in ([*thoughts, said], [said, *thoughts]):
        assert num_tokens(client, [ASKED, {"role": "assistant", "content": content}]) == plain
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[1\]"):
        num_tokens(client, [{"role": "user", "content": [said, thoughts[0]]}])


@pytest.mark.parametrize(
    "thinking",
    [{"type": "enabled", "budget_tokens": 31999}, {"type": "disabled"}, {"type": "adaptive"}],
)
def test_an_agent_may_allow_thinking_and_gets_an_answer_without(
    client: anthropic.Anthropic, thinking: Any
) -> None:
    answer = client.messages.create(
        model=NAME, max_tokens=3, messages=[{"role": "user", "content": "Hi"}], thinking=thinking
    )
    assert [block.type for block in answer.content] == ["text"]
    assert num_tokens(client, [ASKED], thinking=thinking) == num_tokens(client, [ASKED])


def test_an_edit_of_the_context_that_would_change_the_prompt_is_refused(url: str) -> None:
    body = {"model": NAME, "max_tokens": 3, "messages": [ASKED]}
    body["context_management"] = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer = httpx.post(f"{url}/v1/messages?beta=true", json=body)
    assert answer.status_code == 400
    assert "context_management.edits[0].type" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long_is_told_as_agents_look_for_it(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model=NAME, max_tokens=3, messages=[{"role": "user", "content": "a b " * 9000}]
        )
    message = caught.value.body["error"]["message"]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum: ", message)
    assert found
    assert int(found[1]) > int(found[2]) == 512 * BLOCK - 1


def test_models_are_listed_for_anthropics_client_too(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (NAME, "model", NAME)
    assert model.created_at.timestamp() == model.model_dump()["created"]
    assert client.models.retrieve(NAME) == model
