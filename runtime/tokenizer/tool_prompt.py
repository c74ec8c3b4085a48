"""Tools and calls as messages, for chat templates that know none; and calls as templates want them.

Owns: the words that tell a model of its tools, where its template has none.  Does not know:
templates' language, tokens.
Idea: a call that is sent back is written as the model wrote it, so a conversation with tools is an
ordinary one, and its prefix is found in the cache like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import InvalidRequest
from runtime.tokenizer.tool_format import ToolFormat, written_calls

Message = Mapping[str, Any]

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


def with_parsed_calls(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which arguments are objects, as templates that know calls want."""
    return [_with_parsed(message) if message.get("tool_calls") else message for message in messages]


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
