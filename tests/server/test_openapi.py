"""The OpenAPI document and the endpoints that generate nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance

from runtime.loading import Runtime
from tests.support.served import HashExecutor, quick_runtime, serving, wait_until_idle

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime(num_blocks=16)


@pytest.fixture(scope="module")
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = http.get("/openapi.json").json()
    return answer


def test_every_endpoint_of_the_document_is_served_and_in_the_docs(
    http: httpx.Client, document: dict[str, Any]
) -> None:
    text = re.sub(r"\{\w+\}", "{}", DOCS.read_text())
    operations = [(p, m) for p, methods in document["paths"].items() for m in methods]
    assert len(operations) > 10
    for path, method in operations:
        named = f"`{method.upper()} {re.sub(r'{.*?}', '{}', path)}`"
        assert named in text, f"{named} is not documented"
        url = path.format(name="x", session="x", node="x")
        with http.stream(method, url) as answer:  # a feed has no end
            assert answer.status_code not in (405, 500)
            if answer.status_code == 200:
                told = document["paths"][path][method]["responses"]["200"]["content"]
                assert answer.headers["content-type"].partition(";")[0] in told


def test_every_method_of_a_path_is_told_where_none_of_them_was_asked_for(
    http: httpx.Client, document: dict[str, Any]
) -> None:
    for path, methods in document["paths"].items():
        answer = http.request("PATCH", path.format(name="x", session="x", node="x"))
        assert answer.status_code == 405
        allowed = {method.strip() for method in answer.headers["Allow"].split(",")}
        assert allowed - {"HEAD"} == {method.upper() for method in methods}


def test_every_reference_of_the_document_leads_to_a_schema(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    found = set(references(document))
    assert len(found) > 20
    schemas = document["components"]["schemas"]
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= schemas.keys()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
)
def test_what_the_document_allows_is_answered_as_it_says(
    http: httpx.Client, document: dict[str, Any], runtime: Runtime, path: str
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    statuses: set[int] = set()

    @settings(
        max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(), is_said=st.booleans())
    def answers(case: schemathesis.Case, is_said: bool) -> None:
        if is_said and isinstance(case.body, dict) and "messages" in case.body:
            # what a message may hold depends on its role, which the document does not tell
            case.body["messages"] = [{"role": "user", "content": "Hi"}]
        answer = case.call(base_url=str(http.base_url))
        statuses.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 504, answer.text
        if "json" in answer.headers["content-type"][0]:
            case.validate_response(answer, checks=[response_schema_conformance])

    answers()
    assert 200 in statuses
    wait_until_idle(runtime)


def test_tokens_and_text_lead_to_each_other(http: httpx.Client, runtime: Runtime) -> None:
    for text in ("Hello there", "", "naïve ☃ <|im_end|>"):
        answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == runtime.prompt_tokens(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == runtime.engine.config.max_len
        back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back == {"prompt": text}
    control = http.post("/tokenize", json={"prompt": "<|im_end|>", "parse_special": True}).json()
    assert control["count"] == 1
    assert control["token_strs"] is None


def test_a_conversation_is_tokenized_as_a_chat_would_be(
    http: httpx.Client, runtime: Runtime
) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == tokens
    shorter = http.post(
        "/tokenize", json={"messages": messages, "add_generation_prompt": False}
    ).json()["tokens"]
    assert tokens[: len(shorter)] == shorter != tokens
    tools = [{"type": "function", "function": {"name": "look"}}]
    longer = http.post("/tokenize", json={"messages": messages, "tools": tools}).json()["tokens"]
    assert len(longer) > len(tokens)
    wait_until_idle(runtime)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_what_can_not_be_tokenized_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_reset_makes_the_next_request_miss_and_leaves_running_ones_alone() -> None:
    runtime = quick_runtime()
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:

        def cached(**fields: Any) -> int:
            body = {"prompt": [7] * 64, "max_tokens": 1} | fields
            usage = http.post("/v1/completions", json=body).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert (cached(), cached(), cached(cache_salt="s"), cached(cache_salt="s")) == (
            0,
            63,
            0,
            63,
        )
        executor.step_s = 0.01
        body = {"prompt": [9] * 40, "max_tokens": 30, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            assert http.post("/reset_prefix_cache").json()["freed_blocks"] >= 8
            assert sum(line.startswith("data: {") for line in lines) >= 28
        executor.step_s = 0.0
        assert (cached(), cached(cache_salt="s")) == (0, 0)
        wait_until_idle(runtime)


def test_readiness_says_why_no_requests_are_taken() -> None:
    runtime = quick_runtime(max_waiting=1, max_running=1)
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    executor.step_s = 0.02
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        assert http.get("/ready").json() == {"status": "ready", "exact": None}
        body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # kept: to drop it is to leave
            next(lines)
            with http.stream("POST", "/v1/completions", json=body):
                for _ in range(100):
                    answer = http.get("/ready")
                    if answer.status_code == 503:
                        break
                assert "queue is full" in answer.json()["error"]["message"]
                assert http.get("/health").status_code == 200
        wait_until_idle(runtime)
        assert http.get("/ready").status_code == 200
