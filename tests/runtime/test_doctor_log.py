"""Reading logs: every form that a line may have, and errors that name the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.doctor.log import LoggedRequest, Said, read_log, request_of
from runtime.doctor.rendering import ModelRenderer, WordRenderer
from runtime.errors import InvalidLog
from tests.support.smollm2 import open_smollm2

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "model": "m"}


def one(record: dict[str, Any]) -> LoggedRequest:
    return request_of(record)


def test_a_body_stands_alone_or_beside_what_came_of_it() -> None:
    reply = {"choices": [{"message": {"role": "assistant", "content": "Yes."}}]}
    for line in (
        BODY,
        {"body": BODY, "response": reply},
        {"request": BODY, "response": {"status_code": 200, "body": reply}},
        {"body": BODY, "response": "Yes.", "tenant": "acme", "ttft_s": 0.25, "computed": 80},
    ):
        request = one(line)
        assert request.said == (Said("user", "Hi"),)
        assert request.model == "m"
        assert request.reply == ("Yes." if "response" in line else "")
    assert (request.tenant, request.ttft_s, request.computed) == ("acme", 0.25, 80)


def test_a_bare_prompt_is_taken() -> None:
    request = one({"prompt": "Once upon a time", "cache_salt": "s"})
    assert (request.said, request.is_chat) == ((Said("", "Once upon a time"),), False)
    assert request.salt == "s"


def test_all_that_a_message_says_becomes_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    request = one(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": ["See ", pixel, {"type": "input_audio", "x": 1}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
                {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
            ]
        }
    )
    roles = [said.role for said in request.said]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert request.said[0].text == "Be brief."
    assert "⟦image sha256 " in request.said[1].text
    assert '"input_audio"' in request.said[1].text
    assert '"name": "f"' in request.said[2].text
    assert request.said[4].text == "<think>\nHm.\n</think>\n\nSo."


def test_a_body_in_anthropics_words_is_taken() -> None:
    request = one(
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Look"}]},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]},
                {"role": "user", "content": [{"type": "tool_result", "content": "42"}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        }
    )
    assert [said.text for said in request.said] == [
        "Be brief.",
        "Look",
        "<think>\nHm.\n</think>\n\n",
        "42",
    ]
    assert request.tools[0].name == "f"
    assert request.tools[0].for_template()["function"]["description"] == "d"


def test_a_byte_order_mark_at_the_head_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(BODY).encode())
    assert len(read_log(path)) == 1


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_file_is_read_line_by_line_and_may_be_compressed(tmp_path: Path, name: str) -> None:
    text = "\n\n".join([json.dumps(BODY), json.dumps({"prompt": "x"})]).encode() + b"\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert [request.line for request in read_log(path)] == [1, 3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{nonsense", "it is not JSON"),
        ("[1, 2]", "object is expected"),
        ('"text"', "object is expected"),
        ("{}", "`messages` or a text as `prompt`"),
        ('{"messages": []}', "`messages`"),
        ('{"messages": "Hi"}', "`messages`"),
        ('{"messages": ["Hi"]}', r"messages\[0\] is no message"),
        ('{"messages": [{"content": "Hi"}]}', "it needs a role"),
        ('{"prompt": 7}', "`messages`"),
        ('{"messages": [{"role": "user"}], "tools": [3]}', r"tools\[0\] is no tool"),
        ('{"time": "12:00", "logger": "radixcache.requests"}', "own log has no bodies"),
        ("\xff\xfe", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(BODY).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(InvalidLog, match=rf"log\.jsonl, line 2: .*{says}"):
        read_log(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1e308", "9" * 400, "true", '"7"'])
def test_a_time_or_count_that_is_none_is_not_told_and_breaks_nothing(
    tmp_path: Path, number: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"prompt": "Hi", "ttft_s": {number}, "computed": {number}}}\n')
    (request,) = read_log(path)
    assert (request.ttft_s, request.computed) == (0, 0)


def test_an_empty_or_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n\n")
    with pytest.raises(InvalidLog, match="holds no request"):
        read_log(path)
    whole = gzip.compress("\n".join([json.dumps(BODY)] * 5000).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidLog, match=r"log\.jsonl is damaged after line \d+"):
        read_log(path)
    path.write_bytes(whole[:-4] + b"zzzz")
    with pytest.raises(InvalidLog, match="damaged"):
        read_log(path)


def test_what_a_template_refuses_is_rendered_all_the_same() -> None:
    checkpoint = open_smollm2()
    renderer = ModelRenderer(checkpoint.tokenizer(), checkpoint.chat_template())
    odd = request_of({"messages": [{"role": "a role!", "content": "Hi \ud83d there"}]})
    assert len(renderer.ids(odd)) > 5
    assert renderer.num_refused == 1
    without = ModelRenderer(checkpoint.tokenizer(), None)
    chat = request_of(BODY)
    assert without.decode(without.ids(chat), skip_special=False).startswith("<|im_start|>user\nHi")
    assert without.spoken(chat) is None


def test_words_give_back_the_text_that_they_were_made_of() -> None:
    renderer = WordRenderer()
    text = "To be, or  not\tto be:\nthat is the quéstion — 42!"
    assert renderer.decode(renderer.reply_ids(text)) == text
    assert renderer.bytes_of(renderer.reply_ids(text)) == text.encode()
    first, second = renderer.reply_ids("to be"), renderer.reply_ids("to be or")
    assert second[: len(first)] == first
