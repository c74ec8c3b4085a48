"""What kind of value it is that changes: a clock, a date, an id, a path.

Owns: recognising values by their form and by the words before them.  Does not know: where they
stand in a prompt, or what follows from it.
Idea: the form decides where it is unmistakable (a UUID is one whatever it is called); the words
before it decide for the rest.
"""

from __future__ import annotations

import re

from runtime.doctor.reasons import Reason

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:mon|tue|wed|thu|fri|sat|sun)"

_FORMS: tuple[tuple[Reason, str], ...] = (
    (Reason.UUID, r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"),
    (Reason.CLOCK, r"\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d+)?\s*(?:am|pm|z|utc)?"),
    (Reason.CLOCK, r"\b1[5-9]\d{8}(?:\d{3}|\d{6}|\.\d+)?\b"),
    (Reason.DATE, r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}\b|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}\b"),
    (Reason.DATE, rf"\b{_MONTH}\b\.?,? \d|\d{{1,2}}(?:st|nd|rd|th)?\.? (?:of )?{_MONTH}\b"),
    (Reason.DIRECTORY, r"(?:^|[\s'\"`=(])(?:~|\.{0,2})?/[\w.@-]+(?:/[\w.@ -]*)*|\b[A-Z]:\\"),
    (Reason.CALLER, r"[\w.+-]+@[\w-]+\.[\w.]+|\b(?:\d{1,3}\.){3}\d{1,3}\b"),
)

_LINKED = r"\W{0,3}(?:\s*\b(?:is|are|was|at|in|on|of|to|for|id|name))?\W{0,4}$"
"""Between the words of a label and the value."""

_GIT = re.compile(r"\bgit\b|\bbranch\b|\bcommits?\b|\bmodified:|\buntracked\b", re.IGNORECASE)
_LABELS: tuple[tuple[Reason, str], ...] = (
    (
        Reason.REQUEST_ID,
        r"\b(?:request|trace|span|session|correlation|conversation|thread|message|run|job|task"
        r"|call)[ _-]?(?:id|number|no)|\bnonce|\btrace|\bid\s*[:=#]",
    ),
    (
        Reason.DIRECTORY,
        r"\b(?:cwd|pwd|director(?:y|ies)|folder|path|workspace|repository|project root)",
    ),
    (Reason.CLOCK, r"\b(?:time|clock|timestamp|now)"),
    (Reason.DATE, r"\b(?:date|today|day)"),
    (
        Reason.CALLER,
        r"\b(?:user(?: ?name)?|customer|client|caller|e-?mail|account|host(?: ?name)?|locale"
        r"|country|city|location|company|helping|assisting|talk(?:ing)? (?:to|with)|name)",
    ),
)

_ID = re.compile(
    r"\b[a-z]{2,12}[_-](?=[\w-]*\d)[0-9a-z-]{6,}\b|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"
    r"|\b(?=\w*\d)(?=\w*[a-zA-Z])\w{12,}\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[#$€~]?[-+]?\d[\d,._]*\s*(?:%|[a-zA-Z°]{0,8})")
_WEEKDAY = re.compile(rf"(?:{_DAY})[.,]?", re.IGNORECASE)


MOST_WORDS = 8
"""Words that a value has at most; more are a text."""


def kind_of_value(value: str, label: str) -> Reason | None:
    """Tell what kind of value a text is that differs from request to request; None for any other.

    value  the words that differ, whole
    label  what stands before them, the line above included

    >>> kind_of_value("2026-03-01T10:30:00Z", "Now: ").value
    'clock'
    >>> kind_of_value("/home/ann/shop", "Working directory: ").value
    'directory'
    """
    if _GIT.search(label[-MOST_LABEL:]):
        return Reason.GIT
    if not value.strip() or len(value.split()) > MOST_WORDS:
        return None
    for reason, form in _FORMS:
        if re.search(form, value, re.IGNORECASE):
            return reason
    words = label.lower()
    if _WEEKDAY.fullmatch(value.strip()):
        return Reason.DATE
    if re.search(f"(?:{_LABELS[0][1]}){_LINKED}", words) or _ID.search(value):
        return Reason.REQUEST_ID
    for reason, pattern in _LABELS[1:]:
        if re.search(f"(?:{pattern}){_LINKED}", words):
            return reason
    return Reason.NUMBER if _NUMBER.fullmatch(value.strip()) else None


MOST_LABEL = 160
"""Characters before a value in which words of a repository say what it is."""
