"""The OpenAPI document: every endpoint, with the records that it takes and gives.

Owns: what an endpoint is, the routes of all, and the document that tells of them.  Does not know:
what endpoints do.
Idea: the application routes the same list that the document is made of, and the schemas come from
the records that bodies are decoded as, so neither can fall behind the code.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from runtime.server.answers import ErrorAnswer

_CONVERTER = re.compile(r"\{(\w+)(?::\w+)?\}")
_REF = "#/components/schemas/{name}"


class Endpoint(msgspec.Struct, frozen=True):
    """One path and method, and what they take and give.

    path         as the router has it; `{name}` varies
    call         what answers
    body         record of the JSON body, None where there is none
    answer       record of the JSON answer, None where it is text
    media_type   of an answer that is text
    error        record of every answer that is no success
    is_streamed  whether a body can ask for the answer as server-sent events
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    call: Callable[[HttpRequest], Awaitable[Response]]
    summary: str
    body: Any = None
    answer: Any = None
    error: Any = ErrorAnswer
    is_streamed: bool = False
    media_type: str = "text/plain"


def routes_of(endpoints: Iterable[Endpoint]) -> list[Route]:
    """Return the routes, one a path, so that a wrong method is told of all that serve."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [
        Route(path, _by_method(methods), methods=list(methods)) for path, methods in by_path.items()
    ]


def _by_method(methods: Mapping[str, Endpoint]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def call(request: HttpRequest) -> Response:
        name = "GET" if request.method == "HEAD" else request.method
        return await methods[name].call(request)

    return call


def openapi_document(
    endpoints: Iterable[Endpoint], *, title: str, version: str, needs_key: bool = False
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all endpoints, as JSON's own types.

    needs_key  whether callers must bring an API key
    """
    endpoints = list(endpoints)
    kinds = {kind for e in endpoints for kind in (e.body, e.answer, e.error) if kind is not None}
    ordered = sorted(kinds, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = _CONVERTER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": dict(components)},
    }
    if needs_key:
        schemes = {"key": {"type": "http", "scheme": "bearer"}}
        document["components"]["securitySchemes"] = schemes
        document["security"] = [{"key": []}]
    return document


def _operation(endpoint: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {endpoint.media_type: {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        answer = {"application/json": {"schema": schema_of[endpoint.answer]}}
    if endpoint.is_streamed:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    failure = {"application/json": {"schema": schema_of[endpoint.error]}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "done", "content": answer},
            "default": {"description": "what went wrong", "content": failure},
        },
    }
    if endpoint.body is not None:
        content = {"application/json": {"schema": schema_of[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    names = [match[1] for match in _CONVERTER.finditer(endpoint.path)]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation
