"""Tools and calls as messages, for chat templates that know none; and calls as templates want them.

Owns: the words that tell a model of its tools, where its template has none; what templates ask of
calls beyond OpenAI's form.  Does not know: templates' language, tokens.
Idea: a call that is sent back is written as the model wrote it, so a conversation with tools is an
ordinary one, and its prefix is found in the cache like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from runtime.errors import InvalidRequest
from runtime.tokenizer.tool_format import ToolFormat, written_calls

Message = Mapping[str, Any]

_PROBE = "probe"
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")

_PROMPT = """\
You can use the tools below. Each line between <tools> and </tools> is the signature of a function:
<tools>
{signatures}
</tools>
To call a function, write its name and its arguments as JSON between these marks:
{example}
Each result comes back between <tool_response> and </tool_response>."""


def with_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[Message]:
    """Return a conversation whose system message tells of the tools."""
    prompt = _PROMPT.format(
        signatures="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        example=written_calls("", [("…", '{"…": …}')], format),
    )
    if messages and messages[0].get("role") == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def with_plain_calls(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """Return a conversation in which calls are text of the reply, and results of the user.

    Results in a row become one message.
    """
    plain: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message.get("role") == "tool":
            results.append(f"<tool_response>\n{message.get('content') or ''}\n</tool_response>")
            continue
        if results:
            plain.append({"role": "user", "content": "\n".join(results)})
            results = []
        plain.append(_without_calls(message, format) if message.get("tool_calls") else message)
    if results:
        plain.append({"role": "user", "content": "\n".join(results)})
    return plain


def with_parsed_calls(messages: Sequence[Message], format: ToolFormat) -> list[Message]:
    """Return a conversation with calls and results as templates that know calls want them.

    Arguments are objects.  A result has the name of the function that was called, which some
    templates ask for and OpenAI's form lacks.  Names of calls have 9 letters or digits where the
    format is Mistral's, whose templates refuse any other; equal ones stay equal.
    """
    functions: dict[str, str] = {}  # by name of the call
    parsed: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            message = _with_parsed(message)
            functions |= {
                call["id"]: call["function"]["name"]
                for call in message["tool_calls"]
                if isinstance(call.get("id"), str)
            }
        elif message.get("tool_call_id") in functions and not message.get("name"):
            message = {**message, "name": functions[message["tool_call_id"]]}
        parsed.append(_with_short_ids(message) if format.name == "mistral" else message)
    return parsed


def most_calls(render: Callable[[Sequence[Message]], str], format: ToolFormat) -> int | None:
    """Return how many calls of one reply a template takes back: none, 1, or any number (None).

    render  gives the text of a conversation, or raises InvalidRequest where the template refuses it
    """
    try:
        if _PROBE not in render(with_parsed_calls(_probing(1), format)):
            return 0
    except InvalidRequest:  # for whatever else it does not like
        return None
    try:
        render(with_parsed_calls(_probing(2), format))
    except InvalidRequest:
        return 1
    return None


def _probing(count: int) -> list[Message]:
    """A conversation in which the model calls so many tools at once."""
    function = {"name": _PROBE, "arguments": "{}"}
    calls = [{"id": f"call{i}", "type": "function", "function": function} for i in range(count)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "."} for call in calls]
    asked = {"role": "user", "content": "?"}
    return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _with_short_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        calls = [{**call, "id": _short_id(call.get("id"))} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if message.get("tool_call_id"):
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: Any) -> str:
    text = str(call_id)
    if _SHORT_ID.fullmatch(text):
        return text
    return blake2b(text.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def calls_of(message: Message) -> list[tuple[str, str]]:
    """Return name and arguments, as JSON, of a message's calls.  Raises InvalidRequest."""
    functions = [_function(call) for call in message.get("tool_calls") or ()]
    return [(function["name"], _as_text(function.get("arguments"))) for function in functions]


def _without_calls(message: Message, format: ToolFormat) -> Message:
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    text = written_calls(message.get("content") or "", calls_of(message), format)
    return plain | {"content": text}


def _with_parsed(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = _function(call)
        arguments = _as_object(function.get("arguments"))
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f"a call of a tool is {{'function': {{'name': …, 'arguments': …}}}}, not {call!r:.80}",
            param="messages",
        )
    return function


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments or {}, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments  # what the model wrote is shown to it as it was
