"""Calls in a model's text: what is one, however the text is cut, and that nothing is lost."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.tokenizer.detokenizer import Detokenizer
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.tool_calls import (
    MAX_TOOLS,
    ToolCall,
    ToolCallParser,
    check_tools,
    key_of_reply,
    tools_grammar,
)
from runtime.tokenizer.tool_format import (
    HERMES,
    ToolFormat,
    reply_key,
    tool_format,
    written_calls,
)
from runtime.weights.gguf import GgufCheckpoint
from tests.support.tiny_checkpoints import tiny_gguf_keys, write_tiny_gguf

LLAMA, MISTRAL = ToolFormat(name="llama"), ToolFormat(name="mistral")
FORMATS = [HERMES, LLAMA, MISTRAL]
GOOD = '{"name": "f", "arguments": {"a": 1}}'


def taken_apart(text: str, format: ToolFormat = HERMES, *, step: int = 10**6) -> list[Any]:
    """Texts, joined where they touch, and (name, arguments) of calls."""
    parser = ToolCallParser(format, new_id=map(str, count()).__next__)
    pieces: list[Any] = []
    for at in range(0, len(text), step):
        pieces += parser.push(text[at : at + step])
    found: list[Any] = []
    for piece in [*pieces, *parser.flush()]:
        if isinstance(piece, ToolCall):
            found.append((piece.name, piece.arguments))
        elif found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


CALL = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"<tool_call>\n{GOOD}\n</tool_call>", [CALL]),
        (f"Hi.\n\n<tool_call>{GOOD}</tool_call>\n", ["Hi.", CALL]),
        (f"<tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call>", [CALL, CALL]),
        (f"<tool_call>{GOOD}</tool_call> So.", [CALL, " So."]),
        (f"<tool_call>{GOOD}", [CALL]),  # cut off, but whole
        (f"<tool_call>\n{GOOD}\n</tool_c", [CALL]),
        ('<tool_call>{"arguments":{},"name":"f","x":1}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', [("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [("f", '{"a": 1}')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>!',
            [("f", '{"a": "</tool_call>"}'), "!"],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\"</tool_call>\\\\"}}</tool_call>',
            [("f", '{"a": "\\"</tool_call>\\\\"}')],
        ),
    ],
)
def test_calls_are_found(text: str, found: list[Any]) -> None:
    for step in (1, 2, 3, 7, len(text)):
        assert taken_apart(text, step=step) == found


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "{}",
        '{"name": 1}',
        '{"name": ""}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": 1}',
        '{"name": "f", "arguments": "no json"}',
        '{"name": "f", "arguments": {"a": 01}}',
        '{"name": "f", "arguments": ' + "[" * 5000 + "}",
        '{"name": "f"} and more',
    ],
)
def test_what_is_no_call_stays_the_text_that_it_is(body: str) -> None:
    text = f"So: \n<tool_call>{body}</tool_call> \n"
    assert taken_apart(text) == taken_apart(text, step=3) == [text]
    after = f"{text}<tool_call>{GOOD}</tool_call>"
    assert taken_apart(after) == taken_apart(after, step=3) == [text.rstrip(), CALL]


def test_a_string_that_never_ends_hides_no_later_call() -> None:
    text = f'<tool_call>{{"name": "f}}</tool_call>\n<tool_call>{GOOD}</tool_call>'
    assert taken_apart(text) == ['<tool_call>{"name": "f}</tool_call>', CALL]


def test_llamas_whole_reply_is_a_call_or_text() -> None:
    good = '{"name": "f", "parameters": {"a": 1}}'
    for text in (good, f" {good}\n", f"<|python_tag|>{good}"):
        assert taken_apart(text, LLAMA) == taken_apart(text, LLAMA, step=2) == [CALL]
    assert taken_apart(f"{good}; {good}", LLAMA) == [CALL, CALL]
    for text in ('{"name": "Ada", "age": 36}', f"{good} or so", f"See {good}", "{", '{"a"'):
        assert taken_apart(text, LLAMA) == taken_apart(text, LLAMA, step=1) == [text]


def test_mistrals_list_holds_calls_and_text_may_follow() -> None:
    text = f"Hm. [TOOL_CALLS] [{GOOD}, {GOOD}] Done."
    for step in (1, 5, 100):
        assert taken_apart(text, MISTRAL, step=step) == ["Hm.", CALL, CALL, " Done."]
    for text in ("[TOOL_CALLS] none", "[TOOL_CALLS] [1]", "[TOOL_CALLS", "[TOOL_CALLS]"):
        assert taken_apart(text, MISTRAL) == [text]


def test_text_is_shown_at_once_but_for_what_may_begin_a_call() -> None:
    parser = ToolCallParser()
    assert parser.push("Well, a <b> ") == ["Well, a <b>"]
    assert parser.push("and <tool") == [" and"]
    assert parser.push("s> ") == [" <tools>"]
    assert parser.flush() == [" "]
    assert ToolCallParser().flush() == []


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", GOOD),
        *(
            '{"name": "f", "parameters": {}}',
            "{",
            "}",
            '"',
            "\\",
            "[",
            "]",
            " ",
            "\n",
            ";",
            "a",
            "<",
        ),
    ]
)


@given(st.lists(PARTS, max_size=12).map("".join), st.sampled_from(FORMATS), st.integers(1, 9))
@example(' "<tool_call>"</tool_call>', HERMES, 1)
def test_however_a_text_is_cut_it_says_the_same_and_loses_nothing(
    text: str, format: ToolFormat, step: int
) -> None:
    found = taken_apart(text, format)
    assert taken_apart(text, format, step=step) == found
    if all(isinstance(part, str) for part in found):
        assert "".join(found) == text
    kept = "".join(part for part in found if isinstance(part, str))
    at = -1
    for letter in kept:  # what is shown is what was said, in order
        at = text.index(letter, at + 1)


@pytest.mark.parametrize("format", FORMATS)
def test_a_call_that_is_written_is_read_again(format: ToolFormat) -> None:
    calls = [("f", '{"a": "é\\n"}'), ("g", "{}")]
    text = written_calls("" if format is LLAMA else "Hi.", calls, format)
    assert [part for part in taken_apart(text, format) if part != "Hi."] == calls


def test_a_reply_has_one_key_however_it_is_spelled() -> None:
    key = reply_key("Hi.", [("f", '{"a":1, "b" : "\\u00e9"}')])
    assert key == reply_key(" Hi.\n", [("f", '{"a": 1, "b": "é"}')])
    assert key != reply_key("Hi.", [("f", '{"a": 2, "b": "é"}')])
    text = 'Hi.\n\n<tool_call>{"name":"f","arguments":{"a":1,"b":"é"}}</tool_call>\n'
    assert key_of_reply(text, HERMES) == key
    assert key_of_reply("Hi. <tool_call>", HERMES) is None
    assert reply_key("", [("f", "{")]).count("{") == 2


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("'<tool_call>' [TOOL_CALLS]", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("<|python_tag|>", "llama"),
        ("ipython '{\"name\": ' '\"parameters\": '", "llama"),
    ],
)
def test_the_format_is_told_by_the_template(template: str | None, name: str) -> None:
    assert tool_format(template, {}).name == name


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "a\n", "é", "a.b", 'a"', "a\x00"])
def test_a_tools_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name takes 1 to 64") as caught:
        check_tools([tool("fine"), tool(name)])
    assert caught.value.param == "tools[1].function.name"


def test_tools_are_few_and_named_once() -> None:
    check_tools([tool(f"t{i}") for i in range(MAX_TOOLS)])
    with pytest.raises(InvalidRequest, match="at most 128"):
        check_tools([tool(f"t{i}") for i in range(MAX_TOOLS + 1)])
    with pytest.raises(InvalidRequest, match="two tools") as caught:
        check_tools([tool("a"), tool("a")], param="tools[{}].name")
    assert caught.value.param == "tools[1].name"


def test_the_grammar_of_calls_names_the_tools_that_may_be_called() -> None:
    tools = [tool("a", properties={"x": {"type": "string"}}), tool("b")]
    both = tools_grammar(tools)
    assert len(both.schemas) == 2
    assert json.loads(both.schemas[0])["properties"] == {"x": {"type": "string"}}
    assert json.loads(tools_grammar(tools, "b").schemas[0]) == {"type": "object"}
    with pytest.raises(InvalidRequest, match="'c'") as caught:
        tools_grammar(tools, "c")
    assert caught.value.param == "tool_choice"
    with pytest.raises(InvalidRequest, match="a tool"):
        tools_grammar([])


def test_marks_of_calls_that_are_control_tokens_are_shown(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    keys = tiny_gguf_keys()
    keys["tokenizer.ggml.tokens"] = list(keys["tokenizer.ggml.tokens"])
    tokens, types = keys["tokenizer.ggml.tokens"], list(keys["tokenizer.ggml.token_type"])
    place = types.index(1)
    tokens[place], types[place] = "<tool_call>", 3
    keys["tokenizer.ggml.token_type"] = types
    path = write_tiny_gguf(tmp_path_factory.mktemp("marked") / "t.gguf", keys=keys)
    tokenizer: Tokenizer = GgufCheckpoint(path).tokenizer()
    assert tokenizer.special_tokens["<tool_call>"] == place
    assert tokenizer.decode([1, place, 2]) == "<tool_call>"
    assert Detokenizer(tokenizer).push([1, place, 2]) == "<tool_call>"
    format = tool_format("", tokenizer.special_tokens)
    assert f"<[{place}]>" in tools_grammar([tool("f")], format=format).source
    assert tokenizer.encode("<tool_call>") != [place]  # in a text it is text
