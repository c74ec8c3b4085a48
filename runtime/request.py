"""What is asked of the engine, and what it answers: values that may cross threads.

Owns: the fields and which values are allowed.  Does not know: HTTP, tokenizers, progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import msgspec

from radixcache.errors import InvalidTokens
from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.retention import Retention
from radixcache.tokens import pack_tokens
from runtime.errors import InvalidRequest
from runtime.plan import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Why a branch ended: its own stop, a length limit, the caller, its deadline, or a failed step."""

NO_ROOM = "the pool has no room for the request"
"""What the error of a branch begins with that could not go on for want of blocks."""

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SEED = 2**63
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TIMEOUT_S = 1e9
MAX_PRIORITY = 2**31


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop.

    temperature     0 takes the likeliest token; higher flattens the distribution
    top_k           keep the k likeliest tokens; 0 keeps all
    top_p           keep the likeliest tokens that together reach this probability, in (0, 1]
    min_p           keep tokens at least this fraction as likely as the likeliest, in [0, 1]
    seed            same seed, same request: same tokens, whatever runs beside it; None draws one
    max_tokens      stop after so many new tokens; None goes on to `max_len`; 0 computes
                    the prompt (so that it is cached, or scored) and draws nothing
    stop            stop where one of these texts appears; it is not part of the output
    stop_token_ids  stop at one of these tokens
    ignore_eos      go on past the model's own end of sequence
    n               branches that continue the prompt, which is computed once; branch i of a seed
                    draws the same tokens whatever n is
    presence_penalty, frequency_penalty
                    taken from a token's logit once it was generated, and for each time it was;
                    from -2 to 2
    logit_bias      (token id, value from -100 to 100) pairs, added to the logits
    logprobs        report each new token's log-probability and so many of the likeliest, 0 to 20
    prompt_logprobs
                    report the prompt's log-probabilities with so many of the likeliest, 0 to 20
    prompt_logprobs_from
                    first token of the prompt to report, at least 1: nothing stands before token 0

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
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1

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
            _within("max_tokens", self.max_tokens, 0, 2**31 - 1, whole=True)
        _within("n", self.n, 1, MAX_N, whole=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), -2, 2)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 0, MAX_LOGPROBS, whole=True)
        _within("prompt_logprobs_from", self.prompt_logprobs_from, 1, 2**31 - 1, whole=True)
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
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

    def _check_bias(self) -> None:
        _all_are("logit_bias", self.logit_bias, tuple)
        if any(len(pair) != 2 for pair in self.logit_bias):
            raise InvalidRequest("logit_bias takes (token id, value) pairs", param="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias"
            )
        for token_id, value in self.logit_bias:
            _within("logit_bias", token_id, 0, 2**31 - 1, whole=True)
            _within("logit_bias", value, -100, 100)
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias names a token twice", param="logit_bias")

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


class Constraint(Protocol):
    """Which tokens may follow, as a grammar has it; one object for each branch, with its state."""

    def allowed(self) -> bytes:
        """Return one bit a token, bit i % 32 of word i // 32 of packed int32."""

    def accept(self, token_id: int) -> None:
        """Note the token that was drawn, one of those allowed."""

    @property
    def is_done(self) -> bool:
        """True where nothing but the end may follow."""

    def fork(self) -> Constraint:
        """Return another one in the same state."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued, by one branch or several.

    request_id  the caller's name for it, unique among those in flight
    prompt      packed token ids, at least one
    namespace   who may share K/V with it
    priority    the lower goes first, where the engine orders by priority
    timeout_s   seconds after submission at which it ends with reason "timeout"; None: never
    retentions  token ranges that are worth more to the cache than the rest
    constraint  what the output must look like; handed over to the engine, nobody else's any more
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    namespace: Namespace = DEFAULT_NAMESPACE
    priority: int = 0
    timeout_s: float | None = None
    retentions: tuple[Retention, ...] = ()
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _within("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY, whole=True)
        if self.timeout_s is not None:
            _within("timeout_s", self.timeout_s, 0, MAX_TIMEOUT_S)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What a request cost so far, in tokens; the same for all of its branches but the last count.

    cached_tokens      tokens of the prompt whose K/V was found in the cache at first admission
    computed_tokens    tokens of the prompt computed so far, cached ones not counted
    completion_tokens  new tokens of this branch
    queue_s            seconds from submission to first admission
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    queue_s: float = 0.0


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """News of one branch of a request: what came since the last one.

    text, token_ids  new output; empty while the prompt is still being computed
    finish_reason    set on the last one of each branch
    error            what went wrong, where `finish_reason` is "error"
    index            which branch, from 0; what concerns the prompt comes with branch 0
    is_last          True where no branch of the request gives any more news
    logprobs         one for each of `token_ids`, where asked for
    prompt_logprobs  of the next tokens of the prompt, where asked for
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0
    is_last: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
