"""Real traces as requests of token ids.

Owns: how a file becomes prompts and answers, and how many tokens of them differ.  Does not know:
caches.
Idea: ids are made by hashing, so that every process makes the same ones in every environment, with
no tokenizer.  A block hash becomes a run of ids; a text becomes pieces of at most six letters, and
a piece an id.

    mooncake_*  prompts alone, as block hashes; answers are not in the file
    oasst       conversation trees: a request for each reply, all trees advancing together
    gsm8k       eight solved examples, a question, its answer
    mt_bench    the first turns of all questions, then the second; an answer of 128 made-up ids
    tot         tree of thought, ten games at a time: a proposal for each state kept, then a value
                for each thought; 256 made-up ids stand for the examples in front of either
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 128_000
HASHED_TOKENS = 512  # that one hash of the mooncake traces stands for
PIECE = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s")
NONE = np.empty(0, np.int32)

Request = tuple[Any, Any]
"""Prompt and answer, int32 arrays; the answer may be empty."""


def made_up(seed: int, count: int) -> Any:
    """Return `count` ids that depend on the seed alone (splitmix64 of each place)."""
    x = (np.uint64(seed) << np.uint64(20)) + np.arange(1, count + 1, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(VOCABULARY)).astype(np.int32)


def ids_of(text: str) -> Any:
    """Return an id for each piece of a text."""
    pieces = PIECE.findall(text)
    return np.array([zlib.crc32(piece.encode()) % VOCABULARY for piece in pieces], np.int32)


def joined(*parts: Any) -> Any:
    return np.concatenate(parts) if parts else NONE


class Texts:
    """Requests that are short enough to be kept."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def longest(self) -> int:
        """Return the tokens of the longest request, its answer included."""
        return max(len(prompt) + len(answer) for prompt, answer in self.requests)

    def distinct_tokens(self) -> int:
        """Return the tokens that a cache without bounds would hold in the end."""
        runs = sorted(joined(*request).astype(">i4").tobytes() for request in self.requests)
        total = len(runs[0]) // 4
        for left, right in pairwise(runs):
            size = min(len(left), len(right)) // 4
            a, b = (np.frombuffer(run, ">i4", size) for run in (left, right))
            differs = a != b
            shared = int(differs.argmax()) if differs.any() else size
            total += len(right) // 4 - shared
        return total


class Hashes:
    """Requests as block hashes, expanded when they are asked for."""

    def __init__(self, path: Path, tokens_per_hash: int, most: int) -> None:
        self.size = tokens_per_hash
        with gzip.open(path, "rt") as lines:
            records = [json.loads(line) for line, _ in zip(lines, range(most), strict=False)]
        self.prompts = [
            (np.array(r["hash_ids"], np.int32), -(-r["input_length"] * self.size // HASHED_TOKENS))
            for r in records
        ]

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Request]:
        for hashes, length in self.prompts:
            yield joined(*(made_up(int(h) + 1, self.size) for h in hashes))[:length], NONE

    def longest(self) -> int:
        return max(length for _, length in self.prompts)

    def distinct_tokens(self) -> int:
        held: dict[int, int] = {}
        for hashes, length in self.prompts:
            for place, name in enumerate(hashes.tolist()):
                tokens = min(self.size, length - place * self.size)
                held[name] = max(held.get(name, 0), tokens)
        return sum(held.values())


def read_oasst(folder: Path) -> list[Request]:
    """Return a request for each reply, by depth: the path above it, then its text."""
    level: list[tuple[Any, Any]] = []
    with gzip.open(folder / "oasst_en_100_tree.jsonl.gz", "rt") as lines:
        level = [(NONE, json.loads(line)["prompt"]) for line in lines]
    requests = []
    while level:
        below = []
        for above, message in level:
            text = ids_of(f"<{message['role']}>{message['text']}\n")
            if message["role"] == "assistant":
                requests.append((above, text))
            below += [(joined(above, text), reply) for reply in message.get("replies", ())]
        level = below
    return requests


def read_gsm8k(folder: Path) -> list[Request]:
    examples = (folder / "gsm8k-cot.yaml").read_text().partition("samples:")[2]
    head = ids_of(" ".join(examples.split()))
    with gzip.open(folder / "gsm8k_test.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    return [(joined(head, ids_of(f"Q: {r['question']}\nA:")), ids_of(r["answer"])) for r in records]


def read_mt_bench(folder: Path) -> list[Request]:
    lines = (folder / "mt_bench_question.jsonl").read_text().splitlines()
    turns = [[ids_of(turn) for turn in json.loads(line)["turns"]] for line in lines]
    answers = [[made_up(2 * i + turn + 1, 128) for turn in (0, 1)] for i in range(len(turns))]
    first = [(ask[0], answer[0]) for ask, answer in zip(turns, answers, strict=True)]
    second = [
        (joined(ask[0], answer[0], ask[1]), answer[1])
        for ask, answer in zip(turns, answers, strict=True)
    ]
    return first + second


def read_tot(folder: Path) -> list[Request]:
    games = json.loads(gzip.decompress((folder / "tot_game24_bfs.json.gz").read_bytes()))
    propose, value = made_up(1, 256), made_up(2, 256)
    requests = []
    for begin in range(0, len(games), 10):
        group = [game["steps"] for game in games[begin : begin + 10]]
        for depth in range(max(map(len, group))):
            for step in (steps[depth] for steps in group if depth < len(steps)):
                question, thoughts = ids_of(f"Input: {step['x']}\n"), step["new_ys"]
                for state in step["ys"]:
                    told = "".join(t[len(state) :] for t in thoughts if t.startswith(state))
                    requests.append((joined(propose, question, ids_of(state)), ids_of(told)))
                requests += [(joined(value, question, ids_of(t)), ids_of("sure")) for t in thoughts]
    return requests


TEXTS: dict[str, Callable[[Path], list[Request]]] = {
    "oasst": read_oasst,
    "gsm8k": read_gsm8k,
    "mt_bench": read_mt_bench,
    "tot": read_tot,
}
TRACES = ("mooncake_conversation", "mooncake_synthetic", *TEXTS)


def read_trace(name: str, folder: str, *, tokens_per_hash: int, most: int) -> Texts | Hashes:
    """Return at most so many requests of a trace, the same ones in every process."""
    if name in TEXTS:
        return Texts(TEXTS[name](Path(folder))[:most])
    return Hashes(Path(folder) / f"{name}.jsonl.gz", tokens_per_hash, most)
