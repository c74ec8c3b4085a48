"""What is told of a miss, as records.

Owns: the fields and causes, and the sentences in which they are said.  Does not know: how they were
found out, HTTP.
"""

from __future__ import annotations

import enum

import msgspec

MAX_QUOTED = 60
"""Characters of a text that stand in a sentence; the record has more."""


class MissCause(enum.StrEnum):
    """Why tokens of a prompt are missing.

    HIT              none is missing but the last, which is always computed
    SHORT            the rest fills no block, and only full blocks are kept
    EVICTED          it was cached, and was evicted
    EPOCH            it was cached before weights, adapter or template changed
    OTHER_NAMESPACE  it is cached under another adapter or salt
    RETOKENISED      the cache has the same text, of other tokens
    THINKING         the cache goes on with the same text, but for what was thought
    WHITESPACE       the cache goes on with the same text, but for white space
    TOOL_ORDER       the cache has the same tools in another order
    DIVERGED         the cache goes on with another text
    NEVER_SEEN       nothing is known of it
    DISABLED         the prefix cache is off
    """

    HIT = enum.auto()
    SHORT = enum.auto()
    EVICTED = enum.auto()
    EPOCH = enum.auto()
    OTHER_NAMESPACE = enum.auto()
    RETOKENISED = enum.auto()
    THINKING = enum.auto()
    WHITESPACE = enum.auto()
    TOOL_ORDER = enum.auto()
    DIVERGED = enum.auto()
    NEVER_SEEN = enum.auto()
    DISABLED = enum.auto()


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What stands at the divergence in the prompt, or in the cache.

    token  id of the first token
    text   what that token and those behind it say, control tokens shown; a few words
    """

    token: int
    text: str


class MissPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a conversation a token lies in.

    part     "messages[2]", "tools[0]", or "template" for what the template writes
    message  index of the message; of the template's own text that of the message that follows
    role     of that message; null where none follows
    """

    part: str
    message: int | None
    role: str | None


class MissReport(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is cached, where it leaves the cache, and why.

    prompt_tokens     tokens of the prompt
    cached_tokens     those that a request would find now
    computed_tokens   those that it would compute, the last one in any case
    cause             why it finds no more
    first_missing     index of the first token that is missing; null where none is
    place             the part of the conversation that it lies in; null of other prompts
    shared            the end of the text that prompt and cache share
    prompt            how the prompt goes on; null where nothing is missing
    cached            how the cache goes on; null where it ends there
    evicted_tokens    tokens behind it that are remembered to have been evicted
    evicted_s         seconds since the first of them was evicted; null where none was
    differs_in        in which fields the namespace differs that has more; never their values
    elsewhere_tokens  tokens that are cached there
    summary           all this in words
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    cause: MissCause
    first_missing: int | None
    place: MissPlace | None
    shared: str
    prompt: Side | None
    cached: Side | None
    evicted_tokens: int
    evicted_s: float | None
    differs_in: tuple[str, ...]
    elsewhere_tokens: int
    summary: str

    def header(self) -> str:
        """Return the report in one line of ASCII without any text of a prompt, for a header."""
        parts = [f"cause={self.cause}", f"cached={self.cached_tokens}"]
        parts.append(f"computed={self.computed_tokens}")
        if self.place is not None:
            parts.append(f"at={self.place.part}")
        return "; ".join(parts)

    def fields(self) -> dict[str, str | int | float]:
        """Return what a log line shows: numbers and places, no text of a prompt."""
        shown: dict[str, str | int | float | None] = {
            "cause": self.cause,
            "first_missing": self.first_missing,
            "at": None if self.place is None else self.place.part,
            "role": None if self.place is None else self.place.role,
            "evicted_s": None if self.evicted_s is None else round(self.evicted_s, 3),
        }
        return {name: value for name, value in shown.items() if value is not None}


class CacheReport(msgspec.Struct, frozen=True):
    """What an answer tells of the cache, where asked: one report a prompt, in their order."""

    explanations: tuple[MissReport, ...]


def in_words(report: MissReport) -> str:
    """Say a report in two or three sentences: how much, where, why, and what to do."""
    cached = f"{report.cached_tokens} of {count(report.prompt_tokens, 'token')} cached"
    if report.cause is MissCause.HIT:
        return f"{cached}; nothing is missing, as the last token is always computed."
    if report.cause is MissCause.DISABLED:
        return f"{cached}: the prefix cache is off. Start the server without --no-prefix-cache."
    return f"{cached}; {_where(report)}. {_why(report)}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "token"), count(2000, "token")
    ('1 token', '2,000 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _where(report: MissReport) -> str:
    at = f"token {report.first_missing}"
    if report.place is not None:
        at += f", in {_part(report.place)},"
    if report.prompt is None:
        return f"the prompt leaves the cache at {at}"
    ours = f"at {at} the prompt goes on {_quoted(report.prompt.text)}"
    if report.cached is None and not report.cached_tokens:
        return f"{ours}, and nothing that is cached here begins so"
    if report.cached is None:
        return f"{ours}, where the cache ends"
    return f"{ours}, the cache {_quoted(report.cached.text)}"


def _part(place: MissPlace) -> str:
    role = f" ({place.role})" if place.role else ""
    if place.part != "template":
        return f"{place.part}{role}"
    if place.message is None:
        return "what the template writes behind the last message"
    return f"what the template writes before messages[{place.message}]{role}"


def _why(report: MissReport) -> str:
    there = count(report.elsewhere_tokens, "token")
    match report.cause:
        case MissCause.EVICTED:
            ago = "" if report.evicted_s is None else f" {_ago(report.evicted_s)} ago"
            return (
                f"What follows was cached, {count(report.evicted_tokens, 'token')}, and was "
                f"evicted{ago}: a larger pool (--kv-memory) keeps more."
            )
        case MissCause.EPOCH:
            return (
                "It was cached before weights, adapter or template changed, and is out of use: "
                "it is found again once it was computed."
            )
        case MissCause.OTHER_NAMESPACE:
            fields = " and ".join(report.differs_in)
            return (
                f"Under another {fields} {there} of it are cached: send such prompts with the "
                f"same {fields} where they may share."
            )
        case _:
            return _ADVICE[report.cause]


_ADVICE = {
    MissCause.SHORT: (
        "What is left fills no block, and only full blocks are kept: a smaller --block-size keeps "
        "more."
    ),
    MissCause.RETOKENISED: (
        "Both are the same text, cut into other tokens, as where generated text is encoded anew: "
        "send the history as chat messages to this server, which keeps a reply's ids, or send "
        "token ids."
    ),
    MissCause.THINKING: (
        "Both are the same but for what was thought, which one of the two leaves out: keep it in "
        "the history, or never put it there."
    ),
    MissCause.WHITESPACE: (
        "Both are the same but for white space: send the history back as it came."
    ),
    MissCause.TOOL_ORDER: (
        "Both have the same tools in another order: send them in one order always."
    ),
    MissCause.DIVERGED: (
        "Prompts share what stands before their first difference: put what changes behind what "
        "does not."
    ),
    MissCause.NEVER_SEEN: (
        "As far as is remembered nobody has sent this before in this namespace: it is found once "
        "it was computed."
    ),
}


def _quoted(text: str) -> str:
    if len(text) > MAX_QUOTED:
        text = text[: MAX_QUOTED - 1] + "…"
    return f"'{text}'" if text.isprintable() and "'" not in text else repr(text)


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
