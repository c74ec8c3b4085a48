"""Anthropic's messages as records, and what they mean to a chat template.

Owns: the blocks that a message is made of, and which of them reach the model.  Does not know:
tools, what else a request asks for.
Idea: a prompt is what the model is to read, so what agents send along for others is left out of
it: thoughts of another model, and a line for whoever bills, which differs in each request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from runtime.errors import InvalidRequest

_TTL_S = {"5m": 300.0, "1h": 3600.0}

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""What agents write in front of their system prompt for whoever bills them, with a hash of the
request in it: no part of the prompt, whose prefix would differ in every turn."""

TemplateMessage = dict[str, Any]


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt up to here is worth keeping for a while after its last use.

    scope  ignored: who shares what is cached is settled by tenants
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Any = None

    @property
    def duration_s(self) -> float:
        """How long, in seconds."""
        return _TTL_S[self.ttl]


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text; what this server sent as one may be sent back with all its fields."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call of a tool that the model made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


class ToolResultBlock(
    msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True
):
    """What a call came to."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """What another model thought in an earlier turn: no part of the prompt."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True
):
    """The same, encrypted."""

    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock
Thought = ThinkingBlock | RedactedThinkingBlock


class MessageParam(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block | Thought]

    def blocks(self) -> list[Block]:
        """Return its blocks, less what was thought; a bare text is one."""
        if isinstance(self.content, str):
            return [TextBlock(self.content)]
        return [block for block in self.content if not isinstance(block, Thought)]

    def check(self, place: int) -> None:
        """Raise InvalidRequest for a block that the role has not."""
        kinds = {
            "user": ToolResultBlock,
            "assistant": ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
            "system": TextBlock,
        }
        for number, block in enumerate([] if isinstance(self.content, str) else self.content):
            if not isinstance(block, TextBlock | kinds[self.role]):
                raise InvalidRequest(
                    f"a message of role {self.role} can't hold this kind of block",
                    param=f"messages[{place}].content[{number}]",
                )


def system_message(system: str | list[TextBlock] | None) -> list[TemplateMessage]:
    """Return a system prompt as a message, or none; the line for whoever bills is left out."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n".join(_BILLING.sub("", text) for text in texts if not _BILLING.fullmatch(text))
    return [{"role": "system", "content": text}] if text else []


def template_messages(role: str, blocks: Sequence[Block]) -> list[TemplateMessage]:
    """Return one message, or results of tools as messages of their own with texts between them.

    blocks  of a message of `role`, or the first of them
    """
    messages: list[TemplateMessage] = []
    texts: list[str] = []
    calls = []
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                if texts:
                    messages.append({"role": role, "content": "\n".join(texts)})
                    texts = []
                messages.append(_result(block))
    if role == "assistant":  # its texts are pieces of what it said, as they came
        said: TemplateMessage = {"role": role, "content": "".join(texts)}
        return [said | ({"tool_calls": calls} if calls else {})]
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _result(block: ToolResultBlock) -> TemplateMessage:
    content = block.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content or ())
    if block.is_error:
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
