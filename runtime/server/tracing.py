"""OpenTelemetry traces: one span a request.  Needs the optional extra `otel`.

Owns: the span's attributes, after OpenTelemetry's conventions for generative AI and HTTP.  Does not
know: how a request was answered; it reads the journal.
Idea: a span is made when its request has ended, with the times that were noted, so a request pays
nothing for it on the way.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from runtime.server.journal import Journal

_OPERATIONS = {
    "POST /v1/chat/completions": "chat",
    "POST /v1/messages": "chat",
    "POST /v1/completions": "text_completion",
    "POST /v1/sessions/{session}/generate": "text_completion",
}
_PROBES = ("GET /health", "GET /ready", "GET /metrics")
_NANOSECONDS = 1e9


class RequestTracer:
    """Turns journals into spans.

    model      name of the served model
    processor  where spans go
    """

    def __init__(self, processor: SpanProcessor, *, model: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "radixcache"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("radixcache")
        self._parents = TraceContextTextMapPropagator()
        self._model = model

    def record(self, journal: Journal, headers: Mapping[str, str], *, ended_ns: int) -> None:
        """Send the span of a request that has ended; its parent is the caller's `traceparent`."""
        ended = journal.ended
        if journal.endpoint in _PROBES or ended is None:
            return

        def at(seconds: float) -> int:
            return ended_ns - int((ended - seconds) * _NANOSECONDS)

        span = self._tracer.start_span(
            self._name_of(journal),
            context=self._parents.extract(headers),
            kind=SpanKind.SERVER,
            start_time=at(journal.began),
            attributes=self._attributes(journal),
        )
        if journal.first_token_at is not None:
            span.add_event("first_token", timestamp=at(journal.first_token_at))
        if journal.status >= 500 or "error" in journal.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended_ns)

    def close(self) -> None:
        """Send what is still here; blocks for as long as the exporter's time limit."""
        self._provider.shutdown()

    def _name_of(self, journal: Journal) -> str:
        operation = _OPERATIONS.get(journal.endpoint)
        if operation:
            return f"{operation} {self._model}"
        return "HTTP" if journal.endpoint == "none" else journal.endpoint

    def _attributes(self, journal: Journal) -> dict[str, str | int | float | list[str]]:
        method, _, route = journal.endpoint.partition(" ")
        attributes: dict[str, str | int | float | list[str]] = {
            "http.response.status_code": journal.status,
            "radixcache.request_id": journal.request_id,
        }
        if route:
            attributes |= {"http.request.method": method, "http.route": route}
        if journal.tenant:
            attributes["radixcache.tenant"] = journal.tenant
        if not journal.answer_ids:
            return attributes
        attributes |= {
            "gen_ai.provider.name": "radixcache",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": journal.answer_ids[0],
            "gen_ai.response.finish_reasons": journal.finish_reasons,
            "gen_ai.usage.input_tokens": journal.prompt_tokens,
            "gen_ai.usage.output_tokens": journal.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": journal.cached_tokens,
            "radixcache.cached_tokens": journal.cached_tokens,
            "radixcache.computed_tokens": journal.computed_tokens,
            "radixcache.queue_s": journal.queue_s,
        }
        if journal.endpoint in _OPERATIONS:
            attributes["gen_ai.operation.name"] = _OPERATIONS[journal.endpoint]
        if journal.time_to_first_token_s is not None:
            first = journal.time_to_first_token_s
            attributes["gen_ai.response.time_to_first_chunk"] = first
        return attributes


def otlp_tracer(endpoint: str, *, model: str) -> RequestTracer:
    """Return a tracer that sends spans to a collector over OTLP/HTTP, from a thread of its own.

    endpoint  such as http://localhost:4318/v1/traces
    """
    return RequestTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model=model)
