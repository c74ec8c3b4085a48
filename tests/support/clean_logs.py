"""Logs of requests in which nothing is amiss, though much of it looks as if there were.

Owns: programs that put what stays first and what changes last, each in a way that could be taken
for a prefix breaker.  Does not know: how breakers are found.
"""

from __future__ import annotations

import copy
import random
import uuid
from collections.abc import Callable
from typing import Any

from tests.support.chat_programs import Body, Program, Sent, paragraph, sentence


def _chats(rng: random.Random) -> list[Body]:
    return Program(rng).lines()


def _chats_without_replies(rng: random.Random) -> list[Body]:
    return [line["body"] for line in Program(rng).lines()]


def _clock_at_the_end(rng: random.Random) -> list[Body]:
    """The time stands in each message of the user's, and stays in the history as it was."""
    times: dict[tuple[int, int], str] = {}

    def told(rng: random.Random, sent: Sent) -> Body:
        users = [m for m in sent.body["messages"] if m["role"] == "user"]
        for turn, message in enumerate(users):
            time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
            message["content"] += f"\nTime: {times.setdefault((sent.conversation, turn), time)}"
        return sent.body

    return Program(rng).lines(told)


def _date_of_one_day(rng: random.Random) -> list[Body]:
    def told(rng: random.Random, sent: Sent) -> Body:
        sent.body["messages"][0]["content"] += "\nToday is 4 March 2025."
        return sent.body

    return Program(rng).lines(told)


def _name_of_each_user_in_the_first_message(rng: random.Random) -> list[Body]:
    names = [sentence(rng, length=2) for _ in range(5)]

    def told(rng: random.Random, sent: Sent) -> Body:
        sent.body["messages"][1]["content"] += f"\nYou talk to {names[sent.conversation]}"
        return sent.body

    return Program(rng).lines(told)


def _few_shots_in_one_order(rng: random.Random) -> list[Body]:
    return Program(rng, shots=True, conversations=20, turns=1).lines()


def _programs_beside_each_other(rng: random.Random) -> list[Body]:
    """Two programs with prompts, tools and models of their own, and two tenants."""
    lines: list[Body] = []
    for number in range(3):
        for line in Program(rng, conversations=3, turns=3).lines():
            line["body"]["model"] = f"model-{number % 2}"
            lines.append(line | {"tenant": f"tenant-{number}"})
    rng.shuffle(lines)
    return sorted(lines, key=lambda line: len(line["body"]["messages"]))


def _same_program_for_two_tenants(rng: random.Random) -> list[Body]:
    lines = Program(rng, conversations=6).lines()
    return [line | {"tenant": f"tenant-{number % 2}"} for number, line in enumerate(lines)]


def _agents_that_read_the_same_file(rng: random.Random) -> list[Body]:
    """Each has a task of its own, and then the same long result of a tool."""
    program, file = Program(rng), paragraph(rng, length=40)
    lines = []
    for _ in range(8):
        call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        messages: list[Body] = [
            {"role": "system", "content": program.system},
            {"role": "user", "content": paragraph(rng)},
        ]
        lines.append({"messages": copy.deepcopy(messages), "tools": program.tools})
        messages += [
            {"role": "assistant", "content": sentence(rng), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": file},
        ]
        lines.append({"messages": messages, "tools": program.tools})
    return lines


def _samples_of_one_prompt(rng: random.Random) -> list[Body]:
    """A prompt asked several times over, and each reply gone on from."""
    program = Program(rng)
    first = {"role": "user", "content": paragraph(rng)}
    system = {"role": "system", "content": program.system}
    lines: list[Body] = [{"messages": [system, first]} for _ in range(4)]
    for _ in range(6):
        reply = {"role": "assistant", "content": paragraph(rng, length=6)}
        lines.append({"messages": [system, first, reply, {"role": "user", "content": "Go on."}]})
    return lines


def _a_prompt_deployed_anew(rng: random.Random) -> list[Body]:
    """The system prompt is edited once, in the middle of the log."""

    def told(rng: random.Random, sent: Sent) -> Body:
        if sent.number >= 12:
            system = sent.body["messages"][0]
            system["content"] = system["content"].replace("an assistant", "a kind assistant")
        return sent.body

    return Program(rng, conversations=24, turns=1).lines(told)


def _documents_below(rng: random.Random) -> list[Body]:
    """Each prompt has other documents, behind rules and examples."""

    def told(rng: random.Random, sent: Sent) -> Body:
        question = sent.body["messages"][-1]
        documents = "\n".join(f"* {sentence(rng)}" for _ in range(6))
        question["content"] += f"\nDocuments:\n{documents}"
        return sent.body

    return Program(rng, conversations=20, turns=1).lines(told)


def _ids_in_questions(rng: random.Random) -> list[Body]:
    def told(rng: random.Random, sent: Sent) -> Body:
        order = uuid.UUID(int=rng.getrandbits(128), version=4)
        sent.body["messages"][-1]["content"] += f"\nOrder {order} of 2025-03-04 10:30, cwd /home/a"
        return sent.body

    return Program(rng, conversations=20, turns=1).lines(told)


def _trimmed_once(rng: random.Random) -> list[Body]:
    """History is cut in half once a conversation, not each turn."""

    def told(rng: random.Random, sent: Sent) -> Body:
        messages = sent.body["messages"]
        if sent.turn >= 5:
            sent.body["messages"] = [messages[0], *messages[7:]]
        return sent.body

    return Program(rng, conversations=1, turns=8).lines(told)


def _plain_prompts(rng: random.Random) -> list[Body]:
    rules = paragraph(rng, length=12)
    return [{"prompt": f"{rules}\nQ: {paragraph(rng, length=2)}\nA:"} for _ in range(20)]


def _prompts_with_nothing_in_common(rng: random.Random) -> list[Body]:
    said = [paragraph(rng, length=8) for _ in range(20)]
    return [{"messages": [{"role": "user", "content": text}]} for text in said]


def _the_same_prompt_always(rng: random.Random) -> list[Body]:
    return [{"prompt": paragraph(random.Random(1))} for _ in range(9)]


CLEAN: dict[str, Callable[[random.Random], list[Any]]] = {
    make.__name__.strip("_").replace("_", " "): make
    for make in (
        _chats,
        _chats_without_replies,
        _clock_at_the_end,
        _date_of_one_day,
        _name_of_each_user_in_the_first_message,
        _few_shots_in_one_order,
        _programs_beside_each_other,
        _same_program_for_two_tenants,
        _agents_that_read_the_same_file,
        _samples_of_one_prompt,
        _a_prompt_deployed_anew,
        _documents_below,
        _ids_in_questions,
        _trimmed_once,
        _plain_prompts,
        _prompts_with_nothing_in_common,
        _the_same_prompt_always,
    )
}
"""Clean logs by what they hold."""


def clean_log(name: str, seed: int) -> list[Body]:
    """Return a log in which nothing is amiss."""
    return CLEAN[name](random.Random(f"{name} {seed}"))  # reproducible
