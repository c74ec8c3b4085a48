"""Ids to text while they arrive, and where to stop.

Owns: bytes of a character that is not whole yet; text that may turn out to begin a stop string.
Does not know: requests, sampling, how a client is answered.
Idea: both hold back exactly what a later piece could still change, so the pieces put together
equal the text of the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from runtime.errors import InvalidRequest
from runtime.tokenizer.load import Tokenizer


class Detokenizer:
    """Decodes one sequence of ids piece by piece; cost is in the new ids only.

    plain_texts  texts of ids that may be left out of the pushes, as they stand for whole
                 characters; none while something is held back, or will be dropped

    All pushes and the flush, put together, equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.drops_first_space
        # Those of the tokenizer are without control tokens.
        self._texts: dict[int, str] = tokenizer.texts if skip_special else {}
        self.plain_texts = {} if self._drops_space else self._texts

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is certain now, without a character that is incomplete.

        Errors: InvalidRequest for an id that is not in the vocabulary; nothing is added then.
        """
        new = self._tokenizer.bytes_of(ids, skip_special=self._skip_special)
        text = self._without_first_space(self._decoder.decode(new))
        holds_back = self._drops_space or bool(self._decoder.getstate()[0])
        self.plain_texts = {} if holds_back else self._texts
        return text

    def push_one(self, token_id: int) -> str:
        """Add one id, as `push` does; a look-up where it stands for whole characters."""
        text = self.plain_texts.get(token_id)
        if text is None:
            was_plain = self.plain_texts is self._texts
            text = self.push([token_id])
            if was_plain and self.plain_texts is self._texts:
                self._texts[token_id] = text
        return text

    def flush(self) -> str:
        """End the sequence; return what was held back, U+FFFD for an incomplete character."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text


class NoText:
    """Stands in for a detokenizer where there is no tokenizer: no id has a text."""

    def __init__(self) -> None:
        self.plain_texts: dict[int, str] = {}

    def push(self, ids: Sequence[int]) -> str:
        """Return nothing."""
        return ""

    def push_one(self, token_id: int) -> str:
        """Return nothing."""
        return ""

    def flush(self) -> str:
        """Return nothing."""
        return ""


class StopStrings:
    """Looks for strings that end a generation, in text that comes in pieces.

    The string that is complete first counts, however the text is cut; of several that end at the
    same character, the one that begins first.
    Source: Knuth, Morris, Pratt 1977, one automaton for each string.

    >>> stops = StopStrings(("END",))
    >>> stops.push("so E"), stops.push("N"), stops.push("D.")
    (('so ', False), ('', False), ('', True))
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise InvalidRequest("a stop string is empty; leave it out", param="stop")
        self.matched: str | None = None
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._progress = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return what may be shown now, and whether a stop string was found.

        What is shown never holds a stop string nor what could become the beginning of one.  Once
        one was found nothing more is shown.
        """
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        held = self._held + text
        for at, character in enumerate(text, start=len(self._held)):
            found = self._advance(character)
            if found is not None:
                self.matched = found
                self._held = ""
                return held[: at + 1 - len(found)], True
        cut = len(held) - max(self._progress)
        self._held = held[cut:]
        return held[:cut], False

    def flush(self) -> str:
        """End the text; return what was held back as a possible beginning of a stop string."""
        held, self._held = self._held, ""
        self._progress = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character; return the longest stop string that it completes, or None."""
        found = None
        for i, stop in enumerate(self._stops):
            matched = self._progress[i]
            while matched and stop[matched] != character:
                matched = self._fallbacks[i][matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = self._fallbacks[i][matched - 1]
            self._progress[i] = matched
        return found


def _fallbacks(stop: str) -> list[int]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[matched] != stop[i]:
            matched = lengths[matched - 1]
        if stop[matched] == stop[i]:
            matched += 1
        lengths[i] = matched
    return lengths
