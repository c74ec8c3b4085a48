"""What keeps a log's prompts from being found, ranked by what each mend would save.

Owns: which misses are worth telling, and the order of looking.  Does not know: how a change is
recognised or mended, how a report is shown.
Idea: a reason is believed only where the log, mended, really computes less when it is replayed.
Once all reasons of one round are mended the rest is looked at again, as one hides another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import msgspec

from radixcache.explain import Cause
from runtime.doctor.changes import Change
from runtime.doctor.linking import Link, links_of
from runtime.doctor.log import LoggedRequest
from runtime.doctor.mending import mended
from runtime.doctor.reasons import REWRITTEN, WORDS, Mend, Reason
from runtime.doctor.rendering import Renderer
from runtime.doctor.replay import Encoded, Encoder, Outcome, replay, shared_beyond

LEAST_LOST = 32
"""Tokens that an earlier request has and that were not found, below which nothing is amiss."""

LEAST_REQUESTS = 2
"""Requests that a reason must concern: what happens once is no habit."""

LEAST_SAVED, LEAST_SHARE = 64, 0.005
"""A mend must save so many tokens, and this share of all prompt tokens."""

MOST_ROUNDS = 4

Progress = Callable[[str], None]


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One request that missed, beside the earlier one: where, and the text that differs.

    line, earlier_line  of the log
    theirs, ours        what differs, as the earlier request and as this one has it
    """

    line: int
    earlier_line: int
    place: str
    before: str
    theirs: str
    ours: str
    after: str


class ReasonFound(msgspec.Struct, frozen=True, kw_only=True):
    """A reason for misses.

    num_requests   that it made miss
    lost_tokens    that an earlier request has, and that these had to compute
    lost_s         seconds that computing them took, at the report's rate
    saved_tokens   that the log computes less with this mended, once all other reasons are
    """

    reason: Reason
    title: str
    advice: str
    num_requests: int
    lost_tokens: int
    lost_s: float
    saved_tokens: int
    saved_tokens_per_request: float
    example: Example | None


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a log.

    hit_rate         of the log as it is: cached tokens over prompt tokens
    mended_hit_rate  with all mends made
    tokens_per_s     prompt tokens computed a second, that times are worked out by
    rate_is_assumed  whether that is no measurement of the log's own
    """

    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    mended_hit_rate: float
    tokens_per_s: float
    rate_is_assumed: bool
    block_size: int
    num_blocks: int | None
    reasons: tuple[ReasonFound, ...]


ASSUMED_RATE = 2_000.0
"""Prompt tokens a second, where neither log nor caller tells."""


class Doctor:
    """Looks at logs.

    renderer      makes token ids of requests
    num_blocks    of the pool; None: it never evicts
    tokens_per_s  prompt tokens computed a second; None: as the log has it
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        tokens_per_s: float | None = None,
        progress: Progress = lambda stage: None,
    ) -> None:
        self._encoder = Encoder(renderer)
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._tokens_per_s = tokens_per_s
        self._progress = progress

    def examine(self, log: Sequence[LoggedRequest]) -> Diagnosis:
        """Replay a log, and say why it misses what it need not miss.

        Raises InvalidSetting for a pool that a request does not fit into.
        """
        self._progress("replaying the log")
        first = self._replayed(log, self._num_blocks)
        total = sum(outcome.num_tokens for outcome in first)
        rate, is_assumed = self._rate(log)
        found: dict[Reason, ReasonFound] = {}
        current, outcomes, num_blocks = list(log), first, self._num_blocks
        # What only a mended log has is the mend's own doing.
        seen = {change.reason for link in links_of(log) for change in link.changes}
        unseen = set(Reason) - seen - {Reason.EVICTED, Reason.OTHER_SALT}
        for _ in range(MOST_ROUNDS):
            told = self._round(current, outcomes, num_blocks, total, rate, found.keys() | unseen)
            if not told:
                break
            for one in told:
                found[one.reason] = one
                current = mended(current, one.reason)
                if WORDS[one.reason].mend is Mend.ROOM:
                    num_blocks = None
            outcomes = self._replayed(current, num_blocks)
        cached = sum(outcome.num_cached for outcome in first)
        tokens = sum(outcome.num_tokens for outcome in outcomes)
        after = sum(outcome.num_cached for outcome in outcomes) / max(1, tokens)
        return Diagnosis(
            num_requests=len(log),
            prompt_tokens=total,
            cached_tokens=cached,
            hit_rate=cached / max(1, total),
            mended_hit_rate=max(after, cached / max(1, total)),
            tokens_per_s=rate,
            rate_is_assumed=is_assumed,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
            reasons=tuple(sorted(found.values(), key=lambda one: -one.saved_tokens)),
        )

    def _round(
        self,
        log: Sequence[LoggedRequest],
        outcomes: Sequence[Outcome],
        num_blocks: int | None,
        total: int,
        rate: float,
        known: Collection[Reason],
    ) -> list[ReasonFound]:
        """Look for reasons in a log as it stands; each is tried by mending all but that one.

        Where two stand at one place, neither mend would save anything without the other.
        """
        lost = _lost(self._encoded(log), outcomes, links_of(log))
        tried = [
            reason
            for reason in Reason
            if len(lost.get(reason, ())) >= LEAST_REQUESTS and reason not in known
        ]
        saved = self._saved(log, tried, _computed(outcomes), num_blocks)
        least = max(LEAST_SAVED, LEAST_SHARE * total)
        while saved and min(saved.values()) < least:  # what saves nothing is no reason
            tried = [reason for reason, tokens in saved.items() if tokens >= least]
            saved = self._saved(log, tried, _computed(outcomes), num_blocks)
        return [_told(reason, lost[reason], saved[reason], rate, log) for reason in tried]

    def _saved(
        self,
        log: Sequence[LoggedRequest],
        reasons: Sequence[Reason],
        computed: int,
        num_blocks: int | None,
    ) -> dict[Reason, int]:
        """Tokens that each mend saves once all others are made.

        computed  tokens that the log computes as it is
        """
        together = self._computed_without(log, reasons, num_blocks)
        saved = {}
        for reason in reasons:
            self._progress(f"trying a mend: {WORDS[reason].title}")
            others = [other for other in reasons if other is not reason]
            alone = self._computed_without(log, others, num_blocks) if others else computed
            saved[reason] = alone - together
        return saved

    def _computed_without(
        self, log: Sequence[LoggedRequest], reasons: Sequence[Reason], num_blocks: int | None
    ) -> int:
        """Tokens computed once some reasons are mended."""
        for reason in reasons:
            log = mended(log, reason)
            if WORDS[reason].mend is Mend.ROOM:
                num_blocks = None
        return _computed(self._replayed(log, num_blocks))

    def _replayed(self, log: Sequence[LoggedRequest], num_blocks: int | None) -> list[Outcome]:
        return replay(self._encoded(log), block_size=self._block_size, num_blocks=num_blocks)

    def _encoded(self, log: Sequence[LoggedRequest]) -> list[Encoded]:
        return [self._encoder.encode(request) for request in log]

    def _rate(self, log: Sequence[LoggedRequest]) -> tuple[float, bool]:
        """Prompt tokens computed a second: as asked for, else the log's, else assumed."""
        if self._tokens_per_s is not None:
            return self._tokens_per_s, False
        timed = [request for request in log if request.ttft_s > 0 and request.computed > 0]
        seconds = sum(request.ttft_s for request in timed)
        if not seconds:
            return ASSUMED_RATE, True
        return sum(request.computed for request in timed) / seconds, False


def _computed(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.num_tokens - outcome.num_cached for outcome in outcomes)


class Case(msgspec.Struct, frozen=True):
    """One request that lost tokens for a reason."""

    index: int
    lost_tokens: int
    earlier: int | None
    change: Change | None


def _lost(
    encoded: Sequence[Encoded], outcomes: Sequence[Outcome], links: Sequence[Link]
) -> dict[Reason, list[Case]]:
    """Tell for each request that lost tokens by which reason it did."""
    found: dict[Reason, list[Case]] = defaultdict(list)
    for index, (outcome, link) in enumerate(zip(outcomes, links, strict=True)):
        if outcome.cause is Cause.EVICTED:
            if outcome.num_evicted >= LEAST_LOST:
                found[Reason.EVICTED].append(Case(index, outcome.num_evicted, None, None))
            continue
        if outcome.cause is Cause.OTHER_NAMESPACE:
            lost = outcome.num_elsewhere - outcome.num_cached
            if lost >= LEAST_LOST:
                found[Reason.OTHER_SALT].append(Case(index, lost, None, None))
            continue
        if link.earlier is None or not link.changes:
            continue
        before, now = encoded[link.earlier], encoded[index]
        known = shared_beyond(before.prompt + before.reply, now.prompt, outcome.num_cached)
        for change in link.changes:
            lost = known
            if change.reason in REWRITTEN:  # the tokens differ all the way, the words don't
                lost = min(before.num_tokens, now.num_tokens) - outcome.num_cached
            if lost >= LEAST_LOST:
                found[change.reason].append(Case(index, lost, link.earlier, change))
    return found


def _told(
    reason: Reason,
    cases: Sequence[Case],
    saved: int,
    rate: float,
    log: Sequence[LoggedRequest],
) -> ReasonFound:
    lost = sum(case.lost_tokens for case in cases)
    worst = max(cases, key=lambda case: case.lost_tokens)
    example = None
    if worst.change is not None and worst.earlier is not None:
        text = worst.change.text
        example = Example(
            line=log[worst.index].line,
            earlier_line=log[worst.earlier].line,
            place=worst.change.place,
            before=text.before,
            theirs=text.theirs,
            ours=text.ours,
            after=text.after,
        )
    return ReasonFound(
        reason=reason,
        title=WORDS[reason].title,
        advice=WORDS[reason].advice,
        num_requests=len(cases),
        lost_tokens=lost,
        lost_s=lost / rate,
        saved_tokens=saved,
        saved_tokens_per_request=saved / len(cases),
        example=example,
    )
