"""The official `openai` client against the real model: the cache's promises from outside."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.loading import Runtime, load_runtime
from tests.support.served import serving, wait_until_idle
from tests.support.workloads import Ask, agent_tree, few_shot, sentences

BLOCK = 16


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load_runtime(RuntimeConfig(num_blocks=1024, block_size=BLOCK))


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[openai.OpenAI]:
    with (
        serving(runtime) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def cached_tokens(usage: Any) -> int:
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_each_turn_of_a_chat_finds_everything_of_the_turn_before(
    client: openai.OpenAI, runtime: Runtime, temperature: float
) -> None:
    system = f"Answer briefly. Run {temperature}. {sentences(4, seed=7)}"
    messages: list[Any] = [{"role": "system", "content": system}]
    whole_turn = 0
    for turn in range(6):
        messages.append({"role": "user", "content": f"Question {turn}: {sentences(1, seed=turn)}"})
        answer = client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=messages,
            max_tokens=12,
            temperature=temperature,
            seed=turn,
        )
        usage = answer.usage
        assert usage is not None
        if turn:
            assert cached_tokens(usage) >= whole_turn // BLOCK * BLOCK
        else:
            assert cached_tokens(usage) < 2 * BLOCK  # nothing but the template's beginning
        whole_turn = usage.total_tokens
        reply = answer.choices[0].message  # the client's own object, with all its fields
        messages.append(reply if turn % 2 else reply.model_dump())
    wait_until_idle(runtime)


def test_each_node_of_an_agent_tree_finds_everything_of_its_parent(
    client: openai.OpenAI, runtime: Runtime
) -> None:
    encode = runtime.tokenizer.encode
    ends: dict[str, list[int]] = {}

    def ask(node: Ask) -> tuple[str, list[int], int, int]:
        before = ends[node.parent] if node.parent else []
        prompt = before + encode(node.text)
        answer = client.completions.create(
            model=DEFAULT_MODEL,
            prompt=prompt,
            max_tokens=3,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        new: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
        return node.name, prompt + new, cached_tokens(answer.usage), len(before)

    for level in agent_tree(root_sentences=12):
        with ThreadPoolExecutor(8) as threads:
            for name, tokens, cached, parent_len in threads.map(ask, level):
                ends[name] = tokens
                assert cached >= parent_len // BLOCK * BLOCK
        wait_until_idle(runtime)
    assert len(ends) == 1 + 3 + 9 + 27


def test_questions_behind_one_template_find_all_of_it(
    client: openai.OpenAI, runtime: Runtime
) -> None:
    (first,), others = few_shot(questions=64, template_sentences=12)
    template = first.text.split("Question")[0]
    shared = len(runtime.tokenizer.encode(template)) // BLOCK * BLOCK

    def ask(question: Ask) -> int:
        answer = client.completions.create(
            model=DEFAULT_MODEL, prompt=question.text, max_tokens=1, temperature=0
        )
        return cached_tokens(answer.usage)

    assert ask(first) == 0
    with ThreadPoolExecutor(8) as threads:
        assert min(threads.map(ask, others)) >= shared > 100
    wait_until_idle(runtime)


def test_a_streamed_answer_is_the_whole_answer(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**body)
    text, usages = "", []
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**body, stream=True, stream_options=options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usages += [chunk.usage] if chunk.usage else []
    assert text == whole.choices[0].message.content
    (usage,) = usages
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert cached_tokens(usage) >= BLOCK


def test_a_seed_gives_the_same_answer_alone_and_in_company(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        answer = client.completions.create(
            model=DEFAULT_MODEL, prompt="Once upon a time", max_tokens=10, temperature=1, seed=seed
        )
        return answer.choices[0].text

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == alone
    assert len(set(alone)) > 1


def test_stop_strings_end_the_answer_before_them(client: openai.OpenAI) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7,"
    answer = client.completions.create(
        model=DEFAULT_MODEL, prompt=prompt, max_tokens=24, temperature=0, stop=[" 10", "xyz"]
    )
    assert answer.choices[0].text == " 8, 9,"
    assert answer.choices[0].finish_reason == "stop"


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError, match="smollm2"):
        client.chat.completions.create(model="gpt-4", messages=hello)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=DEFAULT_MODEL, messages=hello, temperature=-1)
    long: Any = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match="tokens") as caught:
        client.chat.completions.create(model=DEFAULT_MODEL, messages=long)
    assert caught.value.code == "context_length_exceeded"
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
