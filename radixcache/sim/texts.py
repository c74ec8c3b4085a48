"""Text of logs as token ids, without a model.

Owns: how a conversation becomes one text, and how text becomes ids where no tokenizer is given.
Does not know: files, blocks.
Idea: what a prefix cache sees of a log is where texts begin to differ, and how long they are.  Both
survive any tokenizer that works from left to right; a piece of at most four letters is about as
long as a token of English.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

VOCABULARY = 2**31 - 1
"""Ids are below this."""

_PIECE = re.compile(r" ?\w{1,4}| ?[^\w\s]|\s")


def pieces(text: str) -> list[int]:
    """Return an id for each piece of a text, the same ones in every process.

    >>> pieces("to be") == pieces("to be or")[:2]
    True
    """
    return [
        zlib.crc32(piece.encode("utf-8", "surrogatepass")) % VOCABULARY
        for piece in _PIECE.findall(text)
    ]


def rendered(messages: Iterable[Mapping[str, Any]], tools: Iterable[Any] | None = None) -> str:
    """Return a conversation as one text in the ChatML manner, tools first, up to the reply."""
    parts = [f"<|tools|>{_json(tool)}\n" for tool in tools or ()]
    for message in messages:
        said = text_of(message.get("content"))
        calls = message.get("tool_calls")
        said += _json(calls) if calls else ""
        parts.append(f"<|im_start|>{message.get('role', '')}\n{said}<|im_end|>\n")
    return "".join((*parts, "<|im_start|>assistant\n"))


def text_of(content: Any) -> str:
    """Return the text of a message's content; parts that are no text as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _json(part)
        for part in parts
    )


def reply_text(response: Any) -> str:
    """Return the text that a logged response holds: OpenAI's, a batch line's, or plain text."""
    if isinstance(response, str):
        return response
    if not isinstance(response, dict):
        return ""
    if isinstance(response.get("body"), dict):
        response = response["body"]
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return text_of(response.get("content"))
    message = choices[0].get("message")
    if not isinstance(message, dict):
        return str(choices[0].get("text") or "")
    calls = message.get("tool_calls")
    return text_of(message.get("content")) + (_json(calls) if calls else "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
