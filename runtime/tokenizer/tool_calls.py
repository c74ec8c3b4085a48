"""Calls of tools: making a model write them, and finding them in what it wrote.

Owns: which names are allowed, the grammar of calls, taking a reply apart.  Does not know:
templates, HTTP, which tools exist.
Idea: a call is only what parses as one.  Whatever looks like a call and is none comes back as the
text that it is, so nothing that a model said is ever lost.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from runtime.errors import InvalidRequest
from runtime.grammar import Grammar
from runtime.tokenizer.tool_format import (
    CLOSE,
    HERMES,
    LIST,
    OPEN,
    TAG,
    ToolFormat,
    quoted,
    reply_key,
)

MAX_TOOLS = 128
MAX_PARALLEL_CALLS = 16
"""Calls in one reply that a grammar lets a model make."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a model made.

    id         names the call, so that its result can refer to it
    arguments  a JSON object, as the model wrote it
    """

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    """Return a name for a call that no other has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def check_tools(
    tools: Sequence[Mapping[str, Any]], *, param: str = "tools[{}].function.name"
) -> None:
    """Raise InvalidRequest for too many tools, or a name that is malformed or given twice.

    tools  as chat templates take them
    param  the field of a tool's name, for messages; {} stands for the tool's place
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` takes at most {MAX_TOOLS} tools", param="tools")
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        name = tool["function"]["name"]
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"a tool's name takes 1 to 64 letters, digits, _ and -, unlike {name[:80]!r}",
                param=param.format(place),
            )
        if name in seen:
            raise InvalidRequest(f"two tools are named {name!r}", param=param.format(place))
        seen.add(name)


def tools_grammar(
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    parallel: bool = True,
    *,
    format: ToolFormat = HERMES,
    otherwise: Grammar | None = None,
) -> Grammar:
    """Return the grammar of a reply that is nothing but calls, or else some JSON.

    tools     as chat templates take them; a keyword of their schemas that can't be enforced is
              passed over
    name      the one tool that must be called; None: any of them
    parallel  whether there may be several calls, as far as the format has them
    format    how the model writes them
    otherwise the JSON that may be instead of calls, of kind json_object or json_schema

    Raises InvalidRequest for a name that no tool has, no tools, or a schema over the limits.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        wanted = "a tool" if name is None else f"the tool {name!r:.80}"
        raise InvalidRequest(
            f"{wanted} is to be called, but is none of `tools`", param="tool_choice"
        )
    key = "parameters" if format.name == "llama" else "arguments"
    bodies, schemas = [], []
    for number, function in enumerate(functions):
        head = f'{{"name": {quoted(function["name"])}, "{key}": '
        bodies.append(f'{quoted(head)} schema_{number} "}}"')
        schema = {"type": "object"} | (function.get("parameters") or {})
        if schema["type"] != "object":
            raise InvalidRequest(
                f"the parameters of {function['name']!r} are to be of type object, with a property "
                "for each argument",
                param="tools",
            )
        schemas.append(json.dumps(schema))
    num = (format.max_calls or MAX_PARALLEL_CALLS) if parallel else 1
    match format.name:
        case "hermes":
            start = _in_a_row("call", "\n", num)
            start += f'\ncall: {_mark(OPEN, format)} "\\n" body "\\n" {_mark(CLOSE, format)}'
        case "llama":
            start = _in_a_row("body", "; ", num)
        case "mistral":
            start = f'{_mark(LIST, format)} " [" {_in_a_row("body", ", ", num)} "]"'
    if otherwise is not None:
        start = f"calls | schema_{len(schemas)}\ncalls: {start}"
        schemas.append(otherwise.source or '{"type": "object"}')
    return Grammar(
        kind="lark",
        source=f"start: {start}\nbody: {' | '.join(bodies)}\n",
        schemas=tuple(schemas),
        strict=otherwise is not None and otherwise.kind == "json_schema" and otherwise.strict,
        param="tools" if otherwise is None else otherwise.param,
    )


def _in_a_row(rule: str, separator: str, most: int) -> str:
    return rule if most == 1 else f"{rule} ({quoted(separator)} {rule}){{0,{most - 1}}}"


def _mark(text: str, format: ToolFormat) -> str:
    return f"<[{format.control_ids[text]}]>" if text in format.control_ids else quoted(text)


class _Written(msgspec.Struct):
    """A call as JSON."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")

    def read(self) -> tuple[str, str]:
        """Return the name, and the arguments as the model wrote them.

        Raises ValueError where there is no name, or they are no object.
        """
        text = (bytes(self.arguments) or bytes(self.parameters) or b"{}").decode()
        value = json.loads(text)
        if isinstance(value, str):  # some models write the object as a text
            text, value = value, json.loads(value)
        if not self.name or not isinstance(value, dict):
            raise ValueError
        return self.name, text


class ToolCallParser:
    """Finds calls in the text of one reply, while it arrives.

    Pieces come in order: texts, and calls as soon as they are whole.  White space before
    a call, and behind one at the end, is left out.  Where there is no call, the texts put together
    equal what was pushed.
    format     how the model writes calls
    max_calls  calls beyond so many, or beyond what the format takes back, are left out
    new_id     names each call

    >>> parser = ToolCallParser(new_id=lambda: "c1")
    >>> parser.push('Let me see.<tool_call>{"name": "f", "argu')
    ['Let me see.']
    >>> parser.push('ments": {}}</tool_call>')
    [ToolCall(id='c1', name='f', arguments='{}')]
    """

    def __init__(
        self,
        format: ToolFormat = HERMES,
        *,
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._format = format.name
        self._calls_left = min(format.max_calls or sys.maxsize, max_calls or sys.maxsize)
        self._new_id = new_id
        self._begin = {"hermes": OPEN, "mistral": LIST, "llama": TAG}[format.name]
        self._buffer = ""  # what is not decided yet; within a call, all of it behind its mark
        self._before = ""  # of the call that is being read: white space and its mark
        self._inside = False
        self._is_first = True  # no piece was given yet
        self._is_behind_call = False  # the latest piece was one
        self._search = _MarkSearch()

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text; return the pieces that are certain now."""
        return self._wanted(self._push(text))

    def flush(self) -> list[str | ToolCall]:
        """End the text; return what was held back.  A last call may lack some of its end mark."""
        return self._wanted(self._flush())

    def _wanted(self, pieces: Sequence[str | ToolCall]) -> list[str | ToolCall]:
        wanted: list[str | ToolCall] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                self._calls_left -= 1
                if self._calls_left < 0:
                    continue
            wanted.append(piece)
        return wanted

    def _push(self, text: str) -> list[str | ToolCall]:
        self._buffer += text
        pieces: list[str | ToolCall] = []
        while self._advance(pieces):
            pass
        self._note(pieces)
        return pieces

    def _flush(self) -> list[str | ToolCall]:
        pieces: list[str | ToolCall] = []
        while self._inside:
            self._inside = False
            body, self._buffer = self._buffer, ""
            calls, rest = self._read(body[: len(body) - _partial(body, CLOSE)])
            if not calls:
                # Perhaps an end mark was taken for a part of a string that never ended.
                head, mark, rest = body.partition(CLOSE)
                pieces.append(self._before + head + mark)
            pieces += calls
            self._note(pieces)
            pieces += self._push(rest)
        if self._buffer.strip() or (self._buffer and not self._is_behind_call):
            pieces.append(self._buffer)
        self._buffer = ""
        return pieces

    def _note(self, pieces: Sequence[str | ToolCall]) -> None:
        if pieces:
            self._is_first = False
            self._is_behind_call = isinstance(pieces[-1], ToolCall)

    def _advance(self, pieces: list[str | ToolCall]) -> bool:
        """Decide on the next piece; False where more text is needed first."""
        if self._inside:
            return self._format == "hermes" and self._end_call(pieces)
        at, mark = self._buffer.find(self._begin), self._begin
        if self._format == "llama" and self._is_first and not pieces:
            start = self._buffer.lstrip()
            if start.startswith("{"):
                at, mark = len(self._buffer) - len(start), ""
        shown = at if at >= 0 else len(self._buffer) - _partial(self._buffer, self._begin)
        text = self._buffer[:shown].rstrip()
        if text:
            pieces.append(text)
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._before = self._buffer[len(text) : at + len(mark)]
        self._buffer = self._buffer[at + len(mark) :]
        self._inside, self._search = True, _MarkSearch()
        return True

    def _end_call(self, pieces: list[str | ToolCall]) -> bool:
        """Look for the mark that ends a call, outside of strings."""
        at = self._search.find(self._buffer, CLOSE)
        if at < 0:
            return False
        calls, _ = self._read(self._buffer[:at])
        pieces += calls or [self._before + self._buffer[: at + len(CLOSE)]]
        self._buffer = self._buffer[at + len(CLOSE) :]
        self._inside = False
        return True

    def _read(self, body: str) -> tuple[list[ToolCall], str]:
        """Return the calls that a text begins with, none where it is malformed; and the rest."""
        try:
            match self._format:
                case "hermes":
                    written, rest = [msgspec.json.decode(body, type=_Written)], ""
                case "llama":
                    written, rest = _read_objects(body), ""
                case "mistral":
                    end = _end_of_value(body, 0)
                    written = msgspec.json.decode(body[:end], type=list[_Written])
                    rest = body[end:]
            read = [call.read() for call in written]
        except (ValueError, RecursionError):  # the errors of both JSON readers are ValueErrors
            return [], body
        return [ToolCall(id=self._new_id(), name=n, arguments=a) for n, a in read], rest


class StringScan:
    """Follows where JSON text that arrives letter by letter is within a string."""

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False

    def step(self, letter: str) -> bool:
        """Take one more letter; return whether it is of a string, whose quotes are, too."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = letter == "\\"
            self._in_string = letter != '"'
        else:
            self._in_string = letter == '"'
            return self._in_string
        return True


class _MarkSearch:
    """Looks for a mark outside of strings in JSON text that arrives in pieces."""

    def __init__(self) -> None:
        self._at = 0
        self._strings = StringScan()

    def find(self, text: str, mark: str) -> int:
        """Return where the mark stands, else -1; goes on where it left off.

        text  all of it so far
        """
        while self._at < len(text):
            if not self._strings.step(text[self._at]):
                if text.startswith(mark, self._at):
                    return self._at
                if mark.startswith(text[self._at :]):
                    return -1
            self._at += 1
        return -1


def _read_objects(text: str) -> list[_Written]:
    """Read objects with `;` or white space between them.  Raises ValueError.

    Without a mark, what has no arguments may be any JSON, and is not taken for a call.
    """
    written: list[_Written] = []
    at = 0
    while text[at:].strip("; \t\r\n"):
        at += len(text[at:]) - len(text[at:].lstrip("; \t\r\n"))
        end = _end_of_value(text, at)
        written.append(msgspec.json.decode(text[at:end], type=_Written))
        at = end
    if not all(bytes(call.arguments) or bytes(call.parameters) for call in written):
        raise ValueError
    return written


def _end_of_value(text: str, start: int) -> int:
    """Return where the JSON value that begins at `start`, behind white space, ends."""
    start += len(text[start:]) - len(text[start:].lstrip())
    return json.JSONDecoder().raw_decode(text, start)[1]


def _partial(text: str, mark: str) -> int:
    """Return how many characters at the end of a text could begin a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def key_of_reply(text: str, format: ToolFormat) -> str | None:
    """Return the key of a reply as its model wrote it; None for one without calls."""
    parser = ToolCallParser(format, new_id=str)
    pieces = parser.push(text) + parser.flush()
    calls = [(p.name, p.arguments) for p in pieces if isinstance(p, ToolCall)]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return reply_key("".join(texts), calls) if calls else None
