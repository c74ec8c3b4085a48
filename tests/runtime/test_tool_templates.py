"""What some models' chat templates ask of calls beyond OpenAI's form, and that they get it."""

from __future__ import annotations

from typing import Any

import pytest

from radixcache import DEFAULT_NAMESPACE
from runtime.errors import InvalidRequest
from runtime.request import pack_prompt
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer
from runtime.tokenizer.replies import ReplyMemory
from runtime.tokenizer.tool_calls import ToolCall, ToolCallParser, key_of_reply, tools_grammar
from runtime.tokenizer.tool_format import HERMES, ToolFormat
from runtime.weights.gguf import GgufCheckpoint
from tests.support.tiny_checkpoints import CHATML, write_tiny_gguf

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '{"name": "look", "parameters": {"at": 1}}'

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_CALL = (
    HEAD + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{# ipython, '\"parameters\": ' #}" + TAIL
)
SHORT_IDS = (
    HEAD + "{% for i in [m.tool_call_id] + (m.tool_calls or []) | map(attribute='id') | list %}"
    "{% if i and i | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}{{ i }}"
    "{% endfor %}{# [TOOL_CALLS] #}" + TAIL
)
NAMED_RESULTS = (
    HEAD + "{% if m.role == 'tool' and m.name is not defined %}{{ raise_exception('no name') }}"
    "{% endif %}{{ m.name }}{# <tool_call> #}" + TAIL
)
ROLE_OF_ITS_OWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool_calls' %}!{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return GgufCheckpoint(write_tiny_gguf(tmp_path_factory.mktemp("t") / "t.gguf")).tokenizer()


def conversation(*ids: str, **result: Any) -> list[dict[str, Any]]:
    """One reply with a call of each id, and their results."""
    function = {"name": "look", "arguments": '{"at": 1}'}
    calls = [{"id": i, "type": "function", "function": function} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": "seen"} | result for i in ids]
    asked = {"role": "user", "content": "?"}
    return [asked, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


@pytest.mark.parametrize("template", [CHATML, SHORT_IDS, NAMED_RESULTS, ROLE_OF_ITS_OWN])
def test_a_template_that_takes_several_calls_back_is_asked_for_as_many(
    tiny: Tokenizer, template: str
) -> None:
    assert ChatTemplate(template, tiny).format.max_calls is None


def test_a_model_is_let_make_no_more_calls_than_its_template_takes_back(tiny: Tokenizer) -> None:
    template = ChatTemplate(ONE_CALL, tiny)
    format = template.format
    assert (format.name, format.max_calls) == ("llama", 1)
    with pytest.raises(InvalidRequest, match="one call"):
        template.encode(conversation("a", "b"))
    assert "{0," not in tools_grammar([TOOL], format=format).source
    assert "{0," in tools_grammar([TOOL], format=ToolFormat(name="llama")).source
    parser = ToolCallParser(format)
    pieces = parser.push(f"{CALL}; {CALL}") + parser.flush()
    (call,) = pieces
    assert isinstance(call, ToolCall)
    assert "look" in template.render(conversation(call.id))


def test_a_reply_keeps_its_ids_though_only_one_of_its_calls_comes_back(tiny: Tokenizer) -> None:
    template, memory = ChatTemplate(ONE_CALL, tiny), ReplyMemory()
    reply = f"{CALL}; {CALL}"
    key = key_of_reply(reply, template.format)
    assert key is not None
    messages = conversation("a")
    prompt = template.encode(messages[:1])
    ids = tiny.encode(reply)
    memory.remember(DEFAULT_NAMESPACE, pack_prompt(prompt), key, ids)
    after = template.encode(
        messages, recall=lambda before, text: memory.recall(DEFAULT_NAMESPACE, before, text)
    )
    assert after[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize("ids", [("call_0123456789abcdef", "toolu_é"), ("AbCd12345", "x")])
def test_names_of_calls_are_as_short_as_the_template_wants_them(
    tiny: Tokenizer, ids: tuple[str, str]
) -> None:
    template = ChatTemplate(SHORT_IDS, tiny)
    assert template.format.name == "mistral"
    text = template.render(conversation(*ids))
    reply, *results = [part.split("\n")[1] for part in text.split("<|im_start|>")[2:4]]
    assert reply.startswith(results[0][:9])
    assert text == template.render(conversation(*ids)), "the next turn has the same prefix"
    kept = ids[0] if len(ids[0]) == 9 else None
    assert kept is None or kept in text


def test_a_result_has_the_name_of_what_was_called(tiny: Tokenizer) -> None:
    template = ChatTemplate(NAMED_RESULTS, tiny)
    assert template.render(conversation("a", "b")).count("tool\nlook") == 2
    assert "tool\nown" in template.render(conversation("a", name="own"))
    with pytest.raises(InvalidRequest, match="no name"):
        template.render([{"role": "tool", "tool_call_id": "other", "content": "seen"}])


def test_calls_are_text_where_the_template_does_not_show_them(tiny: Tokenizer) -> None:
    text = ChatTemplate(ROLE_OF_ITS_OWN, tiny).render(conversation("a"))
    assert '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>' in text
    assert "<tool_response>\nseen" in text


def test_no_more_calls_are_told_than_wanted() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>and<tool_call>{"name": "g"}</tool_call>.'
    parser = ToolCallParser(HERMES, max_calls=1, new_id=str)
    pieces = [piece for letter in text for piece in parser.push(letter)] + parser.flush()
    assert [piece.name for piece in pieces if isinstance(piece, ToolCall)] == ["f"]
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "and."
