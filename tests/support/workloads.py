"""The three workloads that the cache is for, as rounds of requests: chat, agent tree, few-shot.

Owns: their shape and texts.  Does not know: engines or servers.
Idea: a request is a prefix that some earlier request ended with, and new text; rounds follow each
other, and within a round requests may run together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

Ids = list[int]
Encode = Callable[[str], Ids]
Rounds = Iterator[list["Ask"]]

_SUBJECTS = ("river", "engine", "teacher", "market", "garden", "letter", "cache", "mountain")
_VERBS = ("finds", "keeps", "returns", "counts", "shares", "drops", "compares", "builds")
_ENDS = ("a map", "its key", "every page", "the old door", "two numbers", "a red token", "no trace")


class Ask(NamedTuple):
    """One request: `name` continues what `parent` ended with, or starts anew, by `text`."""

    name: str
    parent: str | None
    text: str


def sentences(count: int, *, seed: int) -> str:
    """Return plain sentences; other seeds give other ones."""
    lines = []
    for i in range(count):
        a, b, c = (7 * seed + 3 * i + 1) * 31, (5 * seed + i) * 17 + 2, (11 * seed + 13 * i) * 7
        subject, verb, end = _SUBJECTS[a % 8], _VERBS[b % 8], _ENDS[c % 7]
        lines.append(f"The {subject} {verb} {end} in {1900 + (a + b) % 100}.")
    return " ".join(lines)


def chat(*, turns: int = 6, system_sentences: int = 8) -> list[list[Ask]]:
    """One conversation: each round is the next turn."""
    first = f"System: {sentences(system_sentences, seed=1)}\n"
    rounds = []
    for turn in range(turns):
        text = f"\nUser: What happens when {sentences(1, seed=50 + turn)}\nAssistant:"
        parent = f"turn {turn - 1}" if turn else None
        rounds.append([Ask(f"turn {turn}", parent, text if turn else first + text)])
    return rounds


def agent_tree(*, root_sentences: int = 20, branching: int = 3, depth: int = 3) -> list[list[Ask]]:
    """A root and `branching` children below each node, `depth` times; a round is a level."""
    rounds = [[Ask("r", None, f"Task: {sentences(root_sentences, seed=2)}\nPlan:")]]
    for level in range(depth):
        rounds.append(
            [
                Ask(f"{ask.name}.{i}", ask.name, f"\nTool {i}: {sentences(1, seed=9 * n + i)}\n")
                for n, ask in enumerate(rounds[level])
                for i in range(branching)
            ]
        )
    return rounds


def few_shot(*, questions: int = 64, template_sentences: int = 20) -> list[list[Ask]]:
    """Questions behind one template: the first alone, then all others together."""
    template = f"Examples: {sentences(template_sentences, seed=3)}\n"
    asks = [
        Ask(f"q{i}", None, f"{template}Question {i}: {sentences(1, seed=100 + i)} Answer:")
        for i in range(questions)
    ]
    return [asks[:1], asks[1:]]


WORKLOADS = {"chat": chat, "agent tree": agent_tree, "few-shot": few_shot}
