"""What was done to a text between two requests, seen at the place where the two differ.

Owns: telling a rewriting from another text.  Does not know: requests, tokens' meaning, caches.
Idea: a text was rewritten if both sides go on alike once what the rewriting changes is taken out of
both; that they differ at one place says nothing by itself.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import AnyStr

LEAST_ALIKE = 8
"""Characters in which two texts must go on alike, so that it is no chance."""

_THOUGHT = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>\s*|\Z)", re.DOTALL)
_OPENS_THOUGHT = re.compile(r"\s*<(?:think|thinking|reasoning)>")


class Rewriting(enum.StrEnum):
    """How one text became another that says the same.

    RETOKENISED  the texts are equal where the ids differ
    THINKING     what was thought was left out of one
    WHITESPACE   only white space differs
    TOOL_ORDER   the same tools stand in another order
    """

    RETOKENISED = enum.auto()
    THINKING = enum.auto()
    WHITESPACE = enum.auto()
    TOOL_ORDER = enum.auto()


def is_retokenised(ours: Sequence[bytes], theirs: Sequence[bytes]) -> bool:
    """Return True where two runs of tokens spell the same text up to a common border.

    ours, theirs  the bytes of each token, from the first that differs

    >>> is_retokenised([b"Hello", b"!"], [b"Hel", b"lo", b"?"])
    True
    >>> is_retokenised([b"ab", b"c"], [b"a", b"bd"])  # the texts differ, and so do the tokens
    False
    """
    same = shared_len(b"".join(ours), b"".join(theirs))
    borders = set(accumulate(map(len, ours))) & set(accumulate(map(len, theirs)))
    return any(0 < border <= same for border in borders)


def rewriting_of(ours: str, theirs: str, *, tool_names: Sequence[str] = ()) -> Rewriting | None:
    """Tell how one text became the other; None where they say different things.

    ours, theirs  two prompts, or stretches of them that begin alike; either may be cut short
    tool_names    of the tools that one of them offers
    """
    if _goes_on_alike(ours, theirs, without_thoughts):
        return Rewriting.THINKING
    if _goes_on_alike(ours, theirs, _without_space):
        return Rewriting.WHITESPACE
    orders = [_order(text, tool_names) for text in (ours, theirs)]
    if len(orders[0]) > 1 and orders[0] != orders[1] and set(orders[0]) == set(orders[1]):
        return Rewriting.TOOL_ORDER
    same = shared_len(ours, theirs)
    thoughts = [bool(_OPENS_THOUGHT.match(text[same:])) for text in (ours, theirs)]
    if thoughts[0] != thoughts[1]:  # too long a thought to see its end
        return Rewriting.THINKING
    return None


def shared_len(ours: AnyStr, theirs: AnyStr) -> int:
    """Return how many characters, or bytes, two texts begin with alike.

    >>> shared_len("prefix", "preface")
    4
    """
    low, high = 0, min(len(ours), len(theirs))
    while low < high:  # halved, as comparing goes at memory speed and a loop over letters does not
        middle = (low + high + 1) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def without_thoughts(text: str) -> str:
    """Return a text without what stands between marks of thinking, and the white space behind."""
    return _THOUGHT.sub("", text)


def _without_space(text: str) -> str:
    return "".join(text.split())


def _goes_on_alike(ours: str, theirs: str, reduced: Callable[[str], str]) -> bool:
    """True where the texts agree for longer once both are reduced."""
    same = shared_len(ours, theirs)
    short, long = sorted((reduced(ours), reduced(theirs)), key=len)
    if (short, long) == tuple(sorted((ours, theirs), key=len)):
        return False  # there was nothing to take out
    alike = shared_len(short, long)
    gained = alike - len(reduced(ours[:same]))
    is_whole = alike == len(short) and gained > 0 and len(short) == len(long)
    return gained >= LEAST_ALIKE or is_whole


def _order(text: str, names: Sequence[str]) -> list[str]:
    """The names in the order in which the text's signatures have them."""
    found = {name: re.search(rf'"name":\s*"{re.escape(name)}"', text) for name in names}
    places = [(match.start(), name) for name, match in found.items() if match]
    return [name for _, name in sorted(places)]
