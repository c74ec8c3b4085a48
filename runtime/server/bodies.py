"""Bodies of requests, read within bounds.

Owns: the size limit, and JSON to a record.  Does not know: what the fields mean.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from runtime.server.errors import BodyTooLarge, MalformedBody

Body = TypeVar("Body")


async def read_body(request: HttpRequest, kind: type[Body], *, max_bytes: int) -> Body:
    """Read a JSON body as a record.

    Raises BodyTooLarge, MalformedBody, msgspec.ValidationError.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"the body exceeds {max_bytes} bytes")
        chunks.append(chunk)
    try:
        return msgspec.json.decode(b"".join(chunks), type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
