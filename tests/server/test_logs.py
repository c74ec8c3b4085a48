"""Logs: one line a request, with its id and numbers; nothing that a client wrote breaks it."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.loading import Runtime
from runtime.request import Usage
from runtime.server.journal import Journal, request_id_of
from runtime.server.logs import LOGGERS, JsonLines, TextLines, log_request, set_up_logs
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import HashExecutor, serving, wait_until_idle

COMPLETIONS = "/v1/completions"
KEY = "sk-not-to-be-logged"
PROMPT = {"prompt": "A text that is nobody's business. " * 8, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def restored() -> Iterator[None]:
    """Give the loggers back as they were."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(log.handlers, log.level, log.propagate) for log in loggers]
    yield
    for log, (handlers, level, propagate) in zip(loggers, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture
def stream(restored: None) -> io.StringIO:
    stream = io.StringIO()
    set_up_logs("json", "info", stream=stream)
    return stream


@pytest.fixture
def http(runtime: Runtime, stream: io.StringIO) -> Iterator[httpx.Client]:
    tenants = Tenants({"acme": Tenant(keys=(KEY,))}, secret=b"0123456789abcdef")
    with (
        serving(runtime, tenants=tenants) as url,
        httpx.Client(base_url=url, timeout=30, headers={"x-api-key": KEY}) as client,
    ):
        yield client


def requests_in(stream: io.StringIO, count: int = 1) -> list[dict[str, Any]]:
    """The lines of so many requests; the last is written just after its answer was sent."""
    found: list[dict[str, Any]] = []
    for _ in range(500):
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        found = [line for line in lines if line["logger"] == "radixcache.requests"]
        if len(found) >= count:
            break
        time.sleep(0.01)
    assert len(found) == count
    return found


def test_one_line_says_what_a_request_came_to(http: httpx.Client, stream: io.StringIO) -> None:
    answers = [http.post(COMPLETIONS, json=PROMPT | {"seed": 1}) for _ in range(2)]
    first, second = requests_in(stream, 2)
    usage = answers[0].json()["usage"]
    assert first["id"] == answers[0].headers["x-request-id"]
    assert first["answer"] == answers[0].json()["id"]
    assert (first["tenant"], first["endpoint"]) == ("acme", "POST /v1/completions")
    assert (first["status"], first["finish"]) == (200, "length")
    assert first["prompt"] == usage["prompt_tokens"] == first["computed"]
    assert (first["cached"], first["output"]) == (0, 5)
    assert 0 <= first["queue_s"] <= first["ttft_s"] <= first["duration_s"]
    assert 0 < first["itl_mean_s"] <= first["itl_max_s"]
    assert second["cached"] == second["prompt"] - 1 == second["prompt"] - second["computed"]


def test_a_stream_with_branches_has_one_line_too(http: httpx.Client, stream: io.StringIO) -> None:
    two = PROMPT | {"prompt": ["one thing", "another"], "stream": True}
    http.post(COMPLETIONS, json=two)
    (line,) = requests_in(stream)
    assert line["output"] == 10
    assert line["prompt"] > 2


def test_neither_prompts_nor_keys_are_logged(http: httpx.Client, stream: io.StringIO) -> None:
    http.post(COMPLETIONS, json=PROMPT)
    http.post(COMPLETIONS, json=PROMPT | {"temperature": -1})
    http.post(COMPLETIONS, json=PROMPT, headers={"x-api-key": "sk-some-other-key"})
    http.post(COMPLETIONS + "?text=business", json={"prompt": "business", "hue": "business"})
    lines = requests_in(stream, 4)
    assert [line["status"] for line in lines] == [200, 400, 401, 400]
    assert {line["endpoint"] for line in lines} == {"POST /v1/completions"}, "of the refused, too"
    text = stream.getvalue()
    for word in ("business", KEY, "sk-some-other-key"):
        assert word not in text


def test_a_request_that_was_left_has_its_line(
    runtime: Runtime, http: httpx.Client, stream: io.StringIO
) -> None:
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.02
    body = PROMPT | {"max_tokens": 400, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    wait_until_idle(runtime, limit_s=5)
    (line,) = requests_in(stream)
    assert line["finish"] == "abort"
    assert 2 < line["output"] < 400


def test_what_fails_on_our_side_is_logged_once_with_its_traceback(
    runtime: Runtime, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(runtime) as url:
        broken = "a bug of ours"

        def fail(*args: Any, **kwargs: Any) -> list[int]:
            raise ZeroDivisionError(broken)

        monkeypatch.setattr(runtime.tokenizer, "encode", fail)
        answer = httpx.post(url + COMPLETIONS, json=PROMPT, headers={"x-request-id": "abc"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "abc"
    assert broken not in answer.text
    assert requests_in(stream)[0]["status"] == 500
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (trace,) = [line["traceback"] for line in lines if "traceback" in line]
    assert broken in trace


def test_what_layers_below_say_has_the_same_form(stream: io.StringIO) -> None:
    below = ["uvicorn.error", "asyncio", "opentelemetry.sdk.trace.export"]
    for name in below:
        logging.getLogger(name).error("broken")
    assert [json.loads(line)["logger"] for line in stream.getvalue().splitlines()] == below


def test_probes_are_logged_for_debugging_only(http: httpx.Client, stream: io.StringIO) -> None:
    http.get("/health")
    http.get("/tree/nodes/1")  # an open page asks for many
    http.get("/v1/models")
    assert requests_in(stream)[0]["endpoint"] == "GET /v1/models"
    set_up_logs("json", "debug", stream=stream)
    http.get("/health")
    assert requests_in(stream, 2)[1]["endpoint"] == "GET /health"


@pytest.mark.parametrize("sane", ["abc", "0af7651916cd43dd8448eb211c80319c", "a" * 128, '"<>{}='])
def test_a_sane_request_id_is_kept_and_returned(
    sane: str, http: httpx.Client, stream: io.StringIO
) -> None:
    answer = http.post(COMPLETIONS, json=PROMPT, headers={"X-Request-Id": sane})
    assert answer.headers["x-request-id"] == sane
    assert requests_in(stream)[0]["id"] == sane


@pytest.mark.parametrize("id", [None, "", "a" * 129, "a b", "a\tb", "a\nb", "ä", "a\x1b[31m"])
def test_any_other_id_is_replaced(id: str | None) -> None:
    assert request_id_of(id, otherwise="ours") == "ours"


def test_errors_too_bring_the_requests_id(http: httpx.Client) -> None:
    for path, method in (("/nowhere", "GET"), (COMPLETIONS, "GET"), (COMPLETIONS, "POST")):
        answer = http.request(method, path, headers={"X-Request-Id": "abc"})
        assert answer.status_code >= 400
        assert answer.headers["x-request-id"] == "abc"


def record(message: str, **fields: str) -> logging.LogRecord:
    made = logging.LogRecord("radixcache", logging.INFO, "x.py", 1, "%s", (message,), None)
    made.fields = fields
    return made


@given(st.text(), st.text())
def test_no_text_breaks_a_line(message: str, value: str) -> None:
    for formatter in (TextLines(), JsonLines()):
        line = formatter.format(record(message, name=value))
        assert len(line.splitlines()) == 1
        assert not any(letter < " " or letter == "\u202e" for letter in line)
    read = json.loads(JsonLines().format(record(message, name=value)))
    assert (read["message"], read["name"]) == (message, value)


@given(st.text('\n\r\x00\x1b\x85\u2028\u202e ="\\ab', max_size=12))
def test_a_field_of_a_text_line_ends_where_it_should(value: str) -> None:
    line = TextLines().format(record("m", name=value, last="1"))
    assert line.endswith(" last=1")
    before = line.removesuffix(" last=1").partition(" name=")[2]
    if before.startswith('"'):
        json.loads(before)
    else:
        assert " " not in before


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_a_traceback_cannot_pretend_to_be_another_line(formatter: logging.Formatter) -> None:
    forged = "x\n2026-01-01T00:00:00.000Z INFO radixcache.requests request id=forged \ud800"
    try:
        raise ValueError(forged)
    except ValueError as error:
        made = record("failed")
        made.exc_info = (type(error), error, error.__traceback__)
    lines = formatter.format(made).splitlines()
    assert all(line.startswith("  | ") for line in lines[1:])
    assert any("forged" in line for line in lines)
    formatter.format(made).encode()


def test_numbers_that_nobody_has_are_left_out() -> None:
    journal = Journal("abc", began=1.0)
    journal.status, journal.ended = 404, 1.5
    assert journal.fields() == {"id": "abc", "endpoint": "none", "status": 404, "duration_s": 0.5}
    journal.answer_ids.append("cmpl-1")
    journal.note_prompt(
        Usage(prompt_tokens=9, cached_tokens=4, computed_tokens=5, completion_tokens=0, queue_s=0.1)
    )
    fields = journal.fields()
    assert (fields["prompt"], fields["cached"], fields["computed"]) == (9, 4, 5)
    assert not {"ttft_s", "itl_mean_s", "finish", "tenant"} & fields.keys()


def test_a_line_costs_nothing_where_nobody_reads_it(restored: None) -> None:
    stream = io.StringIO()
    set_up_logs("text", "warning", stream=stream)
    log_request(Journal("abc", began=0.0))
    assert stream.getvalue() == ""
