"""Four workloads for a server: conversations, an agent's tree, few-shot questions, no sharing.

Owns: which requests there are, what they share, how long they are.  Does not know: servers, HTTP.
Idea: a workload is a list of nodes; a node's prompt is that of its parent, what the server answered
there, and tokens of its own.  So all four are one kind, and a driver needs to know no more.

    chat      8 conversations of 6 turns behind one system prompt of 600 tokens; 60 a question, 32
              an answer
    tree      1,500 tokens, three branches at each of three levels, 80 a step, 16 an answer
    few-shot  64 questions of 40 tokens behind 2,000 tokens of examples, 8 an answer
    control   32 prompts of 512 tokens that share nothing, 16 an answer

Texts are words drawn by a seed from those of the vocabulary that are one token; the control's
prompts are drawn from all ids.  Servers are given ids, so that all compute the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from runtime.tokenizer.load import Tokenizer

Encode = Callable[[str], list[int]]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    parent  the node whose prompt and answer come before `tokens`; "": none
    """

    id: str
    parent: str = ""
    tokens: list[int]
    max_tokens: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests and tokens; the defaults are those that are measured."""

    sessions: int = 8
    turns: int = 6
    system: int = 600
    question: int = 60
    answer: int = 32
    root: int = 1500
    branches: int = 3
    levels: int = 3
    step: int = 80
    step_answer: int = 16
    examples: int = 2000
    shots: int = 64
    shot: int = 40
    shot_answer: int = 8
    controls: int = 32
    control: int = 512
    control_answer: int = 16


QUICK = Sizes(
    sessions=2,
    turns=2,
    system=60,
    question=12,
    answer=4,
    root=100,
    branches=2,
    levels=2,
    step=10,
    step_answer=4,
    examples=100,
    shots=6,
    shot=12,
    shot_answer=4,
    controls=3,
    control=64,
    control_answer=4,
)
"""Sizes to try whether a server works; no measurement."""


def make_workloads(tokenizer: Tokenizer, sizes: Sizes, *, seed: int = 7) -> dict[str, list[Node]]:
    """Return the workloads by name; the same for the same vocabulary, sizes and seed.

    A parent always comes before its children.
    """
    words = one_token_words(tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, parse_special=True)

    def dice(number: int) -> random.Random:
        return random.Random(seed * 1000 + number)

    return {
        "chat": _chat(sizes, encode, words, dice(0)),
        "tree": _tree(sizes, words, dice(1)),
        "few-shot": _few_shot(sizes, words, dice(2)),
        "control": _control(sizes, tokenizer.vocab_size, dice(3)),
    }


def warm_up(vocab_size: int, *, count: int, length: int) -> list[Node]:
    """Return requests that share nothing with the workloads, to be sent before them."""
    dice = random.Random(99)
    return [
        Node(id=f"w{i}", tokens=_any_ids(dice, vocab_size, length), max_tokens=4)
        for i in range(count)
    ]


def one_token_words(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that are a space and letters a to z."""
    return [
        i
        for i, text in enumerate(tokenizer.token_bytes)
        if text[:1] == b" " and text[1:].isalpha() and text[1:].isascii() and text[1:].islower()
    ]


def _chat(sizes: Sizes, encode: Encode, words: Sequence[int], dice: random.Random) -> list[Node]:
    end = encode("<|im_end|>\n")
    system = encode("<|im_start|>system\n") + dice.choices(words, k=sizes.system) + end
    nodes = []
    for turn in range(sizes.turns):
        for session in range(sizes.sessions):
            question = (
                encode("<|im_start|>user\n")
                + dice.choices(words, k=sizes.question)
                + encode("<|im_end|>\n<|im_start|>assistant\n")
            )
            nodes.append(
                Node(
                    id=f"{session}.{turn}",
                    parent=f"{session}.{turn - 1}" if turn else "",
                    tokens=(end if turn else system) + question,
                    max_tokens=sizes.answer,
                )
            )
    return nodes


def _tree(sizes: Sizes, words: Sequence[int], dice: random.Random) -> list[Node]:
    root = Node(id="r", tokens=dice.choices(words, k=sizes.root), max_tokens=sizes.step_answer)
    nodes = [root]
    level = ["r"]
    for _ in range(sizes.levels):
        children = [(f"{parent}.{i}", parent) for parent in level for i in range(sizes.branches)]
        nodes += [
            Node(
                id=child,
                parent=parent,
                tokens=dice.choices(words, k=sizes.step),
                max_tokens=sizes.step_answer,
            )
            for child, parent in children
        ]
        level = [child for child, _ in children]
    return nodes


def _few_shot(sizes: Sizes, words: Sequence[int], dice: random.Random) -> list[Node]:
    examples = dice.choices(words, k=sizes.examples)
    return [
        Node(
            id=f"q{i}",
            tokens=examples + dice.choices(words, k=sizes.shot),
            max_tokens=sizes.shot_answer,
        )
        for i in range(sizes.shots)
    ]


def _control(sizes: Sizes, vocab_size: int, dice: random.Random) -> list[Node]:
    return [
        Node(
            id=f"c{i}",
            tokens=_any_ids(dice, vocab_size, sizes.control),
            max_tokens=sizes.control_answer,
        )
        for i in range(sizes.controls)
    ]


def _any_ids(dice: random.Random, vocab_size: int, count: int) -> list[int]:
    """Draw ids; the first hundred are left out, where control tokens lie."""
    return [dice.randrange(100, vocab_size) for _ in range(count)]


class Ideal(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a workload's prompts, and how many of them must be computed."""

    prompt_tokens: int
    computed_tokens: int


def ideal(nodes: Sequence[Node]) -> Ideal:
    """Return what a cache without bounds that shares single tokens would compute.

    Requests come one after another, and answers are taken to differ.  The last token of a prompt
    is always computed, and the last token of an answer is never in the cache.
    """
    paths: dict[str, list[object]] = {}
    known: set[int] = set()
    total = computed = 0
    for node in nodes:
        prompt = [*paths.get(node.parent, ()), *node.tokens]
        answer = [(node.id, i) for i in range(node.max_tokens)]
        paths[node.id] = [*prompt, *answer]
        marks = _prefix_marks(paths[node.id][:-1])
        shared = next((i for i, mark in enumerate(marks) if mark not in known), len(marks))
        total += len(prompt)
        computed += len(prompt) - min(shared, len(prompt) - 1)
        known.update(marks)
    return Ideal(prompt_tokens=total, computed_tokens=computed)


def _prefix_marks(path: Sequence[object]) -> list[int]:
    """Return a number for each prefix, equal where the prefixes are."""
    mark, marks = 0, []
    for token in path:
        mark = hash((mark, token))
        marks.append(mark)
    return marks
