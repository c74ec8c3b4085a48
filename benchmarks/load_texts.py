"""Real texts as streamed requests: few-shot questions, conversations, a search through thoughts.

Owns: how a file becomes requests, and how they are mixed.  Does not know: servers and clients.
Idea: each kind comes in the order of its file, so what shares a prefix comes close together, as it
does where people talk and programs search; the kinds are shuffled into each other.  A file that
ends begins again.

    gsm8k     completions: eight solved examples, a question
    tot       completions: examples, a state of the game of 24; a proposal for each state, a value
              for each thought, as tree of thought asks them
    oasst     chats: the path above each reply of a conversation tree, half of them in Anthropic's
              words; an answer of a machine is in the file, so these do not wait for each other
    mt_bench  chats of two turns, the second behind the server's own answer
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.support.crowd import Ask

SHARES = {"tot": 0.6, "gsm8k": 0.25, "oasst": 0.08, "mt_bench": 0.07}
MOST_LETTERS = 4000  # of a conversation, about a thousand tokens
NUM_NEW = (4, 12)  # tokens of an answer, at most


class Texts:
    """Requests of the files in a folder, the same ones for the same seed."""

    def __init__(self, folder: Path, *, model: str, seed: int) -> None:
        self._model = model
        self._dice = random.Random(seed)
        self._kinds = {
            "gsm8k": cycle(list(self._gsm8k(folder))),
            "tot": cycle(list(self._tot(folder))),
            "oasst": cycle(list(self._oasst(folder))),
            "mt_bench": cycle(list(self._mt_bench(folder))),
        }

    def requests(self, count: int) -> Iterator[Ask]:
        """Return so many requests; the second turns of mt_bench come on top of them."""
        kinds = self._dice.choices(list(SHARES), list(SHARES.values()), k=count)
        return (next(self._kinds[kind]) for kind in kinds)

    def _gsm8k(self, folder: Path) -> Iterator[Ask]:
        examples = (folder / "gsm8k-cot.yaml").read_text().partition("samples:")[2]
        head = " ".join(examples.partition("filter_list:")[0].split())
        with gzip.open(folder / "gsm8k_test.jsonl.gz", "rt") as lines:
            for line in lines:
                yield self._completion(f"{head}\nQ: {json.loads(line)['question']}\nA:")

    def _tot(self, folder: Path) -> Iterator[Ask]:
        games = json.loads(gzip.decompress((folder / "tot_game24_bfs.json.gz").read_bytes()))
        examples, *rest = (game["steps"] for game in games)
        propose = "".join(
            f"Input: {step['x']}\nPossible next steps:\n{''.join(step['new_ys'][:8])}\n"
            for step in examples[:2]
        )
        verdicts = zip(examples[0]["new_ys"], examples[0]["values"], strict=True)
        value = "Can these numbers reach 24 (sure, likely, impossible)?\n" + "".join(
            f"{thought.strip()}\n{'sure' if worth > 2 else 'impossible'}\n"
            for thought, worth in verdicts
        )
        for steps in rest:
            for step in steps:
                question = f"Input: {step['x']}\nPossible next steps:\n"
                yield from (self._completion(propose + question + state) for state in step["ys"])
                for thought in step["new_ys"]:
                    yield self._completion(value + thought.strip().splitlines()[-1] + "\n")

    def _oasst(self, folder: Path) -> Iterator[Ask]:
        with gzip.open(folder / "oasst_en_100_tree.jsonl.gz", "rt") as lines:
            trees = [json.loads(line)["prompt"] for line in lines]
        for number, paths in enumerate(map(_paths, trees)):
            for messages in paths:
                yield self._chat(messages, in_words_of_anthropic=number % 2 == 1)

    def _mt_bench(self, folder: Path) -> Iterator[Ask]:
        for line in (folder / "mt_bench_question.jsonl").read_text().splitlines():
            first, second = json.loads(line)["turns"]
            yield self._chat([{"role": "user", "content": first}], follow_up=second)

    def _completion(self, prompt: str) -> Ask:
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
        return Ask(path="/v1/completions", body=body | self._length())

    def _chat(
        self, messages: Any, *, in_words_of_anthropic: bool = False, follow_up: str = ""
    ) -> Ask:
        body = {"model": self._model, "messages": messages, **self._length()}
        path = "/v1/messages" if in_words_of_anthropic else "/v1/chat/completions"
        return Ask(path=path, body=body, follow_up=follow_up)

    def _length(self) -> dict[str, int]:
        return {"max_tokens": self._dice.randint(*NUM_NEW)}


def _paths(message: Any, above: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    """Iterate over the conversations of a tree that a machine answers, depth first."""
    role = "user" if message["role"] == "prompter" else "assistant"
    here = (*above, {"role": role, "content": message["text"]})
    if sum(len(said["content"]) for said in here) > MOST_LETTERS:
        return
    if role == "user":
        yield list(here)
    for reply in message.get("replies", ()):
        yield from _paths(reply, here)
