"""OpenAI's answers as records: completions, chunks of a stream, models, errors.

Owns: the shape of what goes out.  Does not know: HTTP, the engine's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Literal, TypeVar

import msgspec

from runtime.misses.records import CacheReport
from runtime.request import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt was found in the cache; always present."""

    cached_tokens: int


class UsageAnswer(msgspec.Struct, frozen=True):
    """Tokens of a request, in OpenAI's words."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def sum_usage(usages: Mapping[int, Usage], num_branches: int = 1) -> UsageAnswer:
    """Add up the usage of a request's choices, by their place.

    num_branches  choices a prompt; a prompt that several continue is counted once
    """
    by_prompt = {place // num_branches: usage for place, usage in usages.items()}
    prompt = sum(usage.prompt_tokens for usage in by_prompt.values())
    completion = sum(usage.completion_tokens for usage in usages.values())
    cached = sum(usage.cached_tokens for usage in by_prompt.values())
    return UsageAnswer(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place.

    token    its text; what is no UTF-8 by itself shows as U+FFFD
    logprob  natural logarithm of its probability
    bytes    what its text is in bytes
    """

    token: str
    logprob: float
    bytes: Sequence[int]


class ChatLogprob(TopLogprob, frozen=True):
    """A token of a chat's reply, and the likeliest ones at its place."""

    top_logprobs: Sequence[TopLogprob] = ()


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a reply, or of a piece of it."""

    content: Sequence[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probabilities of a completion, or of a piece of it; lists of equal length.

    tokens          texts; what is no UTF-8 by itself is written as `bytes:\\xe2\\x80`
    token_logprobs  null for the first token of a prompt that is echoed
    top_logprobs    null where no alternatives were asked for
    text_offset     where each begins in the text, in characters
    """

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[Mapping[str, float] | None] | None
    text_offset: Sequence[int]


class CalledFunction(msgspec.Struct, frozen=True):
    """The function that the model calls; the arguments are JSON, as a text."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True):
    """A call that the model makes."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a called function."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a call: first which one it is, then its arguments."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message; its content is null where it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Sequence[CalledTool] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the model's message; the first one carries the role."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[ToolDelta] | msgspec.UnsetType = msgspec.UNSET


TokenIds = Sequence[int] | msgspec.UnsetType


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of a chat."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a streamed chat answer."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a piece of a streamed one."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET


Choice = ChatChoice | ChatChunkChoice | TextChoice
AnyChoice = TypeVar("AnyChoice", bound=Choice, covariant=True)


class Answer(msgspec.Struct, Generic[AnyChoice], frozen=True, kw_only=True):
    """The envelope of every completion and chunk.

    usage             unset in chunks of a stream that did not ask for it; null in all but the last
                      of one that did
    prompt_token_ids  of a chat, where asked for; in the first chunk of a stream
    radixcache        why each prompt missed, where asked for; in the last chunk of a stream
    """

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[AnyChoice]
    usage: UsageAnswer | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: TokenIds = msgspec.UNSET
    radixcache: CacheReport | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The envelope of an error."""

    error: ErrorBody
