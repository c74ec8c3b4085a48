"""From news to choices, without an engine: offsets, held-back text, the best of several, calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from runtime.plan import TokenLogprobs
from runtime.request import FinishReason, RequestOutput, Usage
from runtime.server.answers import TextLogprobs
from runtime.server.chat_choices import ChatChoices, ChatForm
from runtime.server.generation import News
from runtime.server.logprobs import IMPOSSIBLE
from runtime.server.text_choices import TextChoices, TextForm
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.tool_format import HERMES
from tests.support.smollm2 import open_smollm2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_smollm2().tokenizer()


def news(
    place: int,
    text: str = "",
    ids: Sequence[int] = (),
    logprobs: Sequence[TokenLogprobs] = (),
    *,
    reason: FinishReason | None = None,
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> News:
    usage = Usage(prompt_tokens=1, cached_tokens=0, computed_tokens=1, completion_tokens=len(ids))
    output = RequestOutput(
        request_id="r",
        text=text,
        token_ids=tuple(ids),
        usage=usage,
        finish_reason=reason,
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs),
    )
    return News(place, output)


def likely(*numbers: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(number) for number in numbers]


def told(logprobs: TextLogprobs | None) -> TextLogprobs:
    assert logprobs is not None
    return logprobs


def test_a_token_begins_where_the_last_whole_character_before_it_ends(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a ☃𝄞b")
    choices = TextChoices(TextForm(num_top=0), [("", [1])], tokenizer)
    choices.add(news(0, "a ☃𝄞b", ids, likely(*[-1.0] * len(ids)), reason="stop"))
    logprobs = told(choices.whole()[0].logprobs)
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[-1] == 4  # "b", the fifth character
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    spelled = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in logprobs.tokens
    )
    assert spelled.decode() == "a ☃𝄞b"


def test_an_echoed_prompt_shifts_the_offsets_of_the_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two")
    form = TextForm(num_top=1, echoes=True, num_branches=2, num_choices=2)
    choices = TextChoices(form, [("one two", ids)], tokenizer)
    of_prompt = [TokenLogprobs(-2.0, (ids[0],), (-0.5,))]
    assert choices.pieces(news(0, prompt_logprobs=of_prompt)) == []
    for place in (0, 1):
        last = [TokenLogprobs(-3.0, (ids[0],), (-0.5,))]
        (piece,) = choices.pieces(news(place, " two", [ids[1]], last, reason="length"))
        assert piece.text == "one two two"
        logprobs = told(piece.logprobs)
        assert logprobs.tokens == ["one", " two", " two"]
        assert logprobs.token_logprobs == [None, -2.0, -3.0]
        assert logprobs.top_logprobs == [
            None,
            {"one": -0.5, " two": -2.0},
            {"one": -0.5, " two": -3.0},
        ]
        assert logprobs.text_offset == [0, 3, 7]


def test_the_best_are_those_whose_tokens_are_likeliest_on_average(tokenizer: Tokenizer) -> None:
    form = TextForm(num_choices=2, num_branches=3)
    choices = TextChoices(form, [("", [1]), ("", [1])], tokenizer)
    branches = [("a", (-1.0, -1.0, -1.0)), ("b", (-2.0,)), ("c", (-0.5, -1.0)), ("d", (-3.0,))]
    for place, (text, numbers) in enumerate([*branches, ("e", (-1.0,)), ("f", (-2.0,))]):
        choices.add(news(place, text, [5] * len(numbers), likely(*numbers), reason="stop"))
    whole = choices.whole()
    assert [choice.text for choice in whole] == ["c", "a", "e", "f"]
    assert [choice.index for choice in whole] == [0, 1, 2, 3]
    assert all(choice.logprobs is None for choice in whole)


def test_what_is_impossible_has_a_number_that_json_can_hold(tokenizer: Tokenizer) -> None:
    found = TokenLogprobs(-math.inf, (5,), (-math.inf,))
    text = TextChoices(TextForm(num_top=1), [("", [1])], tokenizer)
    text.add(news(0, "x", [5], [found], reason="stop"))
    logprobs = told(text.whole()[0].logprobs)
    assert logprobs.token_logprobs == [IMPOSSIBLE]
    chat = ChatChoices(ChatForm(num_top=1), tokenizer)
    chat.add(news(0, "x", [5], [found], reason="stop"))
    content = chat.whole()[0].logprobs
    assert content is not None
    assert content.content[0].logprob == content.content[0].top_logprobs[0].logprob == IMPOSSIBLE


def test_tokens_whose_text_is_held_back_are_told_at_once_with_what_is_asked_of_them(
    tokenizer: Tokenizer,
) -> None:
    half = tokenizer.encode("☃")[:1]
    silent = ChatChoices(ChatForm(), tokenizer)
    assert silent.pieces(news(0, "", half)) == []
    for form in (ChatForm(with_ids=True), ChatForm(num_top=0)):
        (piece,) = ChatChoices(form, tokenizer).pieces(news(0, "", half, likely(-1.0)))
        assert (piece.token_ids == tuple(half)) == form.with_ids
        assert (piece.logprobs is not None) == (form.num_top is not None)
        assert not piece.delta.content
    text = TextChoices(TextForm(num_top=0), [("", [1])], tokenizer)
    (held,) = text.pieces(news(0, "", half, likely(-1.0)))
    assert held.text == ""
    assert told(held.logprobs).token_logprobs == [-1.0]


CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "reason", "said", "num_calls"),
    [
        (ChatForm(calls=HERMES), "stop", "tool_calls", 2),
        (ChatForm(calls=HERMES), "length", "length", 2),
        (ChatForm(calls=HERMES, is_named=True), "stop", "stop", 2),
        (ChatForm(calls=HERMES, max_calls=1), "stop", "tool_calls", 1),
        (ChatForm(), "stop", "stop", 0),
    ],
)
def test_a_call_in_the_text_is_told_as_a_call_where_tools_were_offered(
    tokenizer: Tokenizer, form: ChatForm, reason: FinishReason, said: str, num_calls: int
) -> None:
    whole, streamed = ChatChoices(form, tokenizer), ChatChoices(form, tokenizer)
    text = f"Let me see.{CALL}{CALL}"
    letters = [news(0, letter, [5]) for letter in text[:-1]]
    for piece in (letters := [*letters, news(0, text[-1], [5], reason=reason)]):
        whole.add(piece)
    (choice,) = whole.whole()
    calls = choice.message.tool_calls or []
    assert len(calls) == num_calls
    assert choice.message.content == ("Let me see." if num_calls else text)
    assert choice.finish_reason == said
    pieces = [choice for piece in letters for choice in streamed.pieces(piece)]
    deltas = [d for piece in pieces for d in piece.delta.tool_calls or ()]
    assert [d.index for d in deltas if d.id] == list(range(num_calls))
    assert len({d.id for d in deltas if d.id}) == num_calls
    assert [d.function.arguments for d in deltas if not d.id] == ['{"at": 1}'] * num_calls
    assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [said]


def test_a_reply_that_only_calls_has_no_content(tokenizer: Tokenizer) -> None:
    choices = ChatChoices(ChatForm(calls=HERMES), tokenizer)
    choices.add(news(0, CALL, [5], reason="stop"))
    assert choices.whole()[0].message.content is None
    empty = ChatChoices(ChatForm(calls=HERMES), tokenizer)
    empty.add(news(0, "", [5], reason="stop"))
    assert empty.whole()[0].message.content == ""
