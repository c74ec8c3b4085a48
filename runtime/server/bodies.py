"""Bodies of requests, read within bounds.

Owns: the media type, the limits of size, time and depth, and JSON to a record.  Does not know: what
the fields mean.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from runtime.server.config import ServerConfig
from runtime.server.errors import BodyTooLarge, BodyTooSlow, MalformedBody, WrongMediaType
from runtime.server.limits import MAX_CONTAINERS, check_parts, has_more, is_deeper

Body = TypeVar("Body")


async def read_body(request: HttpRequest, kind: type[Body], config: ServerConfig) -> Body:
    """Read a JSON body as a record.

    Raises WrongMediaType, BodyTooLarge, BodyTooSlow, MalformedBody, InvalidRequest,
    msgspec.ValidationError.
    """
    _check_media_type(request)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            text = await _read(request, config.max_body_bytes)
    except TimeoutError:
        raise BodyTooSlow(
            f"the body was not whole after {config.body_timeout_s:g} seconds"
        ) from None
    if not text.strip():
        raise MalformedBody("the body is empty: send a JSON object, if only {}")
    if has_more(text, MAX_CONTAINERS):
        raise MalformedBody(f"the body has more than {MAX_CONTAINERS} arrays and objects")
    if is_deeper(text, config.max_json_depth):
        raise MalformedBody(f"the body is nested deeper than {config.max_json_depth} levels")
    try:
        body = msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
    check_parts(body, config)
    return body


def _check_media_type(request: HttpRequest) -> None:
    """Raise WrongMediaType for a body that does not say that it is JSON, or is compressed.

    A page of another site may have a browser send whatever else it likes; for JSON the browser asks
    this server first, which allows it to nobody.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise WrongMediaType(
            f"the body is {media_type[:80] or 'of no type'}: send it as JSON, with the header "
            "`Content-Type: application/json`"
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise WrongMediaType(
            f"bodies are taken as they are, not {coding[:40]!r}: send JSON without Content-Encoding"
        )


async def _read(request: HttpRequest, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"the body exceeds {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)
