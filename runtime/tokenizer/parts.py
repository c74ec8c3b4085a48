"""Which part of a rendered conversation a place in its text belongs to.

Owns: the parts of a prompt and where each lies.  Does not know: templates, tokens, caches.
Idea: the conversation is rendered a second time with marks around what came from outside.  Where
the marks come out, the parts lie; whatever the template does between them is its own.

    rendered   "<|im_start|>system\\n" │ "You are …" │ "<|im_end|>\\n<|im_start|>user\\n" │ "Hi"
    parts       template               │ messages[0] │ template                         │ …
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from runtime.errors import InvalidRequest

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message] | None], str]
"""Gives the text of messages and tools as a prompt."""

MARK = "\ufdd3"
"""Never assigned to a character, so hardly ever in a text."""

_MARKED = re.compile(f"{MARK}([a-z])([0-9]+){MARK}")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a prompt's text.

    name     "messages[2]", "tools[0]", or "template" for what the template itself writes
    message  index of the message that it belongs to; of the template, the message that follows
    role     of that message; None where there is none, as behind the last
    start    where it begins, in bytes of the text in UTF-8
    """

    name: str
    message: int | None
    role: str | None
    start: int


def parts_of(
    render: Render, messages: Sequence[Message], tools: Sequence[Message] | None = None
) -> list[Part]:
    """Return the parts of a rendered conversation, in order and without a gap; none if unknown.

    Costs two renderings.  Where a template changes what it is given (trims it, leaves out what was
    thought), parts are found again by their text; one that it leaves out whole is empty.
    """
    if MARK in json.dumps([list(messages), list(tools or ())], ensure_ascii=False, default=str):
        return []
    try:
        text = render(messages, tools)
        marked = render(
            [_marked(place, message) for place, message in enumerate(messages)],
            [_named(place, tool) for place, tool in enumerate(tools)] if tools else None,
        )
    except InvalidRequest:  # some templates look into what is marked
        return []
    return _parts(text, marked, [str(message.get("role")) for message in messages])


def part_at(parts: Sequence[Part], offset: int) -> Part | None:
    """Return the part that a byte of the text lies in; None where the parts are unknown."""
    found = None
    for part in parts:
        if part.start > offset:
            break
        found = part
    return found


def _parts(text: str, marked: str, roles: Sequence[str]) -> list[Part]:
    """Cut a text where another rendering of it has marks.

    marked  `b` begins a message and `e` ends it, `t` names a tool
    """
    parts: list[Part] = []
    at = last = size = 0  # in the text, in the marked one, and in bytes of the text

    def add(name: str, message: int | None, start: int) -> None:
        """Begin a part, with the role of its message."""
        role = None if message is None or message >= len(roles) else roles[message]
        parts.append(Part(name=name, message=message, role=role, start=start))

    add("template", 0 if roles else None, 0)
    for mark in _MARKED.finditer(marked):
        piece, last = marked[last : mark.start()], mark.end()
        end = _end_of(piece, text, at)
        size, at = size + len(text[at:end].encode(errors="replace")), end
        kind, place = mark[1], int(mark[2])
        if kind == "b":
            add(f"messages[{place}]", place, size)
        elif kind == "e":
            following = place + 1 if place + 1 < len(roles) else None
            add("template", following, size)
        else:  # its signature began on the same line
            line = len(piece.rpartition("\n")[2].encode(errors="replace"))
            add(f"tools[{place}]", parts[-1].message, max(size - line, parts[-1].start))
    return parts


def _end_of(piece: str, text: str, start: int) -> int:
    """Where a piece of the marked rendering ends in the text, in which it may be trimmed."""
    if text.startswith(piece, start):
        return start + len(piece)
    bare = piece.strip()
    found = text.find(bare, start) if bare else -1
    return start if found < 0 else found + len(bare)


def _marked(place: int, message: Message) -> Message:
    begin, end = f"{MARK}b{place}{MARK}", f"{MARK}e{place}{MARK}"
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and content:
        return {**message, "content": f"{begin}{content}{end}"}
    if calls:
        return {**message, "tool_calls": [_called(begin, calls[0]), *calls[1:]]}
    return message


def _called(mark: str, call: Message) -> Message:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "name": f"{mark}{function.get('name')}"}}


def _named(place: int, tool: Message) -> Message:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    name = f"{MARK}t{place}{MARK}{function.get('name')}"
    return {**tool, "function": {**function, "name": name}}
