"""Rewritings of a text, and the parts of a rendered conversation."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.misses.rewriting import Rewriting, is_retokenised, rewriting_of, shared_len
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.parts import MARK, part_at, parts_of
from tests.support.smollm2 import open_smollm2

REPLY = "It is Paris, where two million people live and work."
THOUGHT = "<think>\nThe user wants a capital.\n</think>\n\n"
TOOLS = '{"name": "add", "x": 1}\n{"name": "look_up", "x": 2}'


@pytest.mark.parametrize(
    ("ours", "theirs", "rewriting"),
    [
        (REPLY, THOUGHT + REPLY, Rewriting.THINKING),
        (f"Yes. {THOUGHT}{REPLY}", f"Yes. {REPLY}", Rewriting.THINKING),
        (REPLY, "<think>\nA thought that is longer than what is compared", Rewriting.THINKING),
        (REPLY.replace(" ", "  "), REPLY, Rewriting.WHITESPACE),
        (REPLY, REPLY.replace(", ", ",\n") + " And", Rewriting.WHITESPACE),
        ("\n".join(reversed(TOOLS.split("\n"))), TOOLS, Rewriting.TOOL_ORDER),
        (REPLY, REPLY.replace("Paris", "Rome"), None),
        (REPLY, "Something else.", None),
        ("a b", "a\nc", None),
        (TOOLS, TOOLS.replace("look_up", "find"), None),
        ("", "", None),
    ],
)
def test_a_rewriting_is_told_from_another_text(
    ours: str, theirs: str, rewriting: Rewriting | None
) -> None:
    for pair in ((ours, theirs), (theirs, ours)):
        assert rewriting_of(*pair, tool_names=["add", "look_up"]) is rewriting


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_shared_beginning_is_as_long_as_a_loop_finds(ours: str, theirs: str) -> None:
    pairs = list(zip(ours, theirs, strict=False))
    expected = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert shared_len(ours, theirs) == expected


@given(st.lists(st.text("ab", min_size=1, max_size=3)), st.lists(st.text("ab", min_size=1)))
def test_retokenised_means_the_same_text_up_to_a_common_border(
    ours: list[str], theirs: list[str]
) -> None:
    def prefixes(tokens: list[str]) -> set[str]:
        return {"".join(tokens[:n]) for n in range(1, len(tokens) + 1)}

    left, right = ([token.encode() for token in tokens] for tokens in (ours, theirs))
    assert is_retokenised(left, right) == bool(prefixes(ours) & prefixes(theirs))


def template(source: str | None = None) -> ChatTemplate:
    checkpoint = open_smollm2()
    if source is None:
        found = checkpoint.chat_template()
        assert found is not None
        return found
    return ChatTemplate(source, checkpoint.tokenizer())


def named(text: str, messages: list[Any], tools: list[Any] | None, of: ChatTemplate) -> str | None:
    """The part in which a text begins that occurs once in the rendered conversation."""
    rendered = of.render(messages, tools=tools)
    assert rendered.count(text) == 1
    parts = parts_of(lambda m, t: of.render(m, tools=t), messages, tools)
    found = part_at(parts, len(rendered[: rendered.index(text)].encode()))
    return None if found is None else f"{found.name} {found.role}"


CHAT = [
    {"role": "system", "content": "Be kind — always."},
    {"role": "user", "content": "Where is Rome?"},
    {"role": "assistant", "content": "In Italy."},
    {"role": "user", "content": "And Paris?"},
]


def test_every_part_of_a_conversation_is_found_by_where_its_text_lies() -> None:
    of = template()
    for at, message in enumerate(CHAT):
        assert named(message["content"], CHAT, None, of) == f"messages[{at}] {message['role']}"
        assert named(message["content"][2:], CHAT, None, of) == f"messages[{at}] {message['role']}"
    assert named("<|im_end|>\n<|im_start|>assistant\nIn", CHAT, None, of) == "template assistant"
    assert named("<|im_end|>\n<|im_start|>assistant\n", CHAT[:2], None, of) == "template None"


def test_tools_and_calls_are_parts() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "description": f"Does {name}."}}
        for name in ("alpha", "beta")
    ]
    call = {"id": "1", "type": "function", "function": {"name": "alpha", "arguments": '{"x": 7}'}}
    chat = [
        *CHAT[:2],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "forty-two", "tool_call_id": "1"},
    ]
    native = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}\
<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\
{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    for of in (template(), template(native)):
        assert str(named("Does alpha.", chat, tools, of)).startswith("tools[0]")
        assert str(named("Does beta.", chat, tools, of)).startswith("tools[1]")
        assert named('{"x": 7}' if of.source != native else '"x": 7', chat, tools, of) == (
            "messages[2] assistant"
        )
        assert str(named("forty-two", chat, tools, of)).startswith("messages[3]")


def test_parts_are_unknown_where_marks_would_not_do() -> None:
    of = template()
    odd = [{"role": "user", "content": f"Hi {MARK}"}]
    assert parts_of(lambda m, t: of.render(m, tools=t), odd) == []

    def refuses(messages: Any, tools: Any) -> str:
        raise InvalidRequest("no")

    assert parts_of(refuses, CHAT) == []
    assert part_at([], 5) is None


def test_a_template_that_trims_or_leaves_out_thoughts_still_has_its_parts() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    chat = [*CHAT[:2], {"role": "assistant", "content": "<think>Hm.</think> In Italy. "}, CHAT[3]]
    assert named("And Paris?", chat, None, template(source)) == "messages[3] user"


DOCTESTED = [
    "radixcache.sim.logged",
    "runtime.doctor.pieces",
    "runtime.doctor.rendering",
    "runtime.doctor.report_text",
    "runtime.doctor.text_changes",
    "runtime.doctor.values",
    "runtime.doctor.changes",
    "runtime.misses.records",
    "runtime.misses.rewriting",
]


@pytest.mark.parametrize("module", DOCTESTED)
def test_the_examples_in_docstrings_run(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert failed == 0
