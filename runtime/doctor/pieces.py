"""Texts as pieces: what one could move without tearing a sentence apart.

Owns: where a text is cut, and how to find which earlier request a request is most like.  Does not
know: tokens, why requests differ.
Idea: two requests are alike in the pieces that both have, wherever those stand; a prefix tells only
of what stands before the first difference.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise, takewhile

from runtime.doctor.log import LoggedRequest, Said

NUM_LATEST = 6
"""Requests remembered for each piece, the latest."""

LEAST_PIECE = 4
"""Characters that a piece must have to say something."""

_SENTENCE = re.compile(r"(?<=[.!?;])[ \t]+|(?<=\n)")


def pieces_of(text: str) -> list[str]:
    r"""Cut a text into lines and sentences; together they are the text again.

    >>> pieces_of("One. Two at 10:30.\nThree")
    ['One. ', 'Two at 10:30.\n', 'Three']
    """
    cuts = [match.end() for match in _SENTENCE.finditer(text)]
    edges = [0, *(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(edges) if a < b]


def blocks_of(text: str) -> list[str]:
    """Cut a text at its empty lines; what separates blocks is left out."""
    return [block for block in re.split(r"\n\s*\n", text.strip()) if block.strip()]


def reordered(text: str, model: str) -> str:
    r"""Return a text whose parts that another has too stand in that one's order.

    Parts are what empty lines separate; where those are in order, lines.

    >>> reordered("two\n\none\n\nlast", "one\n\ntwo\n\nother")
    'one\n\ntwo\n\nlast'
    """
    for separator in (r"\n\s*\n", r"\n"):
        parts = re.split(f"({separator})", text)  # the odd ones separate
        rank = {part.strip(): at for at, part in enumerate(re.split(separator, model))}
        places = [at for at in range(0, len(parts), 2) if parts[at].strip() in rank]
        found = [parts[at].strip() for at in places]
        if len(set(found)) < len(found):  # parts that repeat, such as "A:", have no one place
            places = [at for at, part in zip(places, found, strict=True) if found.count(part) == 1]
            found = [parts[at].strip() for at in places]
        ordered = sorted(found, key=lambda part: rank[part])
        if ordered != found:
            for at, part in zip(places, ordered, strict=True):
                parts[at] = part
            return "".join(parts)
    return text


def num_shared(text: str, model: str) -> int:
    """Return how many characters of a text stand in parts that another text has too."""
    others = set(blocks_of(model))
    return sum(len(block) for block in blocks_of(text) if block in others)


class Neighbours:
    """Finds for each request of a log the earlier one that it is most like."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=NUM_LATEST))
        self._bags: list[Counter[str]] = []
        self._said: list[Sequence[Said]] = []

    def add(self, request: LoggedRequest) -> int | None:
        """Take the next request of the log.

        returns  the index of the earlier request that shares most with it; of several the one with
                 which it begins alike for longest, then the latest; None where none shares anything
        """
        bag = _bag(request)
        candidates = {index for piece in bag for index in self._latest.get(piece, ())}
        shared = {index: _shared(bag, self._bags[index]) for index in candidates}
        best = max(
            shared,
            key=lambda index: (shared[index], _num_alike(self._said[index], request.said), index),
            default=None,
        )
        number = len(self._bags)
        self._bags.append(bag)
        self._said.append(request.said)
        for piece in bag:
            self._latest[piece].append(number)
        return best


def _bag(request: LoggedRequest) -> Counter[str]:
    texts: Sequence[str] = [tool.text for tool in request.tools]
    bag: Counter[str] = Counter(texts)
    for said in request.said:
        bag.update(piece.strip() for piece in pieces_of(said.text))
    return Counter({piece: n for piece, n in bag.items() if len(piece) >= LEAST_PIECE})


def _num_alike(theirs: Sequence[Said], ours: Sequence[Said]) -> int:
    pairs = zip(theirs, ours, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _shared(bag: Counter[str], other: Counter[str]) -> int:
    small, large = sorted((bag, other), key=len)
    return sum(min(n, large[piece]) * len(piece) for piece, n in small.items() if piece in large)
