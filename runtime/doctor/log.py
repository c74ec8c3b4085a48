"""Logs of requests: the bodies that clients sent, one JSON object a line.

Owns: which forms a line may have, what is taken of it, and errors that name the line.  Does not
know: tokens, caches, what is wrong with a request.
Idea: a log comes from anywhere, so what a server would refuse is taken as far as it tells of the
prompt; only what is no request at all is an error.

    {"messages": […], "tools": […]}          a chat's body, alone; or "prompt" and no messages
    {"system": …, "messages": […]}           a body in Anthropic's words
    {"body": {…}, "response": {…}, …}        either, as a line's "body" or "request", with what came
                                             of it, "timestamp", "tenant", "ttft_s", "computed"
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from radixcache.errors import InvalidTrace
from radixcache.sim.logged import as_json, as_list, log_lines, message_text, reply_text, text_of
from runtime.errors import InvalidLog

MAX_NUMBER = 1e12
"""Seconds or tokens beyond which a log does not tell them."""

_ROLES = {"developer": "system", "function": "tool", "human": "user", "model": "assistant"}


class Tool(msgspec.Struct, frozen=True):
    """A tool as the log has it: its name, and all of it as JSON, keys in the log's order."""

    name: str
    text: str

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        tool: dict[str, Any] = json.loads(self.text)
        return tool


class Said(msgspec.Struct, frozen=True):
    """A message: who speaks, and all that it says as text, calls and images included."""

    role: str
    text: str


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a log, as far as it makes up the prompt.

    line      its number in the file, from 1
    said      the conversation; of a bare prompt one message of role ""
    tools     offered to the model
    model     that was asked for
    tenant    whose request it is, and
    salt      the cache salt that it brings: only requests of the same two share what is cached
    reply     text that came back; "" where the log does not tell
    ttft_s    seconds to the first token, and
    computed  tokens of the prompt computed for it; 0 where the log does not tell
    """

    line: int
    said: tuple[Said, ...]
    tools: tuple[Tool, ...] = ()
    model: str = ""
    tenant: str = ""
    salt: str = ""
    reply: str = ""
    ttft_s: float = 0.0
    computed: int = 0

    @property
    def is_chat(self) -> bool:
        """False for a bare prompt."""
        return not (len(self.said) == 1 and not self.said[0].role)


def read_log(path: Path) -> list[LoggedRequest]:
    """Read a log, gzip-compressed or not.

    Raises InvalidLog that names file, line and what is wrong; OSError.
    """
    found = []
    try:
        for number, line in log_lines(path):
            try:
                found.append(request_of(_object(line), line=number))
            except InvalidLog as error:
                raise InvalidLog(f"{path.name}, line {number}: {error}") from None
    except InvalidTrace as damaged:
        raise InvalidLog(str(damaged)) from None
    if not found:
        raise InvalidLog(f"{path.name} holds no request: one JSON object a line is expected")
    return found


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidLog(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidLog("a JSON object is expected")
    return found


def request_of(record: Mapping[str, Any], *, line: int = 1) -> LoggedRequest:
    """Make a request of a line's object.  Raises InvalidLog that says what is wrong with it."""
    body = record
    for name in ("body", "request"):
        if isinstance(record.get(name), Mapping):
            body = record[name]
            break
    return LoggedRequest(
        line=line,
        said=_said(body),
        tools=_tools(body.get("tools")),
        model=str(body.get("model") or ""),
        tenant=str(record.get("tenant") or ""),
        salt=str(body.get("cache_salt") or record.get("cache_salt") or ""),
        reply=reply_text(record.get("response")),
        ttft_s=_number(record.get("ttft_s")),
        computed=int(_number(record.get("computed"))),
    )


def _said(body: Mapping[str, Any]) -> tuple[Said, ...]:
    messages, prompt = body.get("messages"), body.get("prompt")
    if messages is None and isinstance(prompt, str):
        return (Said("", prompt),)
    if not isinstance(messages, list) or not messages:
        raise InvalidLog(
            "a request has `messages` or a text as `prompt`; a server's own log has no bodies, so "
            "log them where they are sent"
        )
    said = [] if not body.get("system") else [Said("system", text_of(body["system"]))]
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidLog(f"messages[{place}] is no message: it needs a role")
        role = message["role"].strip().lower() or "user"
        said.append(Said(_ROLES.get(role, role), message_text(message)))
    return tuple(said)


def _tools(tools: Any) -> tuple[Tool, ...]:
    found = []
    for place, tool in enumerate(as_list(tools)):
        if not isinstance(tool, Mapping):
            raise InvalidLog(f"tools[{place}] is no tool: an object is expected")
        function = tool.get("function")
        if not isinstance(function, Mapping):  # Anthropic's, or a tool of the server's
            named = {"name": str(tool.get("name") or tool.get("type") or place)}
            rest = {key: value for key, value in tool.items() if key not in ("name", "type")}
            tool, function = {"type": "function", "function": named | rest}, named
        found.append(Tool(str(function.get("name") or place), as_json(tool)))
    return tuple(found)


def _number(value: Any) -> float:
    """Return a number that a log may mean; 0 for NaN, infinity and what no clock or model tells."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < MAX_NUMBER else 0.0
