"""Errors to HTTP: status and OpenAI's error body.

Owns: which error is which status, and the errors that only a server has.  Does not know: routes.

    RuntimeFault
    ├── RequestError
    │   ├── BodyTooLarge      413  the body exceeds the limit
    │   ├── BodyTooSlow       408  the body did not arrive in time
    │   ├── WrongMediaType    415  the body does not say that it is JSON, or is compressed
    │   ├── MalformedBody     400  the body is not JSON, or nested too deeply
    │   ├── DeadlineExceeded  504  the request's own deadline passed before its answer was whole
    │   ├── Unauthorized      401  no API key, or an unknown one
    │   └── Forbidden         403  the key's tenant may not do this
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
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    RequestError,
    ServerBusy,
    SessionBusy,
    SessionNotFound,
)
from runtime.request import NO_ROOM, RequestOutput
from runtime.server.answers import ErrorAnswer, ErrorBody
from runtime.server.anthropic_answers import ErrorEvent, error_answer

_log = logging.getLogger("radixcache")
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_ROUTER_SAYS = {
    "Not Found": "nothing is served at `{}`: ask /v1/chat/completions, /v1/completions or "
    "/v1/messages; /openapi.json lists all",
    "Method Not Allowed": "`{}` is not served, other methods of that path are: see /openapi.json",
}
_GRAMMAR_FAILED = "GrammarFailure: "  # an error of a module that may not be importable here
_FIELDS = (
    (
        re.compile(r"Object contains unknown field `(.*)`"),
        "unknown_parameter",
        "unknown field `{}`: mend its name, or leave it out",
    ),
    (
        re.compile(r"Object missing required field `(.*)`"),
        "missing_required_parameter",
        "the field `{}` is missing: send it",
    ),
)


class BodyTooLarge(RequestError):
    """The body of a request exceeds the server's limit."""


class BodyTooSlow(RequestError):
    """The body of a request did not arrive in time."""


class WrongMediaType(RequestError):
    """The body of a request does not say that it is JSON, or is compressed."""


class MalformedBody(RequestError):
    """The body of a request is not JSON, or nested too deeply."""


class DeadlineExceeded(RequestError):
    """The deadline that a request brought passed before its answer was whole."""


class Unauthorized(RequestError):
    """A request brings no API key, or one that nobody has."""


class Forbidden(RequestError):
    """The tenant whose key a request brings may not do what it asks."""


REQUEST_ID = "radixcache.request_id"
"""Where the scope of a request has its id."""

FAILED = ("error", "abort", "timeout")
"""Finish reasons of branches that gave no whole answer."""


def failure_of(output: RequestOutput) -> Exception:
    """Return the error that the last news of a failed branch stands for; raise it, or show it."""
    if output.finish_reason == "timeout":
        return DeadlineExceeded(
            f"the request's time was over after {output.usage.completion_tokens} new tokens: "
            "allow more of it, or ask for fewer tokens"
        )
    if output.finish_reason == "abort":
        return HTTPException(503, "the request was ended by the server, which is shutting down")
    error = output.error or "the request failed on the server's side"
    if error.startswith(_GRAMMAR_FAILED):  # while it was followed: it grew too complex
        return InvalidRequest(f"what the output must look like can't be enforced: {error}")
    return HTTPException(503 if error.startswith(NO_ROOM) else 500, error)


def error_body(error: Exception, name: str) -> tuple[int, ErrorBody]:
    """Return status and body of an error; what nobody foresaw is logged with its traceback.

    name  id of the request or the answer that it ends, as the log's line of the request has it

    400 a wrong value or shape, malformed JSON, or a prompt too long · 401 no key · 403 not allowed
    · 404 an unknown model or session · 408 a body too slow · 409 a session in use · 413 a body too
    large · 415 a body that is not called JSON, or is compressed · 429 the queue is full · 500 a
    step failed · 503 the engine is gone · 504 the deadline passed.
    """
    match error:
        case msgspec.ValidationError():
            return 400, _shape_error(str(error))
        case PromptTooLong():
            return 400, _request_error(error, code="context_length_exceeded")
        case ModelNotFound():
            return 404, _request_error(error, code="model_not_found")
        case BodyTooLarge():
            return 413, _request_error(error, code="body_too_large")
        case WrongMediaType():
            return 415, _request_error(error, code="unsupported_media_type")
        case BodyTooSlow():
            return 408, _request_error(error, code="body_too_slow")
        case Unauthorized():
            return 401, _request_error(error, code="invalid_api_key")
        case Forbidden():
            return 403, _request_error(error, code="forbidden", kind="permission_error")
        case DeadlineExceeded():
            return 504, _request_error(error, code="deadline_exceeded", kind="server_error")
        case SessionNotFound():
            return 404, _request_error(error, code="session_not_found")
        case SessionBusy():
            return 409, _request_error(error, code="session_busy")
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
    _log.error("request %s failed", name, exc_info=error)
    return 500, ErrorBody(message="internal error; the server's log has it", type="server_error")


def anthropic_error(
    error: Exception, name: str, *, request_id: str | None = None
) -> tuple[int, ErrorEvent]:
    """Return status and body of an error in Anthropic's words; `name` as in `error_body`.

    A prompt that is too long is told as agents look for it, who shorten their conversation then.
    """
    status, body = error_body(error, name)
    if isinstance(error, PromptTooLong):
        told = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
        body = msgspec.structs.replace(body, message=f"{told}: {body.message}")
    return error_answer(status, body, request_id=request_id)


async def answer_error(request: Request, error: Exception) -> Response:
    """Turn an error into a response, in the words of the API that was called."""
    name = request.scope[REQUEST_ID]
    if isinstance(error, HTTPException) and error.detail in _ROUTER_SAYS:
        words = _ROUTER_SAYS[error.detail].format(f"{request.method} {request.url.path:.200}")
        error = HTTPException(error.status_code, words, error.headers)
    answer: ErrorAnswer | ErrorEvent
    if request.url.path.startswith("/v1/messages"):
        status, answer = anthropic_error(error, name, request_id=name)
    else:
        status, body = error_body(error, name)
        answer = ErrorAnswer(body)
    headers = {}
    if isinstance(error, ServerBusy):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, DeadlineExceeded):  # or official clients ask twice more, in vain
        headers["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooSlow | BodyTooLarge):
        headers["Connection"] = "close"  # what is still to come is not read any more
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return json_response(answer, status=status, headers=headers)


def json_response(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a record as a JSON response."""
    return Response(
        msgspec.json.encode(value), status, headers=headers, media_type="application/json"
    )


def _request_error(
    error: RequestError, *, code: str | None = None, kind: str = "invalid_request_error"
) -> ErrorBody:
    return ErrorBody(message=str(error), type=kind, param=error.param, code=code)


def _shape_error(text: str) -> ErrorBody:
    """Name the field that a validation error is about, with OpenAI's code for it."""
    path = _PATH.search(text)
    param = path[1] if path and path[1] else None
    message = _PATH.sub("", text)
    code = "invalid_value" if message.startswith("Invalid") else "invalid_type"
    for pattern, kind, advice in _FIELDS:
        found = pattern.match(message)
        if found:
            param, code = f"{param}.{found[1]}" if param else found[1], kind
            message = advice.format(param)
            break
    else:
        if param:
            message = f"`{param}`: {message[:1].lower()}{message[1:]}"
        if code == "invalid_value":
            message += "; /openapi.json lists what may stand there"
    return ErrorBody(message=message, type="invalid_request_error", param=param, code=code)
