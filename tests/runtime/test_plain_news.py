"""Outputs of a decode batch: plain tokens in one loop, all others beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.tokenizer.detokenizer import Detokenizer
from tests.support.engine_bench import EngineBench
from tests.support.fake_executor import LetterTokenizer

PARTS = (b"\xc3", b"\xa9", b"a", b" bc")
"""What ids stand for, in turn: half a character, its other half, and whole ones."""


class HalvesTokenizer(LetterTokenizer):
    """Ids that may stand for half a character."""

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """The bytes of these ids."""
        return b"".join(PARTS[token % len(PARTS)] for token in ids)


class BreakingTokenizer(LetterTokenizer):
    """Knows no text of one id."""

    broken: int | None = None

    def bytes_of(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        """The characters of these ids; raises for the broken one."""
        if self.broken in ids:
            raise LookupError(f"no text for {self.broken}")
        return super().bytes_of(ids, skip_special=skip_special)


@given(ids=st.lists(st.integers(0, 7), max_size=30))
@settings(max_examples=200, deadline=None)
def test_plain_texts_stand_for_pushes(ids: list[int]) -> None:
    tokenizer: Any = HalvesTokenizer()
    for _ in range(2):  # the second time with all texts known
        detokenizer = Detokenizer(tokenizer)
        shown = [
            text
            if (text := detokenizer.plain_texts.get(i)) is not None
            else detokenizer.push_one(i)
            for i in ids
        ]
        whole = tokenizer.bytes_of(ids).decode(errors="replace")
        assert "".join(shown) + detokenizer.flush() == whole


def test_plain_tokens_and_others_of_one_step_each_give_their_own_news() -> None:
    bench = EngineBench(num_blocks=200, block_size=4, tokenizer=HalvesTokenizer())
    asks: dict[str, dict[str, Any]] = {
        "plain": {},
        "short": {"max_tokens": 7},
        "scored": {"logprobs": 0},
        "last": {},
    }
    for index, (name, fields) in enumerate(asks.items()):
        bench.submit(name, [index + 1] * 5, **{"max_tokens": 24} | fields)
    stop = bench.expected("last").tokens[9]
    bench.submit("stopped", [4] * 5, max_tokens=24, stop_token_ids=(stop,))
    bench.run()
    for name in asks:
        tokens = bench.expected(name).tokens
        assert bench.output(name) == tokens
        assert bench.text(name) == HalvesTokenizer().bytes_of(tokens).decode(errors="replace")
        assert bench.reason(name) == "length"
        counts = [news.usage.completion_tokens for news in bench.news[name]]
        assert counts == list(range(1, len(tokens) + 1))
    assert bench.output("stopped") == bench.expected("stopped").tokens
    assert (bench.reason("stopped"), bench.output("stopped")[-1]) == ("stop", stop)
    assert len(bench.output("stopped")) <= 10
    for news in bench.news.values():
        assert [output.is_last for output in news] == [False] * (len(news) - 1) + [True]
    scored = [len(news.logprobs) for news in bench.news["scored"]]
    assert scored == [1] * 24


def test_a_stop_string_among_plain_texts_ends_its_own_request_alone() -> None:
    bench = EngineBench(num_blocks=200, block_size=4, tokenizer=LetterTokenizer())
    bench.submit("plain", [1] * 5, max_tokens=12)
    text = LetterTokenizer().bytes_of(bench.expected("plain").tokens).decode()
    bench.submit("stopped", [1] * 5, max_tokens=12, stop=(text[5:7],))
    bench.run()
    assert (bench.text("plain"), bench.reason("plain")) == (text, "length")
    assert (bench.text("stopped"), bench.reason("stopped")) == (text[:5], "stop")


def test_a_token_without_a_text_ends_its_own_request_alone() -> None:
    tokenizer = BreakingTokenizer()
    bench = EngineBench(num_blocks=200, block_size=4, tokenizer=tokenizer)
    for index in range(4):
        bench.submit(f"r{index}", [index + 1] * 5, max_tokens=16)
    tokens = {name: bench.expected(name).tokens for name in bench.news}
    place, tokenizer.broken = next(
        (place, token)
        for place, token in enumerate(tokens["r1"])
        if place and all(token not in tokens[name] for name in ("r0", "r2", "r3"))
    )
    bench.run()
    assert bench.reason("r1") == "error"
    assert bench.output("r1") == tokens["r1"][:place]
    assert f"no text for {tokenizer.broken}" in (bench.news["r1"][-1].error or "")
    for name in ("r0", "r2", "r3"):
        assert (bench.output(name), bench.reason(name)) == (tokens[name], "length")


def test_without_a_tokenizer_tokens_come_without_text() -> None:
    bench = EngineBench(num_blocks=40, block_size=4)
    bench.submit("a", [1, 2, 3], max_tokens=6)
    bench.run()
    assert bench.output("a") == bench.expected("a").tokens
    assert bench.text("a") == ""
