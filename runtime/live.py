"""A request in flight: its branches, and their output on the way to text.

Owns: from a drawn token to news: text, stops, limits, constraints.  Does not know: the scheduler,
the queue, who computes.
"""

from __future__ import annotations

from runtime.plan import TokenLogprobs
from runtime.request import FinishReason, Request, RequestOutput, Usage
from runtime.scheduler.scheduler import Step
from runtime.sequence import Sequence
from runtime.tokenizer.detokenizer import Detokenizer, StopStrings
from runtime.tokenizer.load import Tokenizer


class Branch:
    """One sequence of a request, and its output on the way to text."""

    __slots__ = ("detokenizer", "sequence", "stops")

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.stops = StopStrings(sequence.request.sampling.stop)


class LiveRequest:
    """One request from submission to its last news.

    branches   by index, those that have not ended
    submitted  seconds of the engine's clock
    queue_s    seconds from then to its first step, None before
    """

    __slots__ = ("_eos_ids", "_tokenizer", "branches", "queue_s", "request", "submitted")

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        *,
        submitted: float,
    ) -> None:
        self.request = request
        self.branches: dict[int, Branch] = {}
        self.submitted = submitted
        self.queue_s: float | None = None
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids

    def begin(self, sequence: Sequence) -> None:
        """Take up a branch, unless it is known; a new one gets a constraint of its own.

        Raises what the constraint raises; the branch is taken up all the same.
        """
        if sequence.index in self.branches:
            return
        self.branches[sequence.index] = Branch(sequence, self._tokenizer)
        if sequence.index and self.request.constraint is not None:
            sequence.constraint = self.request.constraint.fork()

    def advance(self, step: Step, *, max_len: int) -> RequestOutput:
        """Return the news of a branch after a step; with its reason, where it has ended.

        Raises what its constraint or the tokenizer raises.
        """
        branch = self.branches[step.sequence.index]
        if step.token is None:
            reason: FinishReason | None = None
            if self.request.sampling.max_tokens == 0 and not step.sequence.num_behind:
                reason = "length"
            return self._news(branch, reason=reason, prompt_logprobs=step.prompt_logprobs)
        text, reason = self._read(branch, step.token, max_len)
        return self._news(
            branch,
            text=text,
            tokens=(step.token,),
            reason=reason,
            logprobs=() if step.logprobs is None else (step.logprobs,),
            prompt_logprobs=step.prompt_logprobs,
        )

    def last_news(
        self, branch: Branch, reason: FinishReason, *, error: str | None = None
    ) -> RequestOutput:
        """Return the news that end a branch from outside: what was held back, and why."""
        return self._news(branch, text=_rest(branch)[0], reason=reason, error=error)

    def _read(self, branch: Branch, token: int, max_len: int) -> tuple[str, FinishReason | None]:
        """Return the text that a token adds, and why it is the last one, if it is."""
        sequence, sampling = branch.sequence, self.request.sampling
        is_eos = token in self._eos_ids and not sampling.ignore_eos
        ends = is_eos or token in sampling.stop_token_ids
        text, found = "", False
        if branch.detokenizer and not ends:
            text, found = branch.stops.push(branch.detokenizer.push([token]))
        if sequence.constraint is not None and not (is_eos or found):
            sequence.constraint.accept(token)
            ends = ends or sequence.constraint.is_done
            sequence.allowed = b"" if ends else sequence.constraint.allowed()
        reason: FinishReason | None = None
        limit = max_len if sampling.max_tokens is None else sampling.max_tokens
        if ends or found:
            reason = "stop"
        elif len(sequence.output) >= limit or sequence.num_tokens >= max_len:
            reason = "length"
        if reason and not found:
            rest, found = _rest(branch)
            text += rest
        return text, "stop" if found else reason

    def _news(
        self,
        branch: Branch,
        *,
        text: str = "",
        tokens: tuple[int, ...] = (),
        reason: FinishReason | None = None,
        error: str | None = None,
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> RequestOutput:
        sequence = branch.sequence
        cached = sequence.num_cached or 0
        computed = min(sequence.num_computed, sequence.num_prompt_tokens) - cached
        return RequestOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=tokens,
            usage=Usage(
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=cached,
                computed_tokens=max(0, computed),
                completion_tokens=len(sequence.output),
                queue_s=self.queue_s or 0.0,
            ),
            finish_reason=reason,
            error=error,
            index=sequence.index,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _rest(branch: Branch) -> tuple[str, bool]:
    """Return the text held back until now, up to a stop, and whether there was one."""
    if branch.detokenizer is None:
        return "", False
    rest, found = branch.stops.push(branch.detokenizer.flush())
    return (rest, True) if found else (rest + branch.stops.flush(), False)
