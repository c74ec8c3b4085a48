"""A request in flight: its branches, and their output on the way to text.

Owns: from a drawn token to news: text, stops, limits, constraints.  Does not know: the scheduler,
the queue, who computes.
"""

from __future__ import annotations

from runtime.plan import TokenLogprobs
from runtime.request import FinishReason, Request, RequestOutput, Usage
from runtime.scheduler.scheduler import Step
from runtime.sequence import Sequence
from runtime.tokenizer.detokenizer import Detokenizer, NoText, StopStrings
from runtime.tokenizer.load import Tokenizer


class Branch:
    """One sequence of a request, and its output on the way to text.

    max_plain  output tokens, beyond which each may be the last one; none are plain where texts may
               end it
    ends       tokens that may be the last one
    costs      of the prompt: its tokens, those cached, those computed, and seconds in the queue;
               known once a token was drawn
    request_id, index, output
               of the sequence, at hand for each token
    """

    __slots__ = (
        "costs",
        "detokenizer",
        "ends",
        "index",
        "max_plain",
        "output",
        "request_id",
        "sequence",
        "stops",
    )

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None, live: LiveRequest) -> None:
        sampling = sequence.request.sampling
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer) if tokenizer else NoText()
        self.stops = StopStrings(sampling.stop)
        self.max_plain = 0 if sampling.stop else live.most_tokens(sequence) - 1
        self.ends = live.ends
        self.costs = (sequence.num_prompt_tokens, 0, 0, 0.0)
        self.request_id = sequence.request.request_id
        self.index = sequence.index
        self.output = sequence.output


def plain_news(
    sequences: list[Sequence], tokens: tuple[int, ...]
) -> tuple[list[RequestOutput], list[Step]]:
    """Return the outputs of plain tokens, and the steps whose token may end its sequence.

    For sequences that have drawn before.  A loop without calls of our own where tokens stand for
    whole characters: in a batch of hundreds this is most of what a token costs beside the model.
    """
    news: list[RequestOutput] = []
    rest: list[Step] = []
    for sequence, token in zip(sequences, tokens, strict=True):
        branch = sequence.reader
        if branch is None:  # its request has just been ended
            continue
        count = len(branch.output)
        if count > branch.max_plain or token in branch.ends:
            rest.append(Step(sequence, token))
            continue
        text = branch.detokenizer.plain_texts.get(token)
        if text is None:
            try:
                text = branch.detokenizer.push_one(token)
            except Exception:  # it raises again on the way that ends a request for that
                rest.append(Step(sequence, token))
                continue
        prompt, cached, computed, queue_s = branch.costs
        # By position: keywords take three times as long.
        usage = Usage(prompt, cached, computed, count, queue_s)
        news.append(
            RequestOutput(branch.request_id, text, (token,), usage, None, None, branch.index)
        )
    return news, rest


class LiveRequest:
    """One request from submission to its last news.

    branches   by index, those that have not ended
    ends       tokens that end any of them
    submitted  seconds of the engine's clock
    queue_s    seconds from then to its first step, None before
    """

    __slots__ = (
        "_eos_ids",
        "_max_len",
        "_tokenizer",
        "branches",
        "deadline",
        "ends",
        "queue_s",
        "request",
        "submitted",
    )

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        *,
        max_len: int,
        submitted: float,
    ) -> None:
        sampling = request.sampling
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self.ends = self._eos_ids | frozenset(sampling.stop_token_ids)
        self.request = request
        self.branches: dict[int, Branch] = {}
        self.submitted = submitted
        self.queue_s: float | None = None
        self.deadline: tuple[float, int, str] | None = None  # time, arrival, request id
        self._tokenizer = tokenizer
        self._max_len = max_len

    def begin(self, sequence: Sequence) -> None:
        """Take up a branch, unless it is known; a new one gets a constraint of its own.

        Raises what the constraint raises; the branch is taken up all the same.
        """
        if sequence.index in self.branches:
            return
        self.branches[sequence.index] = Branch(sequence, self._tokenizer, self)
        sequence.reader = self.branches[sequence.index]
        if sequence.index and self.request.constraint is not None:
            sequence.constraint = self.request.constraint.fork()

    def most_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens a branch draws at most."""
        wish, room = sequence.request.sampling.max_tokens, self._max_len
        room -= sequence.num_prompt_tokens
        return room if wish is None else min(wish, room)

    def usage(self, sequence: Sequence) -> Usage:
        """Return what a branch has cost so far."""
        cached = sequence.num_cached or 0
        computed = min(sequence.num_computed, sequence.num_prompt_tokens) - cached
        return Usage(
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=cached,
            computed_tokens=max(0, computed),
            completion_tokens=len(sequence.output),
            queue_s=self.queue_s or 0.0,
        )

    def advance(self, step: Step) -> RequestOutput:
        """Return the news of a branch after a step; with its reason, where it has ended.

        Raises what its constraint or the tokenizer raises.
        """
        branch = self.branches[step.sequence.index]
        if step.token is None:
            reason: FinishReason | None = None
            if self.request.sampling.max_tokens == 0 and not step.sequence.num_behind:
                reason = "length"
            return self._news(branch, reason=reason, prompt_logprobs=step.prompt_logprobs)
        text, reason = self._read(branch, step.token)
        news = self._news(
            branch,
            text=text,
            tokens=(step.token,),
            reason=reason,
            logprobs=() if step.logprobs is None else (step.logprobs,),
            prompt_logprobs=step.prompt_logprobs,
        )
        cost = news.usage
        branch.costs = cost.prompt_tokens, cost.cached_tokens, cost.computed_tokens, cost.queue_s
        return news

    def last_news(
        self, branch: Branch, reason: FinishReason, *, error: str | None = None
    ) -> RequestOutput:
        """Return the news that end a branch from outside: what was held back, and why."""
        return self._news(branch, text=_rest(branch)[0], reason=reason, error=error)

    def _read(self, branch: Branch, token: int) -> tuple[str, FinishReason | None]:
        """Return the text that a token adds, and why it is the last one, if it is."""
        sequence = branch.sequence
        is_eos, ends = token in self._eos_ids, token in self.ends
        text, found = "", False
        if not ends:
            text, found = branch.stops.push(branch.detokenizer.push([token]))
        if sequence.constraint is not None and not (is_eos or found):
            sequence.constraint.accept(token)
            ends = ends or sequence.constraint.is_done
            sequence.allowed = b"" if ends else sequence.constraint.allowed()
        reason: FinishReason | None = None
        if ends or found:
            reason = "stop"
        elif len(sequence.output) >= self.most_tokens(sequence):
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
        return RequestOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=tokens,
            usage=self.usage(branch.sequence),
            finish_reason=reason,
            error=error,
            index=branch.sequence.index,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _rest(branch: Branch) -> tuple[str, bool]:
    """Return the text held back until now, up to a stop, and whether there was one."""
    rest, found = branch.stops.push(branch.detokenizer.flush())
    return (rest, True) if found else (rest + branch.stops.flush(), False)
