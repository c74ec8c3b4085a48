"""What is asked of the engine, and what it answers: values that may cross threads.

Owns: the fields and which values are allowed.  Does not know: HTTP, tokenizers, progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from radixcache.errors import InvalidTokens
from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.tokens import pack_tokens
from runtime.errors import InvalidRequest

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a request ended: its own stop, a length limit, the caller, or a failed step."""

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**63


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop.

    temperature     0 takes the likeliest token; higher flattens the distribution
    top_k           keep the k likeliest tokens; 0 keeps all
    top_p           keep the likeliest tokens that together reach this probability, in (0, 1]
    min_p           keep tokens at least this fraction as likely as the likeliest, in [0, 1]
    seed            same seed, same request: same tokens, whatever runs beside it; None draws one
    max_tokens      stop after so many new tokens; None goes on to the engine's `max_len`
    stop            stop where one of these texts appears; it is not part of the output
    stop_token_ids  stop at one of these tokens
    ignore_eos      go on past the model's own end of sequence

    Raises InvalidRequest that names the field.

    >>> SamplingParams(temperature=0.7, top_p=0.9).greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, 100)
        _within("top_k", self.top_k, 0, 2**31 - 1, whole=True)
        _within("min_p", self.min_p, 0, 1)
        _within("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        if self.seed is not None:
            _within("seed", self.seed, -MAX_SEED, MAX_SEED - 1, whole=True)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**31 - 1, whole=True)
        _all_are("stop", self.stop, str)
        if len(self.stop) > MAX_STOP_STRINGS or not all(self.stop):
            raise InvalidRequest(
                f"stop takes at most {MAX_STOP_STRINGS} texts, none of them empty", param="stop"
            )
        if max(map(len, self.stop), default=0) > MAX_STOP_LEN:
            raise InvalidRequest(f"a stop has at most {MAX_STOP_LEN} characters", param="stop")
        _all_are("stop_token_ids", self.stop_token_ids, int)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids"
            )
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be true or false", param="ignore_eos")

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature == 0


def _within(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = "a whole number" if whole else "a number"
        raise InvalidRequest(f"{name} must be {expected}, not {value!r}", param=name)
    if not low <= value <= high:  # NaN is not; a huge int can neither be a float nor be shown
        raise InvalidRequest(f"{name} must be from {low} to {high}", param=name)


def _all_are(name: str, values: Any, kind: type) -> None:
    # A lone text is a sequence of texts too, and would stop at each of its letters.
    if not isinstance(values, tuple | list) or any(type(value) is not kind for value in values):
        raise InvalidRequest(f"{name} must be a tuple of {kind.__name__}", param=name)


def pack_prompt(token_ids: Iterable[int]) -> bytes:
    """Pack a prompt's token ids.  Raises InvalidRequest for what can't be an id."""
    try:
        return pack_tokens(token_ids)
    except InvalidTokens as error:
        raise InvalidRequest(str(error), param="prompt") from None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued.

    request_id  the caller's name for it, unique among those in flight
    prompt      packed token ids, at least one
    namespace   who may share K/V with it
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    namespace: Namespace = DEFAULT_NAMESPACE


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request cost so far, in tokens.

    cached_tokens    tokens of the prompt whose K/V was found in the cache at first admission
    computed_tokens  tokens of the prompt computed so far, cached ones not counted
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request: what came since the last one.

    text, token_ids  new output; empty while the prompt is still being computed
    finish_reason    set on the last one
    error            what went wrong, where `finish_reason` is "error"
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    error: str | None = None
