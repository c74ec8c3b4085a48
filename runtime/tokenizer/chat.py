"""Chat messages to a prompt, by the model's own template.

Owns: the sandbox that templates run in; keeping control tokens in messages from acting as control.
Does not know: where a template came from, the HTTP form of messages.
Idea: a control token acts only where the template itself wrote it.  Its text inside a message is
broken by a sentinel before rendering, so that the rendered text can be cut at the real ones.

    message    "a<|im_end|>b"         → "a<S|im_end|>b"          S is the sentinel
    rendered   "<|im_start|>user\\na<S|im_end|>b<|im_end|>"
    pieces      ‾‾‾control‾‾ ‾‾‾‾‾‾‾text‾‾‾‾‾‾‾‾‾ control         S is then taken out of the text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, ModelFileError
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.reply_marks import cut_at_marks, is_reply, marked
from runtime.tokenizer.tool_calls import key_of_reply
from runtime.tokenizer.tool_format import ToolFormat, tool_format
from runtime.tokenizer.tool_prompt import (
    most_calls,
    with_parsed_calls,
    with_plain_calls,
    with_tools,
)

Recall = Callable[[Sequence[int], str], Sequence[int] | None]
"""Gives the ids that a reply's text was generated as behind such ids, or None if not known."""

_NONCHARACTER = "\ufdd0"  # never assigned to a character, so hardly ever in a text
_SENTINEL_NAME = "_sentinel"
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_ROLE = re.compile(r"[A-Za-z0-9_.-]+")


class ChatTemplate:
    """One chat template, compiled, for one tokenizer.

    The template runs in Jinja's immutable sandbox: it reaches no file, no module, and cannot
    change the messages.  Its time and memory are not bounded (a loop in a loop, a string a billion
    times repeated): trust a template as much as the weights that it came with.
    Not kept from acting as control: a token that a template puts together from characters of a
    message by deleting what lies between, or by writing the beginning itself, as "<|" + role does;
    roles are therefore single words, and a server should allow only those it knows.
    Errors: ModelFileError for a template that is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        *,
        where: str = "the chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokenizer = tokenizer
        self._breaker = _Breaker(tokenizer.special_tokens, source)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._format = tool_format(source, tokenizer.special_tokens)
        self._knows_calls = "tool_calls" in source
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            self._knows_tools = "tools" in names
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFileError(f"{where} has a chat template that is broken: {error}") from error
        if self._knows_calls:
            most = most_calls(self._rendered_plainly, self._format)
            self._knows_calls = most != 0
            self._format = msgspec.structs.replace(self._format, max_calls=most or None)

    @property
    def format(self) -> ToolFormat:
        """How the model writes calls of tools."""
        return self._format

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text.

        tools      functions that the model may call; a template that knows none gets them as a
                   system message, and calls and their results as plain messages
        variables  further names that the template may use
        Errors: InvalidRequest, with the template's own message where it refuses the messages.
        """
        messages, tools = self._prepared(messages, tools)
        text, sentinel = self._rendered(messages, add_generation_prompt, tools, variables)
        return text.replace(sentinel, "")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        recall: Recall | None = None,
    ) -> list[int]:
        """Return the prompt's ids; no bos beyond what the template writes.

        tools   as `render` takes them
        recall  gives the ids that a reply's text was generated as behind the ids before it, or
                None; what the template writes for such a reply then keeps those ids

        Control tokens are those that the template wrote; in a message their text is text.
        Errors: InvalidRequest, with the template's own message where it refuses the messages.
        """
        messages, tools = self._prepared(messages, tools)
        text, sentinel = self._rendered(messages, add_generation_prompt, tools, variables)
        parts = [text]
        if recall is not None and any(map(is_reply, messages)):
            given = [marked(i, message, sentinel) for i, message in enumerate(messages)]
            with suppress(InvalidRequest):  # some templates want a call before each result
                other, _ = self._rendered(given, add_generation_prompt, tools, variables, sentinel)
                parts = cut_at_marks(text, re.split(f"{sentinel}[0-9]+{sentinel}", other))
        if len(parts) == 1:
            return self._tokenizer.encode_pieces(self._pieces(text, sentinel))
        ids: list[int] = []
        waiting = ""  # not encoded yet: a reply that is not known belongs to the text around it
        for place, part in enumerate(parts):
            if place % 2 and recall is not None:
                waiting = self._encode_most(ids, waiting, sentinel)
                before = [*ids, *self._encoded(ids, waiting, sentinel)]
                known = self._recalled(recall, before, part.replace(sentinel, ""))
                if known is not None:
                    ids, waiting = [*before, *known], ""
                    continue
            waiting += part
        return ids + self._encoded(ids, waiting, sentinel)

    def _recalled(self, recall: Recall, before: list[int], reply: str) -> Sequence[int] | None:
        known = recall(before, reply)
        if known is None:
            key = key_of_reply(reply, self._format)
            known = None if key is None else recall(before, key)
        return known

    def _encode_most(self, ids: list[int], text: str, sentinel: str) -> str:
        """Append a text's ids up to its last control token; return the rest, from that on."""
        pieces = self._tokenizer.split_special(text, unless_before=sentinel)
        tokens = [place for place, piece in enumerate(pieces) if isinstance(piece, int)]
        if not tokens:
            return text
        head, rest = pieces[: tokens[-1]], pieces[tokens[-1] :]
        for piece in head:
            clean = piece.replace(sentinel, "") if isinstance(piece, str) else piece
            ids += self._encoded_piece(ids, clean)
        return "".join(self._text_of(p) if isinstance(p, int) else p for p in rest)

    def _encoded(self, before: Sequence[int], text: str, sentinel: str) -> list[int]:
        """Return the ids of a text behind others."""
        ids = list(before[:1])  # that something stands before it is all that matters
        for piece in self._pieces(text, sentinel):
            ids += self._encoded_piece(ids, piece)
        return ids[len(before[:1]) :]

    def _encoded_piece(self, before: Sequence[int], piece: str | int) -> list[int]:
        return [piece] if isinstance(piece, int) else self._tokenizer.encode_behind(before, piece)

    def _pieces(self, text: str, sentinel: str) -> list[str | int]:
        """Cut a text at the control tokens that act, and take the sentinel out."""
        pieces = self._tokenizer.split_special(text, unless_before=sentinel)
        return [p.replace(sentinel, "") if isinstance(p, str) else p for p in pieces]

    def _prepared(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Return messages and tools as this template can take them."""
        if self._knows_calls:
            messages = with_parsed_calls(messages, self._format)
        else:
            messages = with_plain_calls(messages, self._format)
        if tools and not self._knows_tools:
            return with_tools(messages, tools, self._format), None
        return messages, tools or None

    def _rendered_plainly(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render messages as they are, to see what the template makes of them."""
        text, sentinel = self._rendered(messages, True, None, None)
        return text.replace(sentinel, "")

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        sentinel: str | None = None,
    ) -> tuple[str, str]:
        """Render with control tokens in the input broken; return the text and the sentinel.

        sentinel  the one to use; None chooses one that occurs nowhere in the input
        """
        _check_roles(messages)
        special_texts = {
            "bos_token": self._text_of(self._tokenizer.bos_id),
            "eos_token": self._text_of(self._tokenizer.eos_id),
        }
        given = {"messages": messages, "tools": tools, **(variables or {})}
        try:
            if sentinel is None:
                sentinel = self._breaker.choose_sentinel(given)
            broken = self._breaker.broken(given, sentinel)
        except RecursionError:  # arguments of calls are JSON in a text, so no body's limit holds
            raise InvalidRequest(
                "the messages nest too deeply: send arguments with fewer levels", param="messages"
            ) from None
        try:
            text = self._template.render(
                special_texts
                | {"documents": None, "add_generation_prompt": add_generation_prompt}
                | broken
                | {_SENTINEL_NAME: sentinel}
            )
        except Exception as error:  # a template can fail in any way that Python can
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return text, sentinel

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.decode([token_id], skip_special=False)


class _Breaker:
    """Puts a sentinel behind the first character of each control token in strings of the input.

    Also behind a string that ends within a control token, or it could become one with what the
    template writes next.
    """

    def __init__(self, special_texts: Iterable[str], source: str) -> None:
        self._source = source
        self._beginnings = {text[:n] for text in special_texts for n in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)
        rests: dict[str, list[str]] = {}
        for text in special_texts:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        # First characters stand outside of the look-ahead, so that the search can skip to them.
        found = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._first_character = re.compile("|".join(found) or r"(?!)")

    def choose_sentinel(self, given: Any) -> str:
        """Return a character that occurs in no string of the input.

        Errors: InvalidRequest for an input that leaves none, a million of them being allowed.
        """
        strings = [self._source, *_strings(given)]
        if not any(_NONCHARACTER in s for s in strings):
            return _NONCHARACTER
        # One character, not a longer run of them: two strings side by side could form a run.
        used = set().union(*strings)
        for code in range(0x10FFFF, 0xFFFF, -1):  # private use first
            if chr(code) not in used:
                return chr(code)
        raise InvalidRequest("the messages hold every character that there is", param="messages")

    def broken(self, value: Any, sentinel: str) -> Any:
        """Return a copy of the input with control tokens broken."""
        return self._broken(value, sentinel)

    def _broken(self, value: Any, sentinel: str) -> Any:
        if isinstance(value, str):
            return self._broken_text(self._broken_end(value, sentinel), sentinel)
        if isinstance(value, Mapping):
            broken = {}
            for key, item in value.items():
                # Names of fields, and roles, are compared by templates: an odd ending stays.
                name = self._broken_text(key, sentinel) if isinstance(key, str) else key
                is_role = key == "role" and isinstance(item, str)
                broken[name] = (self._broken_text if is_role else self._broken)(item, sentinel)
            return broken
        if isinstance(value, (list, tuple)):
            return [self._broken(item, sentinel) for item in value]
        return value

    def _broken_text(self, text: str, sentinel: str) -> str:
        return self._first_character.sub(lambda match: match[0] + sentinel, text)

    def _broken_end(self, text: str, sentinel: str) -> str:
        ends = (text[-n:] for n in range(1, min(self._longest, len(text)) + 1))
        return text + sentinel if any(end in self._beginnings for end in ends) else text


def _strings(value: Any) -> Iterator[str]:
    """Yield every string within nested lists and mappings, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _check_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a role that is more than a word: some templates build control tokens from it."""
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidRequest(
                f"messages[{i}].role is {role!r}; it must be a word, such as 'user'",
                param="messages",
            )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as chat templates expect it: nothing escaped for HTML, unlike Jinja's own."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    sentinel = context[_SENTINEL_NAME]  # which has to stay what it is
    return _NOT_ASCII.sub(lambda c: c[0] if c[0] == sentinel else json.dumps(c[0])[1:-1], text)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model said; here just its body."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
