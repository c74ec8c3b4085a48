"""Errors to HTTP: status and OpenAI's error body.

Owns: which error is which status.  Does not know: routes.
"""

from __future__ import annotations

import logging
import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from radixcache.errors import CallerError
from runtime.errors import (
    EngineFailure,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    ServerBusy,
)
from runtime.server.answers import ErrorAnswer, ErrorBody

_log = logging.getLogger("radixcache")
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*?)`")


class BodyTooLarge(RequestError):
    """The body of a request exceeds the server's limit."""


class MalformedBody(RequestError):
    """The body of a request is not JSON."""


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Return status and body of an error.

    400 a wrong value, malformed JSON, or a prompt too long · 404 an unknown model · 413 a body too
    large · 422 JSON of the wrong shape · 429 the queue is full · 500 a step failed · 503 the
    engine is gone.
    """
    match error:
        case msgspec.ValidationError():
            return 422, _shape_error(str(error))
        case PromptTooLong():
            return 400, _request_error(error, code="context_length_exceeded")
        case ModelNotFound():
            return 404, _request_error(error, code="model_not_found")
        case BodyTooLarge():
            return 413, _request_error(error, code="body_too_large")
        case RequestError():
            return 400, _request_error(error)
        case CallerError():
            return 400, ErrorBody(message=str(error), type="invalid_request_error")
        case ServerBusy():
            return 429, ErrorBody(message=str(error), type="rate_limit_error", code="server_busy")
        case EngineFailure():
            return 503, ErrorBody(message=str(error), type="server_error", code="engine_failure")
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            return error.status_code, ErrorBody(message=error.detail, type=kind)
    _log.error("a request failed on our side", exc_info=error)
    return 500, ErrorBody(message="internal error; the server's log has it", type="server_error")


async def answer_error(request: Request, error: Exception) -> Response:
    """Turn an error into a response."""
    status, body = error_body(error)
    headers = {}
    if isinstance(error, ServerBusy):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return json_response(ErrorAnswer(body), status=status, headers=headers)


def json_response(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a record as a JSON response."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def _request_error(error: RequestError, *, code: str | None = None) -> ErrorBody:
    return ErrorBody(message=str(error), type="invalid_request_error", param=error.param, code=code)


def _shape_error(text: str) -> ErrorBody:
    """Name the field that a validation error is about, as OpenAI does."""
    path = _PATH.search(text)
    param = path[1] if path and path[1] else None
    unknown = _UNKNOWN.search(text)
    if unknown:
        param = f"{param}.{unknown[1]}" if param else unknown[1]
    message = _PATH.sub("", text)
    if param and not unknown:
        message = f"`{param}`: {message[:1].lower()}{message[1:]}"
    return ErrorBody(message=message, type="invalid_request_error", param=param)
