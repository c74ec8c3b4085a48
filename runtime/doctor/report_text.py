"""A diagnosis as text for a terminal, and the words that the page shares with it.

Owns: sentences and numbers as people read them.  Does not know: how a diagnosis was made, HTML.
"""

from __future__ import annotations

import textwrap

from runtime.doctor.diagnosis import Diagnosis, Example, ReasonFound
from runtime.misses.records import count

WIDTH = 96
MOST_SHOWN = 160
"""Characters shown of a text that differs."""


def text_report(diagnosis: Diagnosis, title: str) -> str:
    """Return a diagnosis as lines of text.

    title  what the log is called
    """
    lines = [
        *_wrapped(f"{shown(title)}: {summary(diagnosis)}", ""),
        *_wrapped(prospect(diagnosis), ""),
    ]
    for number, one in enumerate(diagnosis.reasons, 1):
        lines += ["", f"{number}. {one.title}", *_wrapped(losses(one), "   ")]
        if one.example is not None:
            lines += [f"   {place(one.example)}:", *_wrapped(marked(one.example), "     | ")]
        lines += [*_wrapped(one.advice, "   "), *_wrapped(savings(one, diagnosis), "   ")]
    return "\n".join(lines)


def summary(diagnosis: Diagnosis) -> str:
    """Say what a log holds and how much of it is found."""
    pool = (
        "a pool that never evicts"
        if diagnosis.num_blocks is None
        else f"a pool of {diagnosis.num_blocks:,} blocks"
    )
    return (
        f"{count(diagnosis.num_requests, 'request')}, "
        f"{count(diagnosis.prompt_tokens, 'prompt token')}, {percent(diagnosis.hit_rate)} found in "
        f"the cache (blocks of {diagnosis.block_size}, {pool})."
    )


def prospect(diagnosis: Diagnosis) -> str:
    """Say what the mends come to together."""
    if not diagnosis.reasons:
        return "Nothing is amiss: what an earlier request had in common is found."
    found = count(len(diagnosis.reasons), "reason")
    rate = f"{diagnosis.tokens_per_s:,.0f} tokens a second"
    assumed = f"assuming {rate} (--tokens-per-s)" if diagnosis.rate_is_assumed else f"at {rate}"
    return (
        f"{found} why it is not more; with all of it mended it would be "
        f"{percent(diagnosis.mended_hit_rate)}. Times are {assumed}."
    )


def losses(one: ReasonFound) -> str:
    """Say whom a reason concerns and what it cost."""
    return (
        f"{count(one.num_requests, 'request')} computed {count(one.lost_tokens, 'token')} that an "
        f"earlier one had computed: {seconds(one.lost_s)}."
    )


def savings(one: ReasonFound, diagnosis: Diagnosis) -> str:
    """Say what a mend saves, as the replay of the mended log has it."""
    how = "this" if len(diagnosis.reasons) == 1 else "this too, once the others are,"
    return (
        f"Replayed with {how} mended, the log computes {count(one.saved_tokens, 'token')} less: "
        f"{one.saved_tokens_per_request:,.0f} tokens a request, "
        f"{seconds(one.saved_tokens / diagnosis.tokens_per_s)} in all."
    )


def place(example: Example) -> str:
    """Say where an example stands."""
    return f"line {example.line} beside line {example.earlier_line}, in {example.place}"


def marked(example: Example) -> str:
    """Return an example in one line, `[-what was-]` and `{+what is+}` marked.

    >>> from runtime.doctor.diagnosis import Example
    >>> marked(Example(line=2, earlier_line=1, place="x", before="at ", theirs="9", ours="10",
    ...                after="!"))
    '…at [-9-]{+10+}!…'
    """
    gone = f"[-{shown(example.theirs)}-]" if example.theirs else ""
    new = f"{{+{shown(example.ours)}+}}" if example.ours else ""
    return f"…{shown(example.before)}{gone}{new}{shown(example.after)}…"


def shown(text: str) -> str:
    """Return a text as it can stand in a line: cut short, line ends and the like shown."""
    if len(text) > MOST_SHOWN:
        text = f"{text[:MOST_SHOWN]}…"
    return "".join("⏎" if c == "\n" else c if c.isprintable() else "·" for c in text)


def percent(share: float) -> str:
    """Return a share as a percentage.

    >>> percent(0.6214)
    '62.1 %'
    """
    return f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """Return a time with a unit that fits.

    >>> seconds(0.0421), seconds(3.14), seconds(7200)
    ('42 ms', '3.1 s', '120 min')
    """
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 600 else f"{value / 60:.0f} min"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
