"""What came of a prompt, as one record.

Owns: putting the news of a request together.  Does not know: who ran the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runtime.errors import EngineFailure
from runtime.plan import TokenLogprobs
from runtime.request import FinishReason, RequestOutput, Usage


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one prompt.

    token_ids        new tokens; the text is theirs, less the stop
    usage            tokens of the prompt, and how many of them were found in the cache
    logprobs         of each new token, where `SamplingParams.logprobs` asked for them
    prompt_logprobs  of the prompt's tokens from `prompt_logprobs_from` on, where asked for
    others           the other branches where `SamplingParams.n` asked for several, in order
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    others: tuple[Completion, ...] = ()

    @property
    def branches(self) -> tuple[Completion, ...]:
        """All that continue the prompt: this one and the others."""
        return (self, *self.others)


def completion_of(news: Sequence[RequestOutput]) -> Completion:
    """Put a request's news together.  Raises EngineFailure where a branch did not end well."""
    by_branch: dict[int, list[RequestOutput]] = {}
    for output in news:
        by_branch.setdefault(output.index, []).append(output)
    first, *others = (_branch(by_branch[index]) for index in sorted(by_branch))
    return msgspec.structs.replace(first, others=tuple(others))


def _branch(news: list[RequestOutput]) -> Completion:
    last = news[-1]
    if last.finish_reason is None or last.finish_reason == "error":
        raise EngineFailure(last.error or "the engine stopped before the request ended")
    return Completion(
        text="".join(output.text for output in news),
        token_ids=tuple(token for output in news for token in output.token_ids),
        finish_reason=last.finish_reason,
        usage=last.usage,
        logprobs=tuple(entry for output in news for entry in output.logprobs),
        prompt_logprobs=tuple(entry for output in news for entry in output.prompt_logprobs),
    )
