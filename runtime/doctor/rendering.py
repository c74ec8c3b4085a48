"""Logged requests as token ids: by a model's own template and tokenizer, or by words.

Owns: what becomes of a request that a template refuses, and a tokenizer that needs no model.  Does
not know: logs' form, caches.
Idea: what a prefix cache sees of a log is where texts begin to differ and how long they are.  Both
survive any tokenizer that works from left to right, so a log of any model can be looked at with
another one's, or with words; only the counts are then estimates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from runtime.doctor.log import LoggedRequest
from runtime.errors import InvalidRequest
from runtime.misses.finding import Spoken
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer

_PIECE = re.compile(r" ?\w{1,4}| ?[^\w\s]|\s")


class Renderer(Protocol):
    """Whoever makes token ids of logged requests."""

    def ids(self, request: LoggedRequest) -> list[int]:
        """Return the prompt's ids."""

    def reply_ids(self, text: str) -> list[int]:
        """Return the ids of what came back."""

    def spoken(self, request: LoggedRequest) -> Spoken | None:
        """Return the conversation as what its parts are found by; None for a bare prompt."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids."""

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes that ids stand for."""


class ModelRenderer:
    """Renders by a model's template, and encodes by its tokenizer.

    num_refused  requests that the template refused, which were rendered in the ChatML manner
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.num_refused = 0

    def ids(self, request: LoggedRequest) -> list[int]:
        """Return the prompt's ids."""
        if not request.is_chat:
            return self._tokenizer.encode_prompt(_sane(request.said[0].text))
        spoken = self.spoken(request)
        if self._template is not None and spoken is not None:
            try:
                return self._template.encode(spoken.messages, tools=spoken.tools)
            except InvalidRequest:  # another model's template may take what this one does not
                self.num_refused += 1
        messages, tools = _for_template(request)
        return self._tokenizer.encode(chatml(messages, tools), parse_special=True)

    def reply_ids(self, text: str) -> list[int]:
        """Return the ids of what came back."""
        return self._tokenizer.encode_later(_sane(text))

    def spoken(self, request: LoggedRequest) -> Spoken | None:
        """Return the conversation; None for a bare prompt, or where there is no template."""
        template = self._template
        if template is None or not request.is_chat:
            return None
        messages, tools = _for_template(request)
        return Spoken(
            render=lambda messages, tools: template.render(messages, tools=tools),
            messages=messages,
            tools=tools or None,
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(ids, skip_special=skip_special)

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes that ids stand for."""
        return self._tokenizer.bytes_of(ids, skip_special=skip_special)


class WordRenderer:
    """Renders in the ChatML manner, a token for each piece of at most four letters.

    Such a piece is about as long as a token of English.  Ids count pieces in the order of first
    sight, so they are of this object alone.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def ids(self, request: LoggedRequest) -> list[int]:
        """Return the prompt's ids."""
        if not request.is_chat:
            return self.reply_ids(request.said[0].text)
        return self.reply_ids(chatml(*_for_template(request)))

    def reply_ids(self, text: str) -> list[int]:
        """Return an id for each piece of a text."""
        found = []
        for piece in _PIECE.findall(text):
            number = self._ids.setdefault(piece, len(self._pieces))
            if number == len(self._pieces):
                self._pieces.append(piece)
            found.append(number)
        return found

    def spoken(self, request: LoggedRequest) -> Spoken | None:
        """Return the conversation; None for a bare prompt."""
        if not request.is_chat:
            return None
        messages, tools = _for_template(request)
        return Spoken(render=chatml, messages=messages, tools=tools or None)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids."""
        return "".join(self._pieces[i] for i in ids)

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """Return the bytes that ids stand for."""
        return self.decode(ids).encode(errors="replace")


def chatml(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Return a conversation as one text in the ChatML manner, tools first, up to the reply.

    >>> chatml([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """
    offered = "".join(f"{tool}\n" for tool in map(json.dumps, tools or ()))
    if offered:
        offered = f"<|im_start|>tools\n{offered}<|im_end|>\n"
    said = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{offered}{said}<|im_start|>assistant\n"


def _for_template(request: LoggedRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    messages = [{"role": said.role, "content": _sane(said.text)} for said in request.said]
    return messages, [tool.for_template() for tool in request.tools]


def _sane(text: str) -> str:
    """Return a text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode(errors="replace").decode()
