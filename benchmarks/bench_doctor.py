"""What `radixcache doctor` finds in logs made of real texts, clean and with a known breaker.

    .venv/bin/python benchmarks/bench_doctor.py --data FOLDER [--model NAME] [--out FILE]

The texts are conversations of OpenAssistant, the two-turn questions of MT-Bench, and GSM8K's
questions behind its eight examples; `--data` is the folder of those files.  A row says what was
planted, what was found, and what the replay of the mended log saves.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.config import DEFAULT_MODEL
from runtime.doctor.diagnosis import Doctor
from runtime.doctor.log import request_of
from runtime.doctor.rendering import ModelRenderer, WordRenderer
from runtime.weights.checkpoint import open_checkpoint

Body = dict[str, Any]

SYSTEM = """\
You are the assistant of an open community. Answer in the language of the question.
Keep to what you know: where you are not sure, say so, and say what would settle it.
Give steps as a numbered list, code as a fenced block, and numbers with their units.
Never give medical, legal or financial advice without saying who should be asked instead.
If a question has several parts, answer each under a heading of its own, in their order.
Do not repeat the question, do not apologise, and do not end with an offer of more help."""

NAMES = ("Ann Meyer", "Bo Larsen", "Chioma Eze", "Dan Levi", "Eva Novak", "Farid Aziz")
NUM_CHATS, NUM_QUESTIONS = 60, 120


def chats(data: Path) -> list[list[Body]]:
    """Return conversations of OpenAssistant, by the first reply of each message."""
    found = []
    with gzip.open(data / "oasst_en_100_tree.jsonl.gz", "rt") as lines:
        for line in lines:
            node, said = json.loads(line)["prompt"], []
            while node is not None:
                role = "user" if node["role"] == "prompter" else "assistant"
                said.append({"role": role, "content": node["text"]})
                node = node["replies"][0] if node.get("replies") else None
            found.append(said)
    return found[:NUM_CHATS]


def requests_of(conversations: list[list[Body]]) -> list[Body]:
    """Return a body for each turn of the user's, conversations beside each other."""
    system = {"role": "system", "content": SYSTEM}
    turns = [
        (at, {"messages": [system, *said[: at + 1]]})
        for said in conversations
        for at, message in enumerate(said)
        if message["role"] == "user"
    ]
    return [body for _, body in sorted(turns, key=lambda turn: turn[0])]


def examples(data: Path) -> list[str]:
    """Return GSM8K's eight worked examples."""
    text = (data / "gsm8k-cot.yaml").read_text()
    pairs = re.findall(r"- question: (.*?)\n    target: (.*?)(?=\n  - |\n\w)", text, re.DOTALL)
    return [f"Q: {' '.join(q.split())}\nA: {' '.join(a.split())}" for q, a in pairs]


def questions(data: Path) -> list[str]:
    """Return GSM8K's questions."""
    with gzip.open(data / "gsm8k_test.jsonl.gz", "rt") as lines:
        return [json.loads(line)["question"] for line in lines][:NUM_QUESTIONS]


def two_turns(data: Path) -> list[list[Body]]:
    """Return MT-Bench's questions as conversations without replies of note."""
    found = []
    for line in (data / "mt_bench_question.jsonl").read_text().splitlines():
        first, second = json.loads(line)["turns"][:2]
        reply = {"role": "assistant", "content": f"About that: {first[:60]}."}
        found.append(
            [{"role": "user", "content": first}, reply, {"role": "user", "content": second}]
        )
    return found


def above(bodies: list[Body], text: Callable[[random.Random], str]) -> list[Body]:
    """Return bodies with a line above the system prompt that is made anew for each."""
    rng = random.Random(1)  # reproducible
    changed = []
    for body in bodies:
        system, *rest = body["messages"]
        line = f"{text(rng)}\n{system['content']}"
        changed.append({"messages": [system | {"content": line}, *rest]})
    return changed


def with_tools(bodies: list[Body], *, shuffled: bool) -> list[Body]:
    """Return bodies that offer six tools."""
    rng = random.Random(1)
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{name.replace('_', ' ').capitalize()} and return what was found.",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
            },
        }
        for name in ("search_web", "run_code", "read_file", "list_files", "send_mail", "ask_human")
    ]
    return [
        body | {"tools": rng.sample(tools, len(tools)) if shuffled else tools} for body in bodies
    ]


def trimmed(bodies: list[Body]) -> list[Body]:
    """Return bodies whose history is cut to its last four messages."""
    return [{"messages": [body["messages"][0], *body["messages"][1:][-4:]]} for body in bodies]


def logs(data: Path) -> dict[str, list[Body]]:
    """Return every log by its name; those that begin with "clean" have nothing planted."""
    talks, few, asked = requests_of(chats(data)), examples(data), questions(data)
    turns, rng = requests_of(two_turns(data)), random.Random(1)
    shots = "\n\n".join(few)
    return {
        "clean: OpenAssistant chats": talks,
        "clean: MT-Bench, two turns, six tools": with_tools(turns, shuffled=False),
        "clean: GSM8K, eight shots": [{"prompt": f"{shots}\n\nQ: {q}\nA:"} for q in asked],
        "chats, a clock on top": above(
            talks, lambda r: f"Current time: {r.randrange(24):02}:{r.randrange(60):02}"
        ),
        "chats, the user's name on top": above(talks, lambda r: f"User: {r.choice(NAMES)}"),
        "chats, an id of the request on top": above(
            talks, lambda r: f"Request id: {r.getrandbits(48):012x}"
        ),
        "chats, the last four messages only": trimmed(talks),
        "MT-Bench, tools in random order": with_tools(turns, shuffled=True),
        "GSM8K, examples shuffled": [
            {"prompt": "\n\n".join([*rng.sample(few, len(few)), f"Q: {q}\nA:"])} for q in asked
        ],
        "GSM8K, the question on top": [
            {"prompt": f"Answer this: {q}\n\nWorked examples:\n\n{shots}\n\nA:"} for q in asked
        ],
    }


def main() -> None:
    """Look at every log and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="or 'words'")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    checkpoint = None if args.model == "words" else open_checkpoint(args.model)
    for name, bodies in logs(args.data).items():
        renderer = (
            WordRenderer()
            if checkpoint is None
            else ModelRenderer(checkpoint.tokenizer(), checkpoint.chat_template())
        )
        log = [request_of(body, line=number) for number, body in enumerate(bodies, 1)]
        began = time.perf_counter()
        found = Doctor(renderer).examine(log)
        row = {
            "log": name,
            "requests": found.num_requests,
            "prompt_tokens": found.prompt_tokens,
            "hit_rate": round(found.hit_rate, 4),
            "mended_hit_rate": round(found.mended_hit_rate, 4),
            "reasons": {one.reason.value: one.saved_tokens for one in found.reasons},
            "seconds": round(time.perf_counter() - began, 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out is not None:
        machine = {"machine": platform.processor() or platform.machine(), "model": args.model}
        args.out.write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
