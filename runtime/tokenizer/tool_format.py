"""How a model writes calls of tools.

Owns: the formats, their marks, telling them apart, writing a call.  Does not know: how a call is
found in a text, tools, templates' variables.

    hermes    text <tool_call>{"name": …, "arguments": {…}}</tool_call> …
    llama     {"name": …, "parameters": {…}}; …         the whole reply, or behind <|python_tag|>
    mistral   text [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"
LIST = "[TOOL_CALLS]"
MARKS = (OPEN, CLOSE, TAG, LIST)


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes its calls.

    control_ids  the marks that are control tokens of its vocabulary, with their ids
    max_calls    calls of one reply that its template takes back; None: any number
    """

    name: Literal["hermes", "llama", "mistral"] = "hermes"
    control_ids: Mapping[str, int] = {}
    max_calls: int | None = None


HERMES = ToolFormat()


def tool_format(template: str | None, special_tokens: Mapping[str, int]) -> ToolFormat:
    """Tell from a chat template's source how its model writes calls; hermes where it says nothing.

    >>> tool_format("{{ '<|python_tag|>' + call }}", {}).name
    'llama'
    """
    source = template or ""
    ids = {mark: special_tokens[mark] for mark in MARKS if mark in special_tokens}
    if OPEN in source:
        return ToolFormat(name="hermes", control_ids=ids)
    if LIST in source:
        return ToolFormat(name="mistral", control_ids=ids)
    if TAG in source or ("ipython" in source and '"parameters": ' in source):
        return ToolFormat(name="llama", control_ids=ids)
    return ToolFormat(name="hermes", control_ids=ids)


def written_calls(text: str, calls: Sequence[tuple[str, str]], format: ToolFormat = HERMES) -> str:
    """Return a reply with calls as its model would write it.

    text   what it says beside the calls
    calls  name and arguments, a JSON object, of each
    """
    key = "parameters" if format.name == "llama" else "arguments"
    bodies = [f'{{"name": {quoted(name)}, "{key}": {arguments}}}' for name, arguments in calls]
    match format.name:
        case "hermes":
            written = "\n".join(f"{OPEN}\n{body}\n{CLOSE}" for body in bodies)
        case "llama":
            written = "; ".join(bodies)
        case "mistral":
            written = f"{LIST} [{', '.join(bodies)}]"
    return f"{text}\n{written}" if text else written


def reply_key(text: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return one text for all spellings of a reply that mean the same.

    Clients send arguments back parsed and written anew, and may trim the text.
    """
    spelled = []
    for name, arguments in calls:
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.dumps(json.loads(arguments))
        spelled.append((name, arguments))
    return written_calls(text.strip(), spelled)


def quoted(text: str) -> str:
    """Return a text as JSON, letters beyond ASCII as they are."""
    return json.dumps(text, ensure_ascii=False)
