"""OpenAI's answers as records: completions, chunks of a stream, models, errors.

Owns: the shape of what goes out.  Does not know: HTTP, the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from runtime.request import Usage

Finish = Literal["stop", "length"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt was found in the cache; always present."""

    cached_tokens: int


class UsageAnswer(msgspec.Struct, frozen=True):
    """Tokens of a request, in OpenAI's words."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def sum_usage(usages: Sequence[Usage]) -> UsageAnswer:
    """Add up the usage of a request's prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return UsageAnswer(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(sum(usage.cached_tokens for usage in usages)),
    )


class ChatMessage(msgspec.Struct, frozen=True):
    """The model's message."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """A piece of the model's message; the first one carries the role."""

    content: str
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of a chat."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed chat answer."""

    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a piece of a streamed one."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


Choice = ChatChoice | ChatChunkChoice | TextChoice


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The envelope of every completion and chunk.

    usage  unset in chunks of a stream that did not ask for it; null in all but the last of one
           that did
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: UsageAnswer | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The envelope of an error."""

    error: ErrorBody


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served.

    max_model_len  longest sequence, prompt and output, in tokens
    """

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "radixcache"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models served: one."""

    data: list[ModelCard]
    object: Literal["list"] = "list"
