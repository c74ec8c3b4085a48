"""What every HTTP request goes through, whatever its endpoint.

Owns: who is calling, the request's id, and that its numbers reach log, metrics and trace.  Does not
know: routes, bodies, answers.
Idea: one plain ASGI layer around the application; a piece of a stream passes it with one call.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.server.context import Caller, Served
from runtime.server.errors import REQUEST_ID, answer_error
from runtime.server.explaining import log_slow_misses
from runtime.server.journal import Journal, request_id_of
from runtime.server.logs import log_request
from runtime.server.tenants import Tenants, key_of

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What needs no key: probes have none."""

OPEN_PAGES = frozenset({"/tree"})
"""What is shown without a key: pages that hold nothing, and ask for one."""

ANYONE = Caller(is_admin=True)
"""Who calls a server without API keys."""

_log = logging.getLogger("radixcache")
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class Tracer(Protocol):
    """Whoever takes the trace of a request."""

    def record(self, journal: Journal, headers: Mapping[str, str], *, ended_ns: int) -> None:
        """Take a request that has ended, at so many nanoseconds since 1970."""

    def close(self) -> None:
        """Send what is still here, and end."""


class Gate:
    """Lets requests in, each with its caller and a journal, and notes what they came to."""

    def __init__(
        self, app: ASGIApp, *, served: Served, tenants: Tenants | None, tracer: Tracer | None
    ) -> None:
        self._app = app
        self._served = served
        self._tenants = tenants
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = request_id_of(headers.get("x-request-id"), otherwise=f"req-{uuid.uuid4().hex}")
        journal = Journal(name, began=self._served.clock())
        scope[REQUEST_ID] = name

        async def send_noted(message: Message) -> None:
            """Note the status, and add the headers of ours."""
            if message["type"] == "http.response.start":
                journal.status = message["status"]
                ours = [(key, name.encode()) for key in (b"x-request-id", b"request-id")]
                ours += journal.answer_headers
                message = {**message, "headers": [*message.get("headers", ()), *ours]}
            await send(message)

        try:
            await self._answer(scope, receive, send_noted, headers, journal)
        finally:
            try:
                self._end(scope, headers, journal)
            except Exception:  # the answer is out, and no client's business is what we note of it
                _log.exception("request %s could not be noted", name)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, journal: Journal
    ) -> None:
        try:
            self._check_headers(scope)
            caller = self._caller(scope["path"], headers)
            journal.tenant = caller.tenant
            scope["radixcache.caller"] = msgspec.structs.replace(caller, journal=journal)
            await self._app(scope, receive, send)
        except Exception as error:
            if journal.status:  # the answer has begun: cutting it short is all that is left
                raise
            response = await answer_error(HttpRequest(scope), error)
            await response(scope, receive, send)

    def _check_headers(self, scope: Scope) -> None:
        """Raise for headers that came whole at once, so that no parser waited and found them long.

        Each has ": " and a line's end beside name and value.
        """
        limit = self._served.config.max_header_bytes
        size = len(scope["path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > limit:
            raise HTTPException(431, f"the headers exceed {limit} bytes")

    def _caller(self, path: str, headers: Headers) -> Caller:
        if self._tenants is None:
            return ANYONE
        if path in OPEN_PATHS | OPEN_PAGES or (
            path == "/metrics" and self._served.config.open_metrics
        ):
            return Caller()  # whatever key is brought: a probe's may be an old one
        return self._tenants.caller(key_of(headers))

    def _end(self, scope: Scope, headers: Headers, journal: Journal) -> None:
        journal.ended = self._served.clock()
        journal.endpoint = endpoint_of(scope)
        self._served.metrics.http_requests[(journal.endpoint, journal.status)] += 1
        log_slow_misses(journal, self._served.config.slow_miss_s)
        log_request(journal, quiet=_is_quiet(scope["path"]))
        if self._tracer is not None:
            self._tracer.record(journal, headers, ended_ns=time.time_ns())


def _is_quiet(path: str) -> bool:
    """Whether a request is one of many that nobody is interested in: probes, and an open page's."""
    return path in OPEN_PATHS or path == "/metrics" or path.startswith("/tree/nodes/")


def endpoint_of(scope: Scope) -> str:
    """Return method and route of a request, of which there are few; "none" where none was found."""
    route = scope.get("route") or _route_of(scope)  # who was let in not at all met no router
    path = getattr(route, "path", None)
    return f"{scope['method']} {path}" if path and scope["method"] in _METHODS else "none"


def _route_of(scope: Scope) -> BaseRoute | None:
    return next((r for r in scope["app"].routes if r.matches(scope)[0] is not Match.NONE), None)
