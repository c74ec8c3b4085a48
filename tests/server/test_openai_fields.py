"""The official `openai` client against the real model: the fields of chat and completions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.loading import Runtime, load_runtime
from tests.support.served import serving, wait_until_idle

ASK: Any = [{"role": "user", "content": "Name a fruit."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Rome", "Oslo"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load_runtime(RuntimeConfig(num_blocks=512, block_size=16))


@pytest.fixture(scope="module")
def client(runtime: Runtime) -> Iterator[openai.OpenAI]:
    with (
        serving(runtime) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def nothing_stays_held(runtime: Runtime) -> Iterator[None]:
    yield
    wait_until_idle(runtime)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": DEFAULT_MODEL, "messages": ASK, "max_completion_tokens": 8} | fields
    )


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(
        **{"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 6} | fields
    )


def test_a_stream_ends_with_its_usage_and_has_none_before(client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, stream_options={"include_usage": True}, temperature=0)
    *pieces, last = list(stream)
    assert all(piece.usage is None for piece in pieces)
    assert last.choices == []
    whole = chat(client, temperature=0)
    assert last.usage.completion_tokens == whole.usage.completion_tokens > 0
    text = "".join(c.delta.content or "" for piece in pieces for c in piece.choices)
    assert text == whole.choices[0].message.content


def test_branches_of_one_seed_differ_and_come_again(client: openai.OpenAI) -> None:
    answers = [
        [choice.message.content for choice in chat(client, n=n, seed=5, temperature=1.5).choices]
        for n in (4, 4, 2)
    ]
    assert answers[0] == answers[1]
    assert answers[2] == answers[0][:2]
    assert len(set(answers[0])) > 1
    assert answers[0] != [c.message.content for c in chat(client, n=4, seed=6).choices]


@pytest.mark.parametrize("n", [1, 3])
def test_a_drawn_stream_put_together_is_the_whole_answer(client: openai.OpenAI, n: int) -> None:
    fields: Any = {"n": n, "seed": 3, "temperature": 1.2, "stop": ["e "], "max_tokens": 10}
    whole = complete(client, **fields, logprobs=2)
    texts, logprobs, reasons = [""] * n, [[] for _ in range(n)], [None] * n  # type: ignore[var-annotated]
    for piece in complete(client, **fields, logprobs=2, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.token_logprobs
    for at, choice in enumerate(whole.choices):
        assert texts[at] == choice.text
        assert "e " not in choice.text
        assert reasons[at] == choice.finish_reason
        assert logprobs[at] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_a_prompt_that_several_branches_continue_is_counted_once(client: openai.OpenAI) -> None:
    one, many = complete(client), complete(client, n=3, extra_body={"ignore_eos": True})
    assert many.usage.prompt_tokens == one.usage.prompt_tokens
    assert many.usage.completion_tokens == 18
    best = complete(client, best_of=3, extra_body={"ignore_eos": True})
    assert best.usage.completion_tokens == 18


def test_the_likeliest_token_is_the_one_that_greedy_decoding_takes(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, temperature=0)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for told in content:
        assert len(told.top_logprobs) == 3
        assert told.top_logprobs[0].token == told.token
        numbers = [top.logprob for top in told.top_logprobs]
        assert numbers == sorted(numbers, reverse=True)
        assert sum(map(math.exp, numbers)) <= 1.0001
        assert bytes(told.bytes).decode("utf-8", "replace") == told.token
    text = answer.choices[0].message.content
    assert b"".join(bytes(told.bytes) for told in content).decode().startswith(text)


def test_the_best_of_several_is_the_likeliest_of_them(client: openai.OpenAI) -> None:
    fields: Any = {"seed": 11, "temperature": 1.5, "logprobs": 0}
    every = complete(client, n=4, **fields).choices
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every]
    order = sorted(range(4), key=lambda at: -means[at])
    best = complete(client, best_of=4, n=2, **fields).choices
    assert [choice.text for choice in best] == [every[at].text for at in order[:2]]
    assert [choice.index for choice in best] == [0, 1]


def test_an_echoed_prompt_tells_how_likely_its_tokens_are(
    client: openai.OpenAI, runtime: Runtime
) -> None:
    prompt = "Once upon a time, there was a little girl"
    ids = runtime.tokenizer.encode(prompt)
    for cached in (False, True):  # the second time its K/V is in the cache
        answer = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        (choice,) = answer.choices
        assert choice.text == prompt
        assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 0
        assert len(choice.logprobs.tokens) == len(ids)
        first, *rest = choice.logprobs.token_logprobs
        assert first is None
        assert all(-30 < number < 0 for number in rest)
        assert "".join(choice.logprobs.tokens) == prompt
        assert [prompt[at:] for at in choice.logprobs.text_offset][-1] == " girl"
        if cached:
            assert answer.usage.prompt_tokens_details.cached_tokens > 0 or len(ids) < 16
    both = complete(client, prompt=ids, echo=True, logprobs=1, max_tokens=2, temperature=0)
    assert both.choices[0].text.startswith(prompt)
    assert both.choices[0].logprobs.token_logprobs[1 : len(ids)] == pytest.approx(rest, abs=1e-3)


def test_a_bias_forbids_and_forces_tokens(client: openai.OpenAI, runtime: Runtime) -> None:
    plain = complete(client, temperature=0, max_tokens=1, extra_body={"return_token_ids": True})
    (likeliest,) = plain.choices[0].token_ids
    assert plain.choices[0].prompt_token_ids == runtime.tokenizer.encode("Once upon a time")
    other = complete(
        client,
        temperature=0,
        max_tokens=1,
        logit_bias={str(likeliest): -100},
        extra_body={"return_token_ids": True},
    )
    assert other.choices[0].token_ids != [likeliest]
    (apple,) = runtime.tokenizer.encode(" apple")
    forced = complete(client, temperature=1, max_tokens=3, logit_bias={str(apple): 100})
    assert forced.choices[0].text == " apple" * 3


def test_penalties_keep_a_token_from_coming_again(client: openai.OpenAI) -> None:
    body = {"ignore_eos": True, "return_token_ids": True}
    fields: Any = {"prompt": "1 2 1 2 1 2 1 2 1", "temperature": 0, "max_tokens": 16}
    for penalty in ("frequency_penalty", "presence_penalty"):
        plain = complete(client, **fields, extra_body=body).choices[0].token_ids
        penalized = complete(client, **fields, extra_body=body | {penalty: 2}).choices[0].token_ids
        assert len(set(plain)) < len(set(penalized))


def test_json_follows_its_schema(client: openai.OpenAI) -> None:
    schema = {"name": "person", "strict": True, "schema": PERSON}
    for stream in (False, True):
        answer = chat(
            client,
            response_format={"type": "json_schema", "json_schema": schema},
            max_completion_tokens=80,
            temperature=0,
            stream=stream,
        )
        if stream:
            text = "".join(c.delta.content or "" for piece in answer for c in piece.choices)
        else:
            assert answer.choices[0].finish_reason == "stop"
            text = answer.choices[0].message.content
        person = json.loads(text)
        assert person["name"] in ("Ada", "Bob")
        assert person["age"] <= 99


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["plum", "pear"]}, ("plum", "pear")),
        ({"guided_regex": "(ab|cd){2}"}, ("abab", "abcd", "cdab", "cdcd")),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, ("xy", "xz")),
        ({"guided_json": {"enum": [7, 8]}}, ("7", "8")),
        ({"guided_json": '{"const": true}'}, ("true",)),
        ({"structured_outputs": {"choice": ["plum", "pear"]}}, ("plum", "pear")),
        ({"structured_outputs": {"json": {"enum": [7, 8]}}}, ("7", "8")),
    ],
)
def test_a_guided_output_is_one_that_is_allowed(
    client: openai.OpenAI, fields: dict[str, Any], allowed: tuple[str, ...]
) -> None:
    for choice in chat(client, n=2, extra_body=fields).choices:
        assert choice.message.content in allowed
        assert choice.finish_reason == "stop"
    prompts = complete(client, prompt=["A:", "B:", "C:"], extra_body=fields)
    assert all(choice.text in allowed for choice in prompts.choices)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
    ],
)
def test_a_demanded_call_comes_and_its_result_can_be_sent_back(
    client: openai.OpenAI, choice: Any, reason: str
) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = chat(
        client,
        messages=messages,
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_completion_tokens=80,
        temperature=0,
    )
    assert answer.choices[0].finish_reason == reason
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": call.id, "content": "Snow, -3 °C"}
    following = chat(client, messages=[*messages, message, result], tools=[WEATHER])
    assert following.choices[0].message.content is not None
    turn = answer.usage.total_tokens
    assert following.usage.prompt_tokens_details.cached_tokens >= turn // 16 * 16


def test_the_clients_own_stream_reads_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=80,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or ()
    assert call.function.name == "weather"
    assert call.function.parsed_arguments["town"] in ("Rome", "Oslo")  # type: ignore[index]


class Forecast(BaseModel):
    """The weather in a town."""

    town: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def test_the_clients_own_parsing_reads_models(client: openai.OpenAI) -> None:
    fields: Any = {"model": DEFAULT_MODEL, "messages": ASK, "max_completion_tokens": 120}
    answer = client.chat.completions.parse(**fields, response_format=Forecast, temperature=0)
    parsed = answer.choices[0].message.parsed
    assert parsed is not None
    assert parsed.days in range(1, 10)
    tool = openai.pydantic_function_tool(Forecast)
    named: Any = {"type": "function", "function": {"name": "Forecast"}}
    called = client.chat.completions.parse(**fields, tools=[tool], tool_choice=named, temperature=0)
    (call,) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Forecast)


def test_a_schema_that_says_nothing_of_other_properties_gets_none(client: openai.OpenAI) -> None:
    schema = Forecast.model_json_schema()
    assert "additionalProperties" not in schema
    tool: Any = {"type": "function", "function": {"name": "forecast", "parameters": schema}}
    named = {"type": "function", "function": {"name": "forecast"}}
    for body in (
        {"tools": [tool], "tool_choice": named},
        {"extra_body": {"guided_json": schema}},
    ):
        (choice,) = chat(client, **body, temperature=1.5, max_completion_tokens=200).choices
        calls = choice.message.tool_calls
        written = calls[0].function.arguments if calls else choice.message.content
        assert json.loads(written).keys() == {"town", "days"}
        assert choice.finish_reason == "stop"


def test_a_salt_keeps_what_it_cached_apart(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int:
        body = {"cache_salt": salt} if salt else {}
        prompt = "The quick brown fox jumps over the lazy dog and runs away from it. " * 3
        usage = complete(client, prompt=prompt, max_tokens=1, extra_body=body).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached(None) == 0
    assert cached(None) > 16
    assert cached("mine") == 0
    assert cached("mine") > 16
    assert cached("yours") == 0


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": 9999}, openai.BadRequestError, "temperature"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"n": "two"}, openai.BadRequestError, "n"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
    ],
)
def test_the_client_raises_the_error_that_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        chat(client, **fields)
    assert caught.value.param == param


def test_a_deadline_ends_the_answer_with_an_error_of_its_own(client: openai.OpenAI) -> None:
    body = {"timeout_s": 0.001, "ignore_eos": True}
    with pytest.raises(openai.InternalServerError) as caught:
        complete(client, max_tokens=400, extra_body=body)
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError) as streamed:
        list(complete(client, max_tokens=400, extra_body=body, stream=True))
    assert streamed.value.code == "deadline_exceeded"


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == DEFAULT_MODEL
    assert client.models.retrieve(DEFAULT_MODEL) == model
