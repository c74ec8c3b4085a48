"""The programs in examples/ run as they are, as somebody would run them.

What they print of the cache is checked to be something; how long anything took is not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.served import quick_runtime, serving

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
TOTAL = re.compile(r"(\d+) prompt tokens: (\d+) cached, (\d+) computed")
OF_PROMPT = re.compile(r"(\d+) of (\d+) prompt tokens cached")


def run(program: str, *arguments: str, status: int = 0) -> str:
    """Run one to its end; return what it printed, or what it said of an error that is expected."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / program), *arguments],
        cwd=EXAMPLES.parent,
        env=os.environ | {"PYTHONWARNINGS": "error", "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_the_agent_tree_computes_the_trunk_once() -> None:
    printed = run("agent_tree.py", "--max-tokens", "6")
    assert "[flights] failed: its branch is abandoned" in printed
    (total,) = TOTAL.findall(printed)
    prompt, cached, computed = map(int, total)
    assert cached + computed == prompt
    assert cached > prompt / 2  # four prompts, of which three begin with the trunk


def test_few_shot_computes_its_template_once() -> None:
    printed = run("few_shot.py", "--reviews", "2")
    answers = [line.split()[0] for line in printed.splitlines() if " tokens cached)" in line]
    assert answers == ["positive", "negative"]
    (total,) = TOTAL.findall(printed)
    prompt, cached, computed = map(int, total)
    assert cached + computed == prompt
    assert cached > 0.7 * prompt  # all but the template itself, the reviews and their labels


def test_the_chat_backend_starts_a_server_and_finds_earlier_turns_cached() -> None:
    printed = run("chat_backend.py", "--max-tokens", "4")
    turns = [(int(cached), int(prompt)) for cached, prompt in OF_PROMPT.findall(printed)]
    assert len(turns) == 4
    assert turns[0][0] == 0
    assert all(cached >= 48 for cached, _ in turns[1:])  # the system prompt, at the least
    assert turns[2][0] > turns[1][0]  # and one's own earlier turn
    ((prompt, cached, computed),) = TOTAL.findall(printed)
    assert (int(prompt), int(cached)) == (sum(p for _, p in turns), sum(c for c, _ in turns))
    assert int(computed) == int(prompt) - int(cached)


def test_the_chat_backend_talks_to_a_server_that_runs() -> None:
    runtime = quick_runtime()
    with serving(runtime) as url:
        printed = run("chat_backend.py", "--base-url", url, "--max-tokens", "4")
    assert len(OF_PROMPT.findall(printed)) == 4


def test_a_chat_backend_whose_server_does_not_start_says_why() -> None:
    told = run("chat_backend.py", "--model", "no-such-model", status=1)
    assert "did not start" in told
    assert "no model 'no-such-model'" in told


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_short_and_listed(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert text.count("\n") < 100
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text()
