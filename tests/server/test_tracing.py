"""Traces: one span a request, below the caller's, with what it came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from runtime.server.journal import Journal
from runtime.server.tracing import RequestTracer
from tests.support.served import NAME, HashExecutor, quick_runtime, serving, wait_until_idle

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "seed": 1}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Iterator[RequestTracer]:
    tracer = RequestTracer(SimpleSpanProcessor(spans), model=NAME)
    yield tracer
    tracer.close()


def asked(tracer: RequestTracer, spans: InMemorySpanExporter, *bodies: Any) -> Sequence[Any]:
    """The spans of chats, one after the other, and of a few probes between them."""
    with serving(quick_runtime(), tracer=tracer) as url:
        for body in bodies:
            httpx.get(url + "/health")
            headers = {"traceparent": PARENT, "x-request-id": "abc"}
            httpx.post(url + "/v1/chat/completions", json=body, headers=headers, timeout=30)
    return spans.get_finished_spans()


def test_a_request_is_one_span_below_the_callers(
    tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    first, second = asked(tracer, spans, CHAT, CHAT | {"stream": True})
    assert first.name == f"chat {NAME}"
    assert first.kind is SpanKind.SERVER
    assert f"{first.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{first.parent.span_id:016x}" == PARENT.split("-")[2]
    assert first.resource.attributes["service.name"] == "radixcache"
    noted = dict(second.attributes)
    assert noted["http.route"] == "/v1/chat/completions"
    assert noted["http.request.method"] == "POST"
    assert noted["http.response.status_code"] == 200
    assert noted["gen_ai.operation.name"] == "chat"
    assert noted["gen_ai.request.model"] == noted["gen_ai.response.model"] == NAME
    assert noted["gen_ai.response.finish_reasons"] == ("length",)
    assert noted["gen_ai.usage.output_tokens"] == 4
    cached = noted["gen_ai.usage.input_tokens"] - 1
    assert noted["gen_ai.usage.cache_read.input_tokens"] == cached
    assert noted["radixcache.cached_tokens"] == cached
    assert first.attributes["radixcache.cached_tokens"] == 0
    assert noted["radixcache.request_id"] == "abc"


def test_the_first_token_is_an_event_within_the_span(
    tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    (span,) = asked(tracer, spans, CHAT)
    (event,) = span.events
    assert event.name == "first_token"
    assert span.start_time < event.timestamp <= span.end_time
    waited = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert abs((event.timestamp - span.start_time) / 1e9 - waited) < 1e-5


def test_no_text_of_a_client_stands_in_a_span(
    tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    asked(tracer, spans, CHAT | {"messages": [{"role": "user", "content": "secret words"}]})
    asked(tracer, spans, CHAT | {"secret words": 1})
    shown = [span.to_json() for span in spans.get_finished_spans()]
    assert len(shown) == 2
    assert all("secret words" not in span for span in shown)


def test_what_was_refused_has_a_span_without_tokens(
    tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    (span,) = asked(tracer, spans, CHAT | {"temperature": -1})
    assert span.attributes["http.response.status_code"] == 400
    assert not [name for name in span.attributes if name.startswith("gen_ai")]
    assert span.status.status_code is StatusCode.UNSET


def test_what_failed_on_our_side_is_an_error(
    tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    journal = Journal("abc", began=1.0)
    journal.endpoint, journal.status, journal.ended = "GET /v1/models", 503, 2.5
    tracer.record(journal, {}, ended_ns=10_000_000_000)
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.parent is None
    assert (span.start_time, span.end_time) == (8_500_000_000, 10_000_000_000)


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "x" * 1000, PARENT.replace("0af", "\xff")])
def test_a_parent_that_makes_no_sense_is_none(
    header: str, tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    journal = Journal("abc", began=1.0)
    journal.ended = 2.0
    tracer.record(journal, {"traceparent": header}, ended_ns=10)
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert span.name == "HTTP"  # no route was found


def test_a_request_that_was_left_has_a_span(
    tracer: RequestTracer, spans: InMemorySpanExporter
) -> None:
    runtime = quick_runtime()
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.02
    body = CHAT | {"max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(runtime, tracer=tracer) as url:
        with httpx.stream("POST", url + "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
        wait_until_idle(runtime, limit_s=5)
    spans_made: Sequence[ReadableSpan] = spans.get_finished_spans()
    (span,) = spans_made
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
