"""The messages of a session that is a conversation, and how they become its tokens.

Owns: which messages a branch consists of, and what a reply adds to them.  Does not know: sessions,
or the template that writes them.
Idea: a template writes whole conversations, so a turn is written anew with all that was said, and
replies keep the ids that they were generated as: what is new is then only the new messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from radixcache.tokens import TOKEN_BYTES
from runtime.errors import InvalidRequest

MAX_BYTES = 1 << 20
"""Longest conversation of a session, as JSON."""

Message = Mapping[str, Any]


class Conversation(msgspec.Struct, frozen=True):
    """The messages that a branch's tokens are.

    packed       as JSON
    reply_start  tokens before the last message, where that is a reply given here; else None
    """

    packed: bytes
    reply_start: int | None = None

    @classmethod
    def of(cls, messages: Sequence[Message], *, reply_start: int | None = None) -> Conversation:
        """Note messages.  Raises InvalidRequest for what is no JSON, or too much of it."""
        try:
            packed = msgspec.json.encode(messages)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"a message holds what is no JSON: {error}", param="messages"
            ) from (None)
        if len(packed) > MAX_BYTES:
            raise InvalidRequest(
                f"the conversation exceeds {MAX_BYTES} bytes of JSON: begin another session",
                param="messages",
            )
        return cls(packed, reply_start)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages, to be changed at will."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self.packed)
        return messages


class Reply(msgspec.Struct, frozen=True):
    """What a turn added to a conversation.

    prompt     packed ids that the reply stands behind
    token_ids  of the whole reply, and `text` is theirs
    """

    conversation: Conversation
    prompt: bytes
    text: str
    token_ids: tuple[int, ...]


def reply_to(
    conversation: Conversation, tokens: bytes, text: str, token_ids: tuple[int, ...]
) -> Reply:
    """Add generated text to a conversation: a reply, or more of the last one.

    tokens     packed ids of the branch before it
    token_ids  what was generated behind them
    """
    messages, start = conversation.messages, conversation.reply_start
    if start is None:
        start = len(tokens) // TOKEN_BYTES
        messages.append({"role": "assistant", "content": ""})
    messages[-1]["content"] += text
    begun = tuple(memoryview(tokens).cast("i")[start:])
    return Reply(
        conversation=Conversation.of(messages, reply_start=start),
        prompt=tokens[: start * TOKEN_BYTES],
        text=messages[-1]["content"],
        token_ids=begun + token_ids,
    )
