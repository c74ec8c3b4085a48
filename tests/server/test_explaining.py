"""Why did it miss, over HTTP: each cause, what answers carry, and that nothing is changed by it."""

from __future__ import annotations

import json
import logging
from typing import Any

import anthropic
import httpx
import openai
import pytest

from radixcache import Namespace, PrefixKey, render_text
from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from tests.support.served import NAME, quick_runtime, serving, wait_until_idle

SYSTEM = "You are a patient assistant who answers questions about geography in short sentences."
ASKED = "What is the capital of France, and how many people live there?"


@pytest.fixture
def runtime() -> Runtime:
    return quick_runtime(max_ghosts=1000)


def chat(*said: str, **fields: Any) -> dict[str, Any]:
    """A body: a system prompt, then user and assistant in turn."""
    roles = ["system", *["user", "assistant"] * len(said)]
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
    return {"messages": messages, **fields}


def ask(http: httpx.Client, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = http.post(path, json=body, **options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def explain(http: httpx.Client, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    return ask(http, "/cache/explain", body, **options)


def serve(http: httpx.Client, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return ask(http, path, body | {"max_tokens": 1, "seed": 1}, **options)


def test_what_nobody_sent_was_never_seen_and_then_is_a_hit(http: httpx.Client) -> None:
    body = {"prompt": list(range(500, 533))}
    why = explain(http, body)
    assert (why["cause"], why["cached_tokens"], why["computed_tokens"]) == ("never_seen", 0, 33)
    assert why["prompt"]["token"] == 500
    assert why["cached"] is why["place"] is None
    serve(http, body)
    why = explain(http, body)
    assert (why["cause"], why["cached_tokens"], why["first_missing"]) == ("hit", 32, None)


def test_after_a_quarantine_what_is_cached_anew_is_a_hit_and_no_old_epoch(
    http: httpx.Client, runtime: Runtime
) -> None:
    body = {"prompt": list(range(500, 533))}
    serve(http, body)
    wait_until_idle(runtime)
    runtime.engine.cache.raise_epoch(Namespace())
    assert explain(http, body)["cause"] == "epoch"
    serve(http, body)
    why = explain(http, body)
    assert (why["cause"], why["cached_tokens"]) == ("hit", 32)


def test_a_rest_below_a_block_is_short(http: httpx.Client) -> None:
    serve(http, {"prompt": list(range(500, 532))})
    why = explain(http, {"prompt": list(range(500, 540))})
    assert (why["cause"], why["cached_tokens"], why["first_missing"]) == ("short", 32, 32)


def test_a_divergence_shows_both_texts_and_the_message_and_role(http: httpx.Client) -> None:
    serve(http, chat(SYSTEM, ASKED))
    why = explain(http, chat(SYSTEM, ASKED.replace("France", "Spain")))
    assert why["cause"] == "diverged"
    assert why["place"] == {"part": "messages[1]", "message": 1, "role": "user"}
    assert why["shared"].endswith("What is the capital of")
    assert why["prompt"]["text"].startswith(" Spain, and how many")
    assert why["cached"]["text"].startswith(" France, and how many")
    assert "' Spain, and how many" in why["summary"]
    why = explain(http, chat(SYSTEM.replace("patient", "hasty"), ASKED))
    assert why["place"] == {"part": "messages[0]", "message": 0, "role": "system"}
    assert why["shared"].endswith("You are a")


def test_a_divergence_in_the_tools_names_the_tool(http: httpx.Client) -> None:
    def tool(name: str, does: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": does}}

    first, second = tool("look_up", "Find a page."), tool("add", "Add two numbers up.")
    serve(http, chat(SYSTEM, ASKED, tools=[first, second]))
    other = tool("add", "Add three numbers up.")
    why = explain(http, chat(SYSTEM, ASKED, tools=[first, other]))
    assert (why["cause"], why["place"]["part"]) == ("diverged", "tools[1]")
    why = explain(http, chat(SYSTEM, ASKED, tools=[second, first]))
    assert why["cause"] == "tool_order"
    assert "another order" in why["summary"]


def test_history_without_its_thoughts_is_told_as_such(http: httpx.Client) -> None:
    thought = "<think>\nThe user wants the capital. That is Paris, surely.\n</think>\n\n"
    reply = "It is Paris, where two million people live."
    serve(http, chat(SYSTEM, ASKED, thought + reply, "Thanks!"))
    why = explain(http, chat(SYSTEM, ASKED, reply, "Thanks!"))
    assert why["cause"] == "thinking"
    assert why["place"] == {"part": "messages[2]", "message": 2, "role": "assistant"}


def test_history_with_other_white_space_is_told_as_such(http: httpx.Client) -> None:
    serve(http, chat(SYSTEM, ASKED, "It is Paris,  where people\nlive.", "Thanks!"))
    why = explain(http, chat(SYSTEM, ASKED, "It is Paris, where people live.", "Thanks!"))
    assert why["cause"] == "whitespace"


def test_the_same_text_of_other_tokens_is_told_as_such(
    http: httpx.Client, runtime: Runtime
) -> None:
    text = "The capital of France is Paris, which lies on the river Seine and is old."
    ids = runtime.tokenizer.encode(text)
    letters = [i for letter in " Paris, which lies on" for i in runtime.tokenizer.encode(letter)]
    at = len(runtime.tokenizer.encode("The capital of France is"))
    rest = runtime.tokenizer.encode(" the river Seine and is old.")
    serve(http, {"prompt": [*ids[:at], *letters, *rest]})
    why = explain(http, {"prompt": text})
    assert (why["cause"], why["first_missing"]) == ("retokenised", at)
    assert why["prompt"]["text"].startswith(" Paris, which")
    assert why["cached"]["text"].startswith(" Paris, which")
    assert why["prompt"]["token"] != why["cached"]["token"]


def test_what_was_evicted_is_told_with_how_long_ago(http: httpx.Client, runtime: Runtime) -> None:
    body = chat(SYSTEM, ASKED)
    serve(http, body)
    wait_until_idle(runtime)
    runtime.engine.cache.evict(64)
    why = explain(http, body)
    assert (why["cause"], why["cached_tokens"]) == ("evicted", 0)
    assert why["evicted_tokens"] >= 32
    assert why["evicted_s"] >= 0
    assert " s ago: a larger pool" in why["summary"]


def test_a_raised_epoch_is_told(http: httpx.Client, runtime: Runtime) -> None:
    body = {"prompt": list(range(500, 533))}
    serve(http, body)
    wait_until_idle(runtime)
    runtime.engine.cache.raise_epoch(Namespace())
    assert explain(http, body)["cause"] == "epoch"


def test_another_adapter_of_the_same_salt_is_told(http: httpx.Client, runtime: Runtime) -> None:
    cache, prompt = runtime.engine.cache, list(range(500, 533))

    lease = cache.acquire(PrefixKey.of(prompt, Namespace(adapter="sql")))
    cache.commit(lease, 33)
    cache.release(lease)
    why = explain(http, {"prompt": prompt})
    assert (why["cause"], why["differs_in"]) == ("other_namespace", ["adapter"])
    assert why["elsewhere_tokens"] == 32
    assert "sql" not in json.dumps(why)


def test_a_cache_that_is_off_is_told() -> None:
    runtime = quick_runtime(enable_prefix_cache=False)
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        serve(http, chat(SYSTEM, ASKED))
        assert explain(http, chat(SYSTEM, ASKED))["cause"] == "disabled"


def test_explaining_changes_nothing_in_the_cache(http: httpx.Client, runtime: Runtime) -> None:
    serve(http, chat(SYSTEM, ASKED))
    wait_until_idle(runtime)
    cache = runtime.engine.cache
    before = cache.stats(), render_text(cache.view()), runtime.engine.stats()
    for asked in (ASKED, "Something else", "x" * 200):
        explain(http, chat(SYSTEM, asked))
    wait_until_idle(runtime)
    assert (cache.stats(), render_text(cache.view()), runtime.engine.stats()) == before


def test_an_explanation_foretells_what_the_request_finds(http: httpx.Client) -> None:
    for said in ([ASKED], [ASKED, "Paris.", "And Spain?"], ["What is", "?", "!"], ["What"] * 5):
        body = chat(SYSTEM, *said)
        foretold = explain(http, body)["cached_tokens"]
        used = serve(http, body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert used == foretold


def test_a_chats_body_with_all_its_fields_is_taken_as_it_is(http: httpx.Client) -> None:
    fields = {"temperature": 0.5, "max_completion_tokens": 9, "logprobs": True, "stream": True}
    body = chat(SYSTEM, ASKED, **fields, stream_options={"include_usage": True}, n=2)
    assert explain(http, body)["prompt_tokens"] > 20
    completion = {"prompt": "Once upon a time", "echo": True, "best_of": 2, "suffix": ""}
    assert explain(http, completion)["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"prompt": [1, 10**9]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [7] * 5000}, 400, "prompt"),
        ({"prompt": "word " * 5000}, 400, "prompt"),
        ({"prompt": "x", "promt": 1}, 400, "promt"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "model"),
        ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ({"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
    ],
)
def test_a_wrong_body_is_refused_by_field(
    http: httpx.Client, body: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post("/cache/explain", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_a_conversation_in_anthropics_words_is_explained(http: httpx.Client) -> None:
    serve(http, chat(SYSTEM, ASKED))
    body = {"model": NAME, "system": SYSTEM, "messages": [{"role": "user", "content": "Who?"}]}
    why = ask(http, "/cache/explain/messages", body)
    assert (why["cause"], why["place"]["part"]) == ("diverged", "messages[1]")


def test_an_answer_carries_the_explanation_where_the_body_asks(http: httpx.Client) -> None:
    wanted = {"radixcache": {"explain": True}}
    first = serve(http, chat(SYSTEM, ASKED) | wanted)
    (why,) = first["radixcache"]["explanations"]
    assert (why["cause"], why["cached_tokens"]) == ("never_seen", 0)  # it does not explain itself
    assert "radixcache" not in serve(http, chat(SYSTEM, ASKED))
    both = serve(http, {"prompt": ["a b c", "d e f"]} | wanted)
    assert len(both["radixcache"]["explanations"]) == 2


def test_a_header_asks_and_another_answers(http: httpx.Client) -> None:
    header = {"X-Radixcache-Explain": "1"}
    body = {"prompt": list(range(500, 533)), "max_tokens": 1}
    answer = http.post("/v1/completions", json=body, headers=header)
    assert answer.headers["X-Radixcache-Explain"] == "cause=never_seen; cached=0; computed=33"
    assert answer.json()["radixcache"]["explanations"][0]["cause"] == "never_seen"
    refused = body | {"radixcache": {"explain": False}}
    answer = http.post("/v1/completions", json=refused, headers=header)
    assert "X-Radixcache-Explain" not in answer.headers
    answer = http.post("/v1/chat/completions", json=chat(SYSTEM, max_tokens=1), headers=header)
    assert answer.headers["X-Radixcache-Explain"].endswith("; at=template")


def test_a_stream_carries_it_in_its_last_chunk(http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    messages: Any = chat(SYSTEM, ASKED)["messages"]
    stream = client.chat.completions.create(
        model=NAME,
        messages=messages,
        max_tokens=2,
        stream=True,
        extra_body={"radixcache": {"explain": True}},
    )
    *chunks, last = stream
    assert all("radixcache" not in chunk.model_dump() for chunk in chunks)
    assert last.usage is not None
    assert last.choices == []
    assert last.model_dump()["radixcache"]["explanations"][0]["cause"] == "never_seen"


def test_anthropics_client_gets_it_whole_and_streamed(http: httpx.Client) -> None:
    client = anthropic.Anthropic(base_url=str(http.base_url), api_key="none")
    wanted = {"radixcache": {"explain": True}}
    asked: Any = {"model": NAME, "max_tokens": 2, "messages": [{"role": "user", "content": ASKED}]}
    whole = client.messages.create(**asked, extra_body=wanted)
    assert whole.model_dump()["radixcache"]["explanations"][0]["cause"] == "never_seen"
    with client.messages.stream(**asked, extra_body=wanted) as stream:
        (delta,) = [event for event in stream if event.type == "message_delta"]
    assert delta.model_dump()["radixcache"]["explanations"][0]["cached_tokens"] > 0


def test_a_slow_miss_is_logged_with_its_cause_and_without_its_text(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.executor.step_s = 0.02  # type: ignore[attr-defined]
    logging.getLogger("radixcache").propagate = True
    settings = ServerConfig(slow_miss_s=0.001)
    with (
        caplog.at_level(logging.WARNING, logger="radixcache.misses"),
        serving(runtime, settings=settings) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        serve(http, chat(SYSTEM, ASKED))
        serve(http, chat(SYSTEM, ASKED.replace("France", "Spain")))
    fields = [vars(r)["fields"] for r in caplog.records if r.name == "radixcache.misses"]
    assert [(f["cause"], f["at"]) for f in fields] == [
        ("never_seen", "template"),
        ("diverged", "messages[1]"),
    ]
    assert fields[1]["cached"] > 0
    assert "Spain" not in repr(fields)
