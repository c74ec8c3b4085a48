"""OpenAI's request bodies as records, and what they mean to the engine.

Owns: field names, defaults and limits that chat and completions share, and the completions' own.
Does not know: HTTP, the engine's thread.
Idea: every field is served, ignored because it changes no answer, or refused by name unless it
asks for nothing; a field nobody heard of is refused too, so that a typing mistake is never silent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from runtime.errors import InvalidRequest
from runtime.request import MAX_LOGIT_BIAS, SamplingParams
from runtime.server.fields import (
    MAX_SALT_LEN,
    Bias,
    CacheOptions,
    Fraction,
    Mass,
    NumBranches,
    NumTokens,
    NumTop,
    Penalty,
    Priority,
    Salt,
    Seconds,
    Seed,
    StopIds,
    StopText,
    StopTexts,
    Temperature,
    TokenId,
    TopK,
    only,
    told,
)
from runtime.server.formats import OutputFormat

MAX_PROMPTS = 64
"""Prompts in one completion request."""

MAX_CHOICES = 256
"""Branches of one completion request, over all of its prompts."""

MAX_ECHOED = 1 << 20
"""Log-probabilities told of echoed prompts, over all choices of one completion request."""

DEFAULT_COMPLETION_TOKENS = 16
"""New tokens of `/v1/completions` where the body does not say, as OpenAI has it."""

Prompts = Annotated[list[str | TokenId | list[TokenId]], told(minItems=1)]
Neutral = dict[str, tuple[Any, ...]]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer.

    include_usage           end with a chunk that has the usage
    continuous_usage_stats  have it in every chunk, as vLLM does
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class CompletionOptions(OutputFormat, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and completions share; see docs/server.md for each."""

    neutral: ClassVar[Neutral] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: Mass | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    n: NumBranches | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    return_token_ids: bool = False
    priority: Priority = 0
    cache_salt: Salt | None = None
    timeout_s: Seconds | None = None
    # ignored
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for a field that asks for what is not served."""
        for name, neutral in self.neutral.items():
            value = getattr(self, name)
            is_bool = isinstance(value, bool) and not any(isinstance(n, bool) for n in neutral)
            if value is not None and (is_bool or value not in neutral):
                other = f" or set it to {neutral[0]!r}" if neutral else ""
                raise InvalidRequest(
                    f"`{name}` is not supported here; leave it out{other}", param=name
                )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` goes with `stream`", param="stream_options")
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_LEN:
            raise InvalidRequest(
                f"`cache_salt` takes 1 to {MAX_SALT_LEN} characters", param="cache_salt"
            )

    @property
    def num_choices(self) -> int:
        """Choices that each prompt is answered by."""
        return 1 if self.n is None else self.n

    @property
    def options(self) -> StreamOptions:
        """How a stream is to be told."""
        return self.stream_options or StreamOptions()

    def common_sampling(self, **others: Any) -> SamplingParams:
        """Translate to the engine's parameters; the temperature is 1 unless given, as OpenAI's.

        others  parameters that chat and completions say in different ways

        Raises InvalidRequest that names the field.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else self.top_k,  # -1: as vLLM spells "all"
            min_p=0.0 if self.min_p is None else self.min_p,
            seed=self.seed,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._bias(),
            **others,
        )

    def _bias(self) -> tuple[tuple[int, float], ...]:
        pairs: list[tuple[int, float]] = []
        if self.logit_bias and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"`logit_bias` takes at most {MAX_LOGIT_BIAS} tokens", param="logit_bias"
            )
        for key, value in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequest(
                    f"`logit_bias` maps token ids to numbers, and {key!r:.40} is no token id",
                    param="logit_bias",
                )
            pairs.append((int(key), value))
        return tuple(pairs)


class CompletionRequest(CompletionOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/completions`.

    prompt         a text, token ids, or a list of either
    parse_special  whether control tokens written in a text act as such
    logprobs       so many of the likeliest tokens are told at each place
    echo           whether the answer begins with the prompt
    best_of        so many branches are generated, and the `n` likeliest answered
    radixcache     whether the answer tells why each prompt missed
    """

    neutral: ClassVar[Neutral] = {"suffix": ("",)}

    prompt: str | Prompts
    parse_special: bool = False
    logprobs: NumTop | None = None
    echo: bool | None = None
    best_of: NumBranches | None = None
    radixcache: CacheOptions | None = None
    # refused unless neutral
    suffix: Annotated[Any, only("")] = None

    def check(self) -> None:
        """Raise InvalidRequest for a field that is not served, or that contradicts another."""
        super().check()
        if self.max_tokens == 0 and max(self.num_choices, self.best_of or 1) > 1:
            raise InvalidRequest(
                "`max_tokens` is 0, so nothing is drawn: leave out `n` and `best_of`",
                param="max_tokens",
            )
        if self.best_of is not None:
            if self.best_of < self.num_choices:
                raise InvalidRequest(
                    f"`best_of` is {self.best_of}: at least `n`, which is {self.num_choices}",
                    param="best_of",
                )
            if self.stream and self.best_of > self.num_choices:
                raise InvalidRequest(
                    "the best of several is known at their end only: leave out `stream`",
                    param="best_of",
                )

    def sampling(self) -> SamplingParams:
        """Translate to the engine's parameters.  Raises InvalidRequest that names the field."""
        ranks = self.best_of is not None and self.best_of > self.num_choices
        sampling = self.common_sampling(
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
            n=self.num_choices,
            logprobs=0 if ranks and self.logprobs is None else self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
        if not ranks:
            return sampling
        try:
            return msgspec.structs.replace(sampling, n=self.best_of)
        except InvalidRequest as error:
            raise InvalidRequest(
                str(error).replace("n must", "best_of must"), param="best_of"
            ) from None

    def check_echo(self, num_tokens: int) -> None:
        """Raise InvalidRequest where echoed prompts of so many tokens have too much to tell."""
        if self.echo and self.logprobs is not None:
            num_told = num_tokens * self.num_choices * (self.logprobs + 1)
            if num_told > MAX_ECHOED:
                raise InvalidRequest(
                    f"{num_told} log-probabilities of prompts would be told, and at most "
                    f"{MAX_ECHOED} are: lower `n` or `logprobs`, or send fewer prompts at once",
                    param="echo",
                )

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
        if len(prompt) * max(self.num_choices, self.best_of or 0) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times branches exceed {MAX_CHOICES}: ask for fewer at once", param="n"
            )
        return [item for item in prompt if not isinstance(item, int)]
