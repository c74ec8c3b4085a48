"""Where blocks that are marked with `cache_control` end in a prompt, and what finding it costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from radixcache import DEFAULT_NAMESPACE
from runtime.loading import Runtime
from runtime.server.anthropic import MessagesRequest
from runtime.server.prompts import anthropic_prompt, marked_ends
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer
from tests.support.served import NAME, quick_runtime
from tests.support.workloads import sentences

MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
LOOK = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
FOUND = {"type": "tool_result", "tool_use_id": "1", "content": "nothing – ☃"}


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime(num_blocks=256)


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said} | fields


def body(*messages: Any, **fields: Any) -> MessagesRequest:
    """A request; its system prompt is marked in the middle."""
    system = [text(sentences(3, seed=1), **MARK), text("Be brief.")]
    asked = {"model": NAME, "max_tokens": 1, "messages": messages, "system": system} | fields
    return msgspec.convert(asked, MessagesRequest)


MARKED = {
    "a tool": body({"role": "user", "content": "Hi"}, tools=[TOOL | MARK, TOOL | {"name": "x"}]),
    "a text": body({"role": "user", "content": [text("Hi", **MARK), text("there")]}),
    "a result": body(
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [text("I look."), LOOK]},
        {"role": "user", "content": [FOUND | MARK]},
        {"role": "system", "content": "Agents: none."},
    ),
    "a text that looks like a control token": body(
        {"role": "user", "content": [text("<|im_end|>", **MARK), text("<|im_start|>")]}
    ),
    "what the reply goes on from": body(
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": [text("It", **MARK)]}
    ),
    "all": body({"role": "user", "content": "Hi"}, cache_control=MARK["cache_control"]),
}


@pytest.mark.parametrize("name", MARKED)
def test_marks_end_where_the_ids_of_their_beginnings_do(runtime: Runtime, name: str) -> None:
    asked = MARKED[name]
    ids = anthropic_prompt(runtime, asked, DEFAULT_NAMESPACE)
    ends = [end for _, end in marked_ends(runtime, asked, DEFAULT_NAMESPACE, ids)]
    # With an id too many, they are not those of the text any more: ids are compared then.
    more = [*ids, 5]
    by_ids = [end for _, end in marked_ends(runtime, asked, DEFAULT_NAMESPACE, more)]
    assert len(ends) == len(asked.breakpoints()) == 2
    assert all(abs(end - other) <= 1 for end, other in zip(ends, by_ids, strict=True))
    assert 0 < ends[0] <= len(ids)


def test_a_prompt_is_not_encoded_anew_for_each_mark(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = MARKED["a result"]
    ids = anthropic_prompt(runtime, asked, DEFAULT_NAMESPACE)

    def refuse(*_: Any) -> list[int]:
        raise AssertionError("a text was encoded")

    monkeypatch.setattr(Tokenizer, "encode_behind", refuse)
    assert len(list(marked_ends(runtime, asked, DEFAULT_NAMESPACE, ids))) == 2


def test_a_mark_whose_beginning_the_template_refuses_is_left_out(runtime: Runtime) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}\n{% if m.role == 'user' and not m.content %}"
        "{{ raise_exception('say something') }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, runtime.tokenizer)
    strict = msgspec.structs.replace(runtime, chat_template=template)
    asked = MARKED["a text"]
    ids = anthropic_prompt(strict, asked, DEFAULT_NAMESPACE)
    ((_, end),) = marked_ends(strict, asked, DEFAULT_NAMESPACE, ids)
    assert strict.tokenizer.decode(ids[:end]).endswith("Be brief.\nHi\n")
