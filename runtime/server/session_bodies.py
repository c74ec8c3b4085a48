"""Bodies and answers of sessions as records.

Owns: field names, defaults and limits of `/v1/sessions…`.  Does not know: HTTP, the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from runtime.errors import InvalidRequest
from runtime.request import SamplingParams
from runtime.server.answers import UsageAnswer
from runtime.server.chat_bodies import Message
from runtime.server.fields import MAX_SALT_LEN, CacheOptions
from runtime.server.openai import DEFAULT_COMPLETION_TOKENS, CompletionOptions
from runtime.sessions.records import SessionState
from runtime.sessions.text import Addition


class AppendRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/sessions/{id}/append`: either a prompt or messages.

    prompt         a text or token ids
    messages       go to an empty session or a conversation, which is then written anew as a whole
    parse_special  whether control tokens written in a text act as such
    """

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    parse_special: bool = False

    def check(self) -> None:
        """Raise InvalidRequest for both, or for a message that is none."""
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
        for place, message in enumerate(self.messages or ()):
            message.check(place)

    @property
    def addition(self) -> Addition:
        """What is appended; nothing where neither field is there."""
        if self.messages is not None:
            return [message.for_template() for message in self.messages]
        return self.prompt or ""


class CreateRequest(AppendRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/sessions`: what the session begins with, if anything.

    cache_salt  the session shares what is cached only with what has the same salt
    """

    model: str | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what no session can begin with."""
        super().check()
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_LEN:
            raise InvalidRequest(
                f"`cache_salt` takes 1 to {MAX_SALT_LEN} characters", param="cache_salt"
            )


class GenerateRequest(CompletionOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/sessions/{id}/generate`: the fields of a completion, less the prompt.

    logprobs    so many of the likeliest tokens are told at each place
    radixcache  whether the answer tells why the branch missed
    """

    logprobs: int | None = None
    radixcache: CacheOptions | None = None

    def check(self) -> None:
        """Raise InvalidRequest for what a session is not asked for here."""
        super().check()
        if self.num_choices != 1:
            raise InvalidRequest("a session is one branch: fork it for `n` of them", param="n")
        if self.cache_salt is not None:
            raise InvalidRequest(
                "a session has the `cache_salt` that it was created with: leave it out",
                param="cache_salt",
            )

    def sampling(self, *, is_conversation: bool) -> SamplingParams:
        """Translate to the engine's parameters.  Raises InvalidRequest that names the field.

        is_conversation  whether the end is the model's to find, as in a chat
        """
        max_tokens = self.max_tokens
        if max_tokens is None and not is_conversation:
            max_tokens = DEFAULT_COMPLETION_TOKENS
        return self.common_sampling(max_tokens=max_tokens, logprobs=self.logprobs)


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/sessions/{id}/score`.

    choices    texts or token ids, each scored behind the session's tokens
    normalize  choose by the mean of a token's log-probability instead of the sum
    """

    choices: list[str | list[int]]
    normalize: bool = False
    model: str | None = None
    priority: int = 0
    timeout_s: float | None = None


class HoldRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/sessions/{id}/hold`.

    seconds  from now on; 0 lets go
    """

    seconds: float


class SessionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A session at one moment; see `SessionState`.

    parent  the session that it was forked from
    """

    id: str
    object: Literal["session"] = "session"
    parent: str | None
    num_tokens: int
    cached_tokens: int
    held_tokens: int
    held_for_s: float
    expires_in_s: float
    is_busy: bool

    @classmethod
    def of(cls, state: SessionState) -> SessionAnswer:
        """Tell a state to whom it belongs."""
        return cls(
            id=state.session_id,
            parent=state.parent,
            num_tokens=state.num_tokens,
            cached_tokens=state.cached_tokens,
            held_tokens=state.held_tokens,
            held_for_s=round(state.held_for_s, 3),
            expires_in_s=round(state.expires_in_s, 3),
            is_busy=state.is_busy,
        )


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """That a session has ended."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How likely one choice is: natural logarithms, of all its tokens and of one on average."""

    index: int
    num_tokens: int
    logprob: float
    mean_logprob: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a scoring found.

    best   index of the likeliest choice
    usage  of all choices together, each with the session's tokens before it
    """

    id: str
    object: Literal["session.scores"] = "session.scores"
    model: str
    best: int
    choices: Sequence[ChoiceAnswer]
    usage: UsageAnswer
