"""Ids to text while they arrive, and stop strings, both against doing it at once."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.tokenizer.detokenizer import Detokenizer, StopStrings
from runtime.tokenizer.load import Tokenizer
from runtime.weights.gguf import GgufCheckpoint
from tests.support.smollm2 import open_smollm2
from tests.support.tiny_checkpoints import TINY, write_tiny_gguf

SAMPLES = json.loads((Path(__file__).parent / "samples" / "tokenizer.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return GgufCheckpoint(write_tiny_gguf(tmp_path_factory.mktemp("t") / "t.gguf")).tokenizer()


class SpacedTokenizer(Tokenizer):
    """A byte-level vocabulary of 256 whose texts begin with a space that does not belong."""

    def __init__(self) -> None:
        super().__init__(
            first=None,  # type: ignore[arg-type]  # nothing is encoded with it
            later=None,  # type: ignore[arg-type]
            token_bytes=[bytes([b]) for b in range(256)],
            special_tokens={},
            bos_id=None,
            eos_id=None,
            eos_ids=frozenset(),
            add_bos=False,
            drops_first_space=True,
        )


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], *, skip_special: bool) -> list[str]:
    """Push ids piece by piece; return what each push and the flush gave."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def cut_at(ids: list[int], cuts: set[int]) -> list[list[int]]:
    bounds = [0, *sorted(cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


@st.composite
def pieces(draw: st.DrawFn, *, vocab_size: int) -> list[list[int]]:
    """Draw ids, cut into pieces."""
    ids = draw(st.lists(st.integers(0, vocab_size - 1), max_size=30))
    return cut_at(ids, draw(st.sets(st.integers(0, len(ids)))))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_a_stream_of_any_ids_equals_decoding_them_at_once(
    tiny: Tokenizer, data: st.DataObject, skip_special: bool
) -> None:
    drawn = data.draw(pieces(vocab_size=TINY.vocab_size))
    ids = [i for piece in drawn for i in piece]
    whole = tiny.decode(ids, skip_special=skip_special)
    assert "".join(streamed(tiny, drawn, skip_special=skip_special)) == whole


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20), st.sets(st.integers(0, 40)))
def test_a_stream_never_shows_half_a_character(tiny: Tokenizer, text: str, cuts: set[int]) -> None:
    ids = tiny.encode(text)
    shown = streamed(tiny, cut_at(ids, {c for c in cuts if c <= len(ids)}), skip_special=True)
    assert "".join(shown) == text
    assert sum(part.count("\ufffd") for part in shown) == text.count("\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=" aé😀", max_size=8), st.sets(st.integers(0, 40)))
def test_the_space_that_encoding_puts_in_front_is_dropped_once(text: str, cuts: set[int]) -> None:
    tokenizer = SpacedTokenizer()
    ids = list(text.encode())
    shown = streamed(tokenizer, cut_at(ids, {c for c in cuts if c <= len(ids)}), skip_special=True)
    assert "".join(shown) == tokenizer.decode(ids) == text.removeprefix(" ")


def test_every_sample_streams_id_by_id() -> None:
    tokenizer = open_smollm2().tokenizer()
    for sample in SAMPLES["samples"]:
        shown = streamed(tokenizer, [[i] for i in sample["ids"]], skip_special=True)
        assert "".join(shown) == sample.get("decoded", sample["text"])


def test_a_character_appears_with_its_last_byte(tiny: Tokenizer) -> None:
    ids = tiny.encode("😀")
    assert len(ids) == 4
    assert streamed(tiny, [[i] for i in ids], skip_special=True) == ["", "", "", "😀", ""]
    assert streamed(tiny, [[i] for i in ids[:3]], skip_special=True) == ["", "", "", "\ufffd"]


def test_a_wrong_id_adds_nothing(tiny: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny)
    with pytest.raises(InvalidRequest):
        detokenizer.push([*tiny.encode("a"), 10**6])
    assert detokenizer.push(tiny.encode("b")) == "b"


class CountingTokenizer(SpacedTokenizer):
    """Counts the ids that are looked up."""

    looked_up = 0

    def bytes_of(self, ids: list[int], *, skip_special: bool = True) -> bytes:  # type: ignore[override]
        self.looked_up += len(ids)
        return super().bytes_of(ids, skip_special=skip_special)


def test_each_id_is_looked_at_once() -> None:
    tokenizer = CountingTokenizer()
    streamed(tokenizer, [[0xE2]] * 500, skip_special=True)
    assert tokenizer.looked_up == 500


# --- stop strings --------------------------------------------------------------------------------


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Return what comes before the first stop string that completes, by trying every end."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=600, deadline=None)
@given(LETTERS, STOPS, st.sets(st.integers(0, 24)))
def test_stop_strings_are_found_however_the_text_is_cut(
    text: str, stops: tuple[str, ...], cuts: set[int]
) -> None:
    bounds = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    finder = StopStrings(stops)
    shown = ""
    seen = ""
    wanted = first_stop(text, stops)
    for start, end in pairwise(bounds):
        seen += text[start:end]
        part, stopped = finder.push(text[start:end])
        shown += part
        before = first_stop(seen, stops)
        assert stopped == (before is not None)
        if before is None:
            # What is held back is the longest end that a stop string begins with, no more.
            held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
            assert shown == seen[: len(seen) - held]
        else:
            assert shown == before
    shown += finder.flush()
    assert shown == (text if wanted is None else wanted)
    assert (finder.matched in stops) == (wanted is not None)


def test_nothing_is_held_back_without_stop_strings() -> None:
    finder = StopStrings(())
    assert finder.push("anything") == ("anything", False)
    assert finder.flush() == ""


def test_after_a_stop_nothing_more_is_shown() -> None:
    finder = StopStrings(("stop",))
    assert finder.push("go stop now") == ("go ", True)
    assert finder.push("more") == ("", True)
    assert finder.flush() == ""
    assert finder.matched == "stop"


def test_the_string_that_completes_first_counts() -> None:
    assert StopStrings(("abcdef", "cd")).push("xabcdef") == ("xab", True)
    assert StopStrings(("cd", "abcd")).push("xabcdef") == ("x", True)


def test_an_empty_stop_string_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="empty") as caught:
        StopStrings(("a", ""))
    assert caught.value.param == "stop"


def test_a_stop_string_that_nearly_matches_all_the_time_is_no_trap() -> None:
    finder = StopStrings(("a" * 2000 + "b",))
    shown = "".join(finder.push("a" * 50)[0] for _ in range(400))
    assert shown == "a" * (20_000 - 2000)
    assert finder.push("b") == ("", True)
