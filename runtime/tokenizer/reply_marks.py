"""Where a conversation's replies stand in the text that a template makes of it.

Owns: marks in place of replies, and cutting the text by another rendering that has them.  Does not
know: templates, tokens, what becomes of the parts.
Idea: a template may write a reply in any way.  What stands between the marks stands between the
replies, too, so whatever lies where a mark was is what the template made of the reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_reply(message: Mapping[str, Any]) -> bool:
    """Return True for a message of the model that says something, or calls tools."""
    content = message.get("content")
    is_said = bool(content) and isinstance(content, str)
    return message.get("role") == "assistant" and (is_said or bool(message.get("tool_calls")))


def marked(place: int, message: Mapping[str, Any], sentinel: str) -> Mapping[str, Any]:
    """Return a reply with a mark instead of all that it says; any other message as it is."""
    if not is_reply(message):
        return message
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return others | {"content": f"{sentinel}{place}{sentinel}"}


def cut_at_marks(text: str, between: Sequence[str]) -> list[str]:
    """Cut a text so that every odd part is what stands where the other rendering had a mark.

    between  the other rendering, cut at its marks
    Where the two don't agree in what lies between, the text is one part.
    """
    first, *others = between
    if not others or not text.startswith(first):
        return [text]
    parts, at = [first], len(first)
    for gap in others[:-1]:
        end = text.find(gap, at) if gap else -1
        if end < 0:
            return [text]
        parts += [text[at:end], gap]
        at = end + len(gap)
    end = len(text) - len(others[-1])
    if end < at or not text.endswith(others[-1]):
        return [text]
    return [*parts, text[at:end], others[-1]]
