"""Anthropic's answers as records: messages, events of a stream, errors.

Owns: the shape of what goes out.  Does not know: HTTP, the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from runtime.misses.records import CacheReport
from runtime.request import Usage
from runtime.server.answers import ErrorBody

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request; the three kinds of input add up to the whole prompt.

    input_tokens                 computed, and behind the last mark
    cache_creation_input_tokens  computed, and before the last mark: kept for the time it asks for
    cache_read_input_tokens      found in the cache
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


def usage_of(usage: Usage, *, marked_tokens: int) -> MessageUsage:
    """Return a request's usage; marked_tokens are those before the last mark."""
    created = max(0, min(marked_tokens, usage.prompt_tokens) - usage.cached_tokens)
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


class TextAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text that the model said."""

    text: str


class ToolUseAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model made; its input is the JSON that it wrote."""

    id: str
    name: str
    input: msgspec.Raw


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The model's message; `radixcache` tells why the prompt missed, where asked for."""

    id: str
    model: str
    content: Sequence[TextAnswer | ToolUseAnswer]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    radixcache: CacheReport | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """How many tokens a prompt has."""

    input_tokens: int


class _Event(msgspec.Struct, frozen=True, tag_field="type"):
    def encoded(self) -> bytes:
        """Return the event as it goes over the wire."""
        name = type(self).__struct_config__.tag
        return f"event: {name}\ndata: ".encode() + msgspec.json.encode(self) + b"\n\n"


class MessageStart(_Event, frozen=True, tag="message_start"):
    """A message begins; it has no content yet."""

    message: MessageAnswer


class BlockStart(_Event, frozen=True, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: TextAnswer | ToolUseAnswer


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """A piece of a text."""

    text: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """A piece of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(_Event, frozen=True, tag="content_block_delta"):
    """A piece of a block."""

    index: int
    delta: TextDelta | InputDelta


class BlockStop(_Event, frozen=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class StopDelta(msgspec.Struct, frozen=True):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(_Event, frozen=True, tag="message_delta"):
    """A message ends: why, and what it took."""

    delta: StopDelta
    usage: MessageUsage
    radixcache: CacheReport | msgspec.UnsetType = msgspec.UNSET


class MessageStop(_Event, frozen=True, tag="message_stop"):
    """A message is whole."""


class Ping(_Event, frozen=True, tag="ping"):
    """Nothing happened; the connection lives."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    type: str
    message: str


class ErrorEvent(_Event, frozen=True, tag="error"):
    """What went wrong, as an event and as a body; a body tells the request's id."""

    error: ErrorDetail
    request_id: str | msgspec.UnsetType = msgspec.UNSET


def error_answer(
    status: int, body: ErrorBody, *, request_id: str | None = None
) -> tuple[int, ErrorEvent]:
    """Return an error in Anthropic's words, from OpenAI's."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = body.message
    if body.param and body.param not in message:
        message = f"{body.param}: {message}"
    return status, ErrorEvent(ErrorDetail(kind, message), request_id or msgspec.UNSET)
