"""Reports: what they say, and that nothing of a log acts in a page or a terminal."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from runtime.doctor.diagnosis import Diagnosis, Doctor
from runtime.doctor.log import request_of
from runtime.doctor.rendering import WordRenderer
from runtime.doctor.report_html import html_report
from runtime.doctor.report_text import text_report
from tests.support.clean_logs import clean_log
from tests.support.request_logs import broken_log

EVIL = "<script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>\x1b[2J\u202e"


def examine(lines: list[Any]) -> Diagnosis:
    log = [request_of(line, line=number) for number, line in enumerate(lines, 1)]
    return Doctor(WordRenderer()).examine(log)


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return examine(broken_log("clock", seed=1))


class Page(HTMLParser):
    """Every tag of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_says_how_much_why_where_and_what_to_do(diagnosis: Diagnosis) -> None:
    text = text_report(diagnosis, "log.jsonl")
    flat = " ".join(text.split())
    (found,) = diagnosis.reasons
    assert "log.jsonl: 20 requests" in flat
    assert "1. a clock near the top" in flat
    assert f"{found.lost_tokens:,} tokens that an earlier one" in flat
    assert f"computes {found.saved_tokens:,} tokens less" in flat
    assert "[-" in flat
    assert "-]{+" in flat
    assert "Put what stays first and what changes last" in flat
    assert max(map(len, text.splitlines())) <= 96


def test_text_of_a_clean_log_says_that_nothing_is_amiss() -> None:
    text = text_report(examine(clean_log("chats", 1)), "log.jsonl")
    assert "Nothing is amiss" in text
    assert "\n1. " not in text


def test_json_is_the_record(diagnosis: Diagnosis) -> None:
    text = msgspec.json.encode(diagnosis)
    assert msgspec.json.decode(text, type=Diagnosis) == diagnosis


def test_a_page_needs_nothing_else_and_marks_what_differs(diagnosis: Diagnosis) -> None:
    page = Page(html_report(diagnosis, "log.jsonl"))
    names = {tag for tag, _ in page.tags}
    assert {"del", "ins", "table", "meter", "h1"} <= names
    assert not names & {"script", "link", "img", "iframe", "object", "form"}
    for _, attributes in page.tags:
        assert not {"src", "srcset", "style"} & attributes.keys()
        assert str(attributes.get("href", "#")).startswith("#")
    assert "prefers-color-scheme: dark" in page.text
    assert "a clock near the top" in page.text


def test_nothing_of_a_log_acts_in_a_report() -> None:
    lines = broken_log("user's name", seed=1)
    for line in lines:
        system = line["body"]["messages"][0]
        system["content"] = system["content"].replace("talking to", f"talking to {EVIL}")
        line["body"]["tools"][0]["function"]["name"] = EVIL
        line["body"]["tools"].reverse() if lines.index(line) % 2 else None
    diagnosis = examine(lines)
    assert diagnosis.reasons
    page = html_report(diagnosis, EVIL)
    assert "<script" not in page
    assert "<img" not in page
    assert "\x1b" not in page
    text = text_report(diagnosis, "log.jsonl")
    assert "\x1b" not in text
    assert "\u202e" not in text
