"""What was changed from one text to another that is like it.

Owns: comparing two texts of the same place in two prompts.  Does not know: which place that is,
what follows from it.
Idea: the plainest explanation first.  If the texts are equal once thoughts, white space, order or
addresses are left out, that is what changed; else the first words that differ tell.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher

import msgspec
from msgspec import structs

from radixcache.sim.logged import IMAGE_CLOSE, IMAGE_OPEN
from runtime.doctor.pieces import blocks_of, num_shared, reordered
from runtime.doctor.reasons import Reason
from runtime.doctor.values import kind_of_value
from runtime.misses.rewriting import shared_len, without_thoughts

MOST_COMPARED = 500
"""Words in a row that are compared one by one; what follows counts as one stretch."""

WINDOW = 600
"""Characters in which the end of a difference is looked for that is only shown."""

EDIT_WORDS, EDIT_SHARE = 8, 0.2
"""An edit changes at most so many words, and at most this share of them."""

_WORD = re.compile(r"\s+|\S+")
_IMAGE = re.compile(f"{re.escape(IMAGE_OPEN)}(.*?){re.escape(IMAGE_CLOSE)}")


class TextChange(msgspec.Struct, frozen=True, kw_only=True):
    """The first difference of two texts, and what kind of difference it is.

    reason  what changed; None for words that are no value of a known kind and more than an edit
    before  the text that both share before it, a few words
    theirs  what the earlier text has there
    ours    what the later one has
    after   what follows in the later one
    """

    reason: Reason | None
    before: str
    theirs: str
    ours: str
    after: str


class Hunk(msgspec.Struct, frozen=True):
    """A stretch that differs: where it lies in each text."""

    theirs: tuple[int, int]
    ours: tuple[int, int]


def changes_of(theirs: str, ours: str) -> list[TextChange]:
    """Say what changed from the earlier text to the later one, a change for each reason.

    Of what is no value of a known kind and more than an edit the reason is None.
    """
    if theirs == ours:
        return []
    whole = _rewritten(theirs, ours)
    if whole is not None:
        return [structs.replace(difference(theirs, ours), reason=whole)]
    found, size = [], None
    for reason, alike in _REWRITINGS.items():
        left, right = alike(theirs, ours)
        if (left, right) == (theirs, ours):
            continue
        size = _size(theirs, ours) if size is None else size
        smaller = _size(left, right)
        if 2 * smaller <= size:
            found.append(structs.replace(difference(theirs, ours), reason=reason))
            theirs, ours, size = left, right, smaller
    unnamed: list[Hunk] = []
    named: dict[Reason, Hunk] = {}
    for hunk in hunks(theirs, ours) if theirs != ours else ():
        label = ours[: hunk.ours[0]]
        kind = kind_of(theirs[slice(*hunk.theirs)], ours[slice(*hunk.ours)], label)
        if kind is None:
            unnamed.append(hunk)
        else:
            named.setdefault(kind, hunk)
    edit = _edited(theirs, ours, unnamed)
    if unnamed and edit is None:
        named.pop(Reason.NUMBER, None)  # where much differs, some of it is numbers
    found += [_shown(theirs, ours, hunk, kind) for kind, hunk in named.items()]
    return [*found, _shown(theirs, ours, unnamed[0], edit)] if unnamed else found


def as_before(ours: str, before: str, reason: Reason) -> str:
    """Return a text in which what changed for one reason is as an earlier text has it.

    before  the earlier text, mended
    """
    if reason is Reason.EXAMPLES_SHUFFLED:
        return reordered(ours, before)
    if reason is Reason.JSON_KEYS:
        return sorted_json(ours)
    if _rewritten(before, ours) is reason or reason is Reason.HISTORY_EDITED:
        return before
    if reason is Reason.IMAGE_ADDRESS:
        return _with_addresses(before, ours)[1]
    if reason is Reason.PROMPT_EDITED:
        for hunk in reversed(hunks(before, ours) if before != ours else []):
            theirs, new = before[slice(*hunk.theirs)], ours[slice(*hunk.ours)]
            if kind_of(theirs, new, ours[: hunk.ours[0]]) is None:
                ours = f"{ours[: hunk.ours[0]]}{theirs}{ours[hunk.ours[1] :]}"
    return ours


def _shown(theirs: str, ours: str, hunk: Hunk, reason: Reason | None) -> TextChange:
    return TextChange(
        reason=reason,
        before=ours[: hunk.ours[0]][-80:],
        theirs=theirs[slice(*hunk.theirs)],
        ours=ours[slice(*hunk.ours)],
        after=ours[hunk.ours[1] :][:80],
    )


def _size(theirs: str, ours: str) -> int:
    """Characters that differ."""
    if theirs == ours:
        return 0
    found = hunks(theirs, ours)
    return sum(h.theirs[1] - h.theirs[0] + h.ours[1] - h.ours[0] for h in found)


def _with_addresses(theirs: str, ours: str) -> tuple[str, str]:
    """Return two texts of which the later has the earlier one's addresses of the same images."""
    known = {_bare(address): address for address in _IMAGE.findall(theirs)}

    def as_known(match: re.Match[str]) -> str:
        """Write an image with the address that it had earlier."""
        return f"{IMAGE_OPEN}{known.get(_bare(match[1]), match[1])}{IMAGE_CLOSE}"

    return theirs, _IMAGE.sub(as_known, ours)


def difference(theirs: str, ours: str) -> TextChange:
    """Show where two texts begin to differ, without saying what kind of difference it is."""
    start = shared_len(theirs, ours)
    while start and not ours[start - 1].isspace():  # back to the word's beginning
        start -= 1
    ends = [text[start : start + WINDOW] for text in (theirs, ours)]
    first = hunks(*ends)[0]
    end = start + first.ours[1]
    return TextChange(
        reason=None,
        before=ours[: start + first.ours[0]][-80:],
        theirs=ends[0][slice(*first.theirs)],
        ours=ends[1][slice(*first.ours)],
        after=ours[end : end + 80],
    )


def kind_of(theirs: str, ours: str, before: str) -> Reason | None:
    """Tell what kind of value two differing stretches are, from what stands before them."""
    *above, line = before.rsplit("\n", 3)
    label = line if line.strip() else "\n".join([*above[-1:], line])
    kinds = (kind_of_value(text.strip(), label) for text in (ours, theirs))
    kind = next((kind for kind in kinds if kind is not None), None)
    # Within a listing of a repository's state the lines above say what it is.
    return kind or kind_of_value("", "\n".join([*above[1:], line]))


def likeness(theirs: str, ours: str) -> float:
    """Return how much of the longer text both have, by runs of three words: from 0 to 1.

    Single words say little: a third of any two texts of one language are the same ones.

    >>> likeness("a b c d e f", "x a b c d e"), likeness("a b c", "c b a")
    (0.75, 0.0)
    """
    left, right = (Counter(_runs(text.split())) for text in (theirs, ours))
    most = max(left.total(), right.total())
    return (left & right).total() / most if most else 1.0


def _runs(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[at : at + 3]) for at in range(max(1, len(words) - 2))] if words else []


def hunks(theirs: str, ours: str) -> list[Hunk]:
    """Return the stretches that differ, in whole words; those with only a space between are one.

    Lines are compared first, and words where lines differ, so that long texts take no long.
    """
    found: list[Hunk] = []
    at = (0, 0)
    for is_equal, a, b in _stretches(theirs, ours):
        ends = (at[0] + len(a), at[1] + len(b))
        if not is_equal:
            hunk = Hunk((at[0], ends[0]), (at[1], ends[1]))
            gap = ours[found[-1].ours[1] : at[1]] if found else "\n"
            if gap.strip() or "\n" in gap:
                found.append(hunk)
            else:
                found[-1] = Hunk((found[-1].theirs[0], ends[0]), (found[-1].ours[0], ends[1]))
        at = ends
    return found or [Hunk((len(theirs), len(theirs)), (len(ours), len(ours)))]


def _stretches(theirs: str, ours: str) -> Iterator[tuple[bool, str, str]]:
    """Yield runs of both texts in turn, and whether they are equal."""
    lines = theirs.splitlines(keepends=True), ours.splitlines(keepends=True)
    for is_equal, a, b in _runs_of(*lines):
        if is_equal:
            yield True, "".join(a), "".join(b)
            continue
        left, right = _WORD.findall("".join(a)), _WORD.findall("".join(b))
        head = left[:MOST_COMPARED], right[:MOST_COMPARED]
        for is_same, c, d in _runs_of(*head):
            yield is_same, "".join(c), "".join(d)
        if len(left) > MOST_COMPARED or len(right) > MOST_COMPARED:
            yield False, "".join(left[MOST_COMPARED:]), "".join(right[MOST_COMPARED:])


def _runs_of(left: list[str], right: list[str]) -> Iterator[tuple[bool, list[str], list[str]]]:
    head = _num_alike(left, right)
    tail = _num_alike(left[head:][::-1], right[head:][::-1])
    ends = len(left) - tail, len(right) - tail
    if head:
        yield True, left[:head], right[:head]
    matcher = SequenceMatcher(None, left[head : ends[0]], right[head : ends[1]], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        yield tag == "equal", left[head + a : head + b], right[head + c : head + d]
    if tail:
        yield True, left[ends[0] :], right[ends[1] :]


def _num_alike(left: list[str], right: list[str]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _rewritten(theirs: str, ours: str) -> Reason | None:
    """The way in which one text says the same as the other; None where it says something else."""
    if _IMAGE.sub("", theirs) == _IMAGE.sub("", ours):
        left, right = _IMAGE.findall(theirs), _IMAGE.findall(ours)
        if sorted(left) == sorted(right):
            return Reason.IMAGE_MOVED
        if sorted(_bare(a) for a in left) == sorted(_bare(a) for a in right):
            return Reason.IMAGE_ADDRESS
    if "".join(theirs.split()) == "".join(ours.split()):
        return Reason.WHITESPACE
    if without_thoughts(theirs).strip() == without_thoughts(ours).strip():
        return Reason.THINKING_REMOVED
    if sorted_json(theirs) == sorted_json(ours):
        return Reason.JSON_KEYS
    return Reason.EXAMPLES_SHUFFLED if _is_shuffled(theirs, ours) else None


def _is_shuffled(theirs: str, ours: str) -> bool:
    """True where most of a text is the other's in another order."""
    for cut in (blocks_of, str.splitlines):
        left, right = (sorted(p.strip() for p in cut(text)) for text in (theirs, ours))
        if len(left) > 1 and left == right:
            return True
    if 2 * num_shared(ours, theirs) < len(ours):
        return False
    left, right = blocks_of(theirs), blocks_of(ours)
    both = set(left) & set(right)
    return [block for block in left if block in both] != [block for block in right if block in both]


def _edited(theirs: str, ours: str, found: list[Hunk]) -> Reason | None:
    """An edit, if few words changed; None for more."""
    changed = sum(
        max(len(theirs[slice(*hunk.theirs)].split()), len(ours[slice(*hunk.ours)].split()))
        for hunk in found
    )
    most = min(EDIT_WORDS, EDIT_SHARE * len(ours.split()))
    return Reason.PROMPT_EDITED if changed <= most else None


def _bare(address: str) -> str:
    return re.split(r"[?#]", address)[0]


def sorted_json(text: str) -> str:
    """Return a text in which every JSON object has its keys sorted.

    >>> sorted_json('Say {"b": 1, "a": [2]}!')
    'Say {"a": [2], "b": 1}!'
    """
    decoder, parts, at = json.JSONDecoder(), [], 0
    while (start := text.find("{", at)) >= 0:
        parts.append(text[at:start])
        try:
            value, at = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, at = None, start + 1
        parts.append("{" if value is None else json.dumps(value, sort_keys=True))
    return "".join((*parts, text[at:]))


_REWRITINGS: dict[Reason, Callable[[str, str], tuple[str, str]]] = {
    Reason.IMAGE_ADDRESS: _with_addresses,
    Reason.JSON_KEYS: lambda theirs, ours: (sorted_json(theirs), sorted_json(ours)),
    Reason.EXAMPLES_SHUFFLED: lambda theirs, ours: (theirs, reordered(ours, theirs)),
}
"""What makes two texts more alike, where that is what changed beside something else."""
