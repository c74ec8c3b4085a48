"""Moving what changes below what does not, throughout a log.

Owns: which sentences of a place change, and where they go.  Does not know: tokens, caches, what
else is mended.
Idea: a sentence that not nearly every request of a kind has at that place is one that changes.  It
goes to the end of the last message, where nothing stands behind it that could be shared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from msgspec import structs

from runtime.doctor.linking import Link
from runtime.doctor.log import LoggedRequest, Said
from runtime.doctor.pieces import pieces_of
from runtime.doctor.reasons import Reason
from runtime.doctor.text_changes import hunks, kind_of

NEARLY_ALL = 0.9
"""Share of the requests that have a sentence where it counts as one that stays."""


class Mover:
    """Moves the sentences that change for one reason."""

    def __init__(self, log: Sequence[LoggedRequest], links: Sequence[Link], reason: Reason) -> None:
        self._reason = reason
        self._places: dict[int, set[int]] = defaultdict(set)  # by group: which messages change
        self._groups: list[int] = []
        counts: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        sizes: Counter[tuple[int, int]] = Counter()
        for index, (request, link) in enumerate(zip(log, links, strict=True)):
            group = index if link.earlier is None else self._groups[link.earlier]
            self._groups.append(group)
            for change in link.changes:
                if change.reason is reason and change.message is not None:
                    self._places[group].add(change.message)
            for at, said in enumerate(request.said):
                counts[group, at].update({piece.strip() for piece in pieces_of(said.text)})
                sizes[group, at] += 1
        self._stays = {
            place: {piece for piece, n in pieces.items() if n >= NEARLY_ALL * sizes[place]}
            for place, pieces in counts.items()
        }
        self._examples = self._examples_of(log)

    def moved(
        self,
        request: LoggedRequest,
        original: LoggedRequest,
        index: int,
        *,
        kept: Collection[int] = (),
    ) -> LoggedRequest:
        """Return a request whose changing sentences stand at its end.

        original  the request before anything was mended
        index     its place in the log
        kept      messages that stand as an earlier request has them, mended
        """
        group, said = self._groups[index], list(request.said)
        taken: list[str] = []
        for at in sorted(self._places[group]):
            if at < len(said) and at not in kept:
                stays, goes = self._cut(group, at, said[at].text)
                if goes:
                    said[at] = Said(said[at].role, stays)
                    taken += goes
        if not taken:
            return request
        last = original.said[-1] if len(said) - 1 in kept else said[-1]
        said[-1] = Said(last.role, "\n".join([last.text, *(piece.strip() for piece in taken)]))
        return structs.replace(request, said=tuple(said))

    def _cut(self, group: int, at: int, text: str) -> tuple[str, list[str]]:
        """Cut a text into what stays, and the sentences that go."""
        stays: list[str] = []
        goes: list[str] = []
        for piece in pieces_of(text):
            goes_down = piece.strip() not in self._stays[group, at] and self._is_of_kind(
                group, at, piece
            )
            (goes if goes_down and piece.strip() else stays).append(piece)
        return "".join(stays), goes

    def _is_of_kind(self, group: int, at: int, piece: str) -> bool:
        """True for a sentence that changes for this reason, beside one like it."""
        if self._reason is Reason.CONTEXT_ABOVE:
            return True
        for other, before in self._examples.get((group, at), ()):
            if other == piece.strip() or not _are_related(other, piece.strip()):
                continue
            first = hunks(other, piece.strip())[0]
            theirs, ours = other[slice(*first.theirs)], piece.strip()[slice(*first.ours)]
            label = f"{before}{piece.strip()[: first.ours[0]]}"
            if kind_of(theirs, ours, label) is self._reason:
                return True
        return False

    def _examples_of(
        self, log: Sequence[LoggedRequest]
    ) -> dict[tuple[int, int], list[tuple[str, str]]]:
        """Some sentences of each place that change, each with the text before it."""
        found: dict[tuple[int, int], list[tuple[str, str]]] = defaultdict(list)
        for index, request in enumerate(log):
            group = self._groups[index]
            for at in self._places[group]:
                if at >= len(request.said) or len(found[group, at]) > MOST_EXAMPLES:
                    continue
                before = ""
                for piece in pieces_of(request.said[at].text):
                    if piece.strip() and piece.strip() not in self._stays[group, at]:
                        found[group, at].append((piece.strip(), before[-200:]))
                    before += piece
        return found


def _are_related(one: str, other: str) -> bool:
    """True for two sentences that may be one with another value: a word in common, or no two."""
    words = [set(text.split()) for text in (one, other)]
    return bool(words[0] & words[1]) or min(map(len, words)) == 1


MOST_EXAMPLES = 12
"""Sentences of a place that others are compared with."""
