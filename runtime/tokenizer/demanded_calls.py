"""Calls of tools that a grammar demands, told while they are written.

Owns: following calls whose form is known beforehand.  Does not know: the grammar, templates, HTTP.
Idea: where a model can write nothing but calls, one is certain from its name on.  So its arguments
are told as they come, and a call that a limit cut has what came of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from runtime.tokenizer.tool_calls import StringScan, ToolCall, new_call_id

_HEAD = re.compile(r'\{"name": "([a-zA-Z0-9_-]+)", "(?:arguments|parameters)": ')


class CallBegin(msgspec.Struct, frozen=True):
    """A call, of which nothing but this is known yet.

    id  names it, so that its result can refer to it
    """

    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """A piece of the latest call's arguments, as the model wrote it."""

    text: str


Part = str | CallBegin | CallArguments
"""What the text of a reply is cut into."""


def parts_of(pieces: Iterable[str | ToolCall]) -> list[Part]:
    """Return what a `ToolCallParser` found as parts: a call that is whole is two of them."""
    parts: list[Part] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            parts += [CallBegin(piece.id, piece.name), CallArguments(piece.arguments)]
        else:
            parts.append(piece)
    return parts


class DemandedCalls:
    """Follows the calls of one reply that `tools_grammar` lets a model write.

    new_id  names each call

    >>> calls = DemandedCalls(new_id=lambda: "c1")
    >>> calls.push('<tool_call>\\n{"name": "f", "arguments": {"a"')
    [CallBegin(id='c1', name='f'), CallArguments(text='{"a"')]
    >>> calls.push(': 1}}\\n</tool_call>'), calls.is_whole
    ([CallArguments(text=': 1}')], True)
    """

    def __init__(self, *, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._between = ""  # what stands before the next call's arguments
        self._depth = 0  # of the arguments under way; 0 between calls and before their brace
        self._inside = False
        self._strings = StringScan()

    @property
    def is_whole(self) -> bool:
        """True where no call has begun that did not end."""
        return not self._inside

    def push(self, text: str) -> list[Part]:
        """Add text; return what is certain now: each call before its arguments."""
        return list(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[Part]:
        while text:
            if not self._inside:
                self._between += text
                head = _HEAD.search(self._between)
                if head is None:
                    return
                text, self._between = self._between[head.end() :], ""
                self._inside = True
                yield CallBegin(self._new_id(), head[1])
            end = self._end_of_arguments(text)
            if end:
                yield CallArguments(text[:end])
            text = text[end:]

    def _end_of_arguments(self, text: str) -> int:
        """Return how much of a text belongs to the arguments; notes whether they end there."""
        for at, letter in enumerate(text):
            if self._strings.step(letter):
                continue
            if letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self._inside = False
                    return at + 1
        return len(text)
