"""Choosing among continuations by how likely the model finds them.

Owns: what is asked of the engine for it, and what its answers mean.  Does not know: who asks.
Idea: all choices begin with the same tokens, so those are computed once and shared, and each
choice costs only its own.  Nothing is drawn.

    request   │ prefix: shared, cached │ choice: scored │
              0 …                 num_prefix …          end
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.errors import InvalidRequest
from runtime.plan import TokenLogprobs
from runtime.request import SamplingParams, Usage

MAX_CHOICES = 256
"""Choices of one scoring."""


class ChoiceScore(msgspec.Struct, frozen=True, kw_only=True):
    """How likely one choice is behind the prefix; natural logarithms.

    logprob       of the whole choice: the sum over its tokens
    mean_logprob  a token
    usage         tokens of prefix and choice, and how many of them were found in the cache
    """

    num_tokens: int
    logprob: float
    mean_logprob: float
    usage: Usage


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """What a scoring found.

    best     place of the likeliest choice; of equal ones the first
    choices  in the order in which they were given
    """

    best: int
    choices: tuple[ChoiceScore, ...]


def scoring_params(num_prefix: int) -> SamplingParams:
    """Return what has the tokens from `num_prefix` on scored, and nothing drawn.

    Raises InvalidRequest for an empty prefix: nothing would say how likely a first token is.
    """
    if num_prefix < 1:
        raise InvalidRequest("scoring needs at least one token before the choices", param="prompt")
    return SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=num_prefix)


def check_choices(choices: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequest for no choices, too many, or one without a token."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"give 1 to {MAX_CHOICES} choices", param="choices")
    for place, choice in enumerate(choices):
        if not choice:
            raise InvalidRequest(f"choice {place} has no tokens", param=f"choices[{place}]")


def compare(
    scored: Sequence[tuple[Sequence[TokenLogprobs], Usage]], *, normalize: bool = False
) -> Scores:
    """Compare choices by their tokens' log-probabilities.

    scored     for each choice its tokens' log-probabilities, and what it cost
    normalize  by the mean of a token's instead of the sum, so that a long choice is not worse for
               being long
    """
    choices = []
    for logprobs, usage in scored:
        total = sum(entry.token for entry in logprobs)
        choices.append(
            ChoiceScore(
                num_tokens=len(logprobs),
                logprob=total,
                mean_logprob=total / len(logprobs),
                usage=usage,
            )
        )
    ranks = [choice.mean_logprob if normalize else choice.logprob for choice in choices]
    return Scores(best=ranks.index(max(ranks)), choices=tuple(choices))
