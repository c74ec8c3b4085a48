"""What logs of requests have in common: lines, messages and replies as text.

Owns: which text a message or reply stands for, whatever form a client gave it.  Does not know:
tokens, caches, which fields a log must have.
Idea: a prefix cache sees text.  So what is no text is told by whatever tells it from others: an
image by its address or a hash, a call by its JSON.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from radixcache.errors import InvalidTrace

IMAGE_OPEN = "⟦image "
"""What stands before an image's address in a message's text, and"""

IMAGE_CLOSE = "⟧"
"""what stands after it."""


def log_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines that are not empty, with their numbers; gzip-compressed or not.

    A byte order mark, which some editors put first, is no part of the first line.
    A pipe will do.  Raises InvalidTrace for a file that is damaged, OSError.
    """
    number = 0
    with path.open("rb") as raw, _plain(raw) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InvalidTrace(f"{path.name} is damaged after line {number}: {error}") from None


def _plain(raw: BufferedReader) -> gzip.GzipFile | BufferedReader:
    return gzip.open(raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw


def message_text(message: Mapping[str, Any]) -> str:
    """Return all that a message says as text: thoughts, content, and calls as JSON."""
    text = text_of(message.get("content"))
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and thought:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    calls = message.get("tool_calls")
    if calls:
        text += ("\n" if text else "") + "\n".join(map(as_json, as_list(calls)))
    return text


def text_of(content: Any) -> str:
    """Return the text of a message's content; parts that are no text by what tells them apart.

    >>> text_of([{"type": "text", "text": "See "}, {"type": "image_url", "image_url": "http://a/b"}])
    'See ⟦image http://a/b⟧'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(map(_part_text, as_list(content)))


def reply_text(response: Any) -> str:
    """Return the text that a logged response holds: OpenAI's, a batch line's, or plain text."""
    if isinstance(response, str):
        return response
    if not isinstance(response, Mapping):
        return ""
    if isinstance(response.get("body"), Mapping):
        response = response["body"]
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return text_of(response.get("content"))
    message = choices[0].get("message")
    if not isinstance(message, Mapping):
        return str(choices[0].get("text") or "")
    return message_text(message)


def as_list(value: Any) -> list[Any]:
    """Return a value as a list: none as an empty one, a lone one as its only item."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def as_json(value: Any) -> str:
    """Return a value as JSON, keys in their order, letters as they are."""
    return json.dumps(value, ensure_ascii=False)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return as_json(part)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part.get("thinking"), str):
        return f"<think>\n{part['thinking']}\n</think>\n\n"
    if part.get("type") == "tool_result":
        return text_of(part.get("content"))
    if "image" in str(part.get("type")):
        return f"{IMAGE_OPEN}{_address(part)}{IMAGE_CLOSE}"
    return as_json(part)


def _address(part: Mapping[str, Any]) -> str:
    """What tells an image from others: its address, or a hash of what it is made of."""
    image = part.get("image_url") or part.get("source") or part.get("image") or part
    address = image.get("url") or image.get("data") if isinstance(image, Mapping) else image
    text = address if isinstance(address, str) else as_json(image)
    if text.startswith("data:") or len(text) > 500:
        return "sha256 " + hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
    return text
