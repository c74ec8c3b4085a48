"""OpenAI's request bodies as records, and what they mean to the engine.

Owns: field names, defaults and limits of the API.  Does not know: HTTP, the engine's thread.
Idea: every field is served, ignored because it changes no answer, or refused by name unless it
asks for nothing; a field nobody heard of is refused too, so that a typing mistake is never silent.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.request import SamplingParams

MAX_PROMPTS = 64
"""Prompts in one completion request."""

DEFAULT_COMPLETION_TOKENS = 16
"""New tokens of `/v1/completions` where the body does not say, as OpenAI has it."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a message's content; text is the only kind served."""

    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation; `developer` is rendered as `system`.

    A reply may be sent back as it came: fields that the server's own answers carry are taken where
    they are null or empty.
    """

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    # refused unless empty
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    reasoning_content: Any = None

    def check(self, place: int) -> None:
        """Raise InvalidRequest for a message without content, or with what is not served."""
        for name in _EMPTY_IN_MESSAGES:
            if getattr(self, name):
                raise InvalidRequest(
                    f"`{name}` in a message is not supported here; leave it out",
                    param=f"messages[{place}].{name}",
                )
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(
                f"the message has no content: give `content` a text (role {self.role})",
                param=f"messages[{place}].content",
            )

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text or ())
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and completions share; see docs/server.md for each."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    # ignored
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # refused unless neutral
    n: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for a field that asks for what is not served."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            is_bool = isinstance(value, bool) and not isinstance(neutral[0], bool)
            if value is not None and (is_bool or value not in neutral):
                raise InvalidRequest(
                    f"`{name}` is not supported here; leave it out or set it to {neutral[0]!r}",
                    param=name,
                )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` goes with `stream`", param="stream_options")

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """Translate to the engine's parameters; the temperature is 1 unless given, as OpenAI's.

        Raises InvalidRequest that names the field.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # -1: as vLLM spells "all"
            min_p=0.0 if self.min_p is None else self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    @property
    def include_usage(self) -> bool:
        """True where a stream is to end with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(CompletionOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    # refused unless neutral
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    reasoning_effort: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for an empty conversation or a field that is not served."""
        super().check()
        if not self.messages:
            raise InvalidRequest("`messages` is empty: send at least one", param="messages")
        for place, message in enumerate(self.messages):
            message.check(place)

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat templates expect it."""
        return [message.for_template() for message in self.messages]


class CompletionRequest(CompletionOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`.

    prompt         a text, token ids, or a list of either
    parse_special  whether control tokens written in a text act as such
    """

    prompt: str | list[str | int | list[int]]
    parse_special: bool = False
    # refused unless neutral
    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one.  Raises InvalidRequest for none, too many or mixtures."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("`prompt` is empty", param="prompt")
        ids = [item for item in prompt if isinstance(item, int)]
        if len(ids) == len(prompt):
            return [ids]
        if ids:
            raise InvalidRequest("`prompt` mixes token ids with prompts", param="prompt")
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"`prompt` takes at most {MAX_PROMPTS} prompts", param="prompt")
        return [item for item in prompt if not isinstance(item, int)]


_EMPTY_IN_MESSAGES = (
    "refusal",
    "annotations",
    "audio",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning_content",
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "echo": (False,),
    "suffix": ("",),
}
