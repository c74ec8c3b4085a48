"""The pages about invariants and tests name tests that exist, and all the planted bugs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.planted import PLANTED_BUGS, PlantedBug
from tests.support.planted_keeping import KEEPING_BUGS

ROOT = Path(__file__).parents[2]
PAGES = ("docs/invariants.md", "docs/testing.md")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page):
    named = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", read(page))
    assert named
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if hasattr(node, "name")}
        assert not function or function in defined, f"{file}::{function}"


def test_every_invariant_has_a_paragraph_with_a_test():
    paragraphs = re.findall(r"^\*\*I(\d+)\. .*?(?=^\*\*I|\Z)", read(PAGES[0]), re.M | re.S)
    assert paragraphs == [str(number) for number in range(1, 12)]
    for text in re.findall(r"^\*\*I\d+\. .*?(?=^\*\*I|\Z)", read(PAGES[0]), re.M | re.S):
        assert "::test_" in text


def test_check_names_only_invariants_that_are_documented():
    source = (ROOT / "radixcache/check.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"(I\d+)"', source))
    assert named == {"I1", "I2", "I3", "I4", "I5", "I7", "I8", "I11"}


def row(bug: PlantedBug) -> str:
    (owner, method), marks = bug.where, [" ×"[eye in bug.seen_by] for eye in EYES]
    named = f"`{bug.test.partition(':')[2]}`" if bug.test else ""
    return f"| {bug.name} | `{owner.__name__}.{method}` | {' | '.join(marks)} | {named} |"


EYES = ("check", "reference", "content")


def test_the_table_of_planted_bugs_is_complete():
    rows = [re.sub(r" +", " ", line) for line in read("docs/testing.md").splitlines()]
    for bug in (*PLANTED_BUGS, *KEEPING_BUGS):
        assert re.sub(r" +", " ", row(bug)) in rows, row(bug)
    table = [line for line in rows if re.match(r"\| .* \| `\w+\.\w+` \|", line)]
    assert len(table) == len(PLANTED_BUGS) + len(KEEPING_BUGS)
