"""A chat program whose requests a log is made of.

Owns: texts that are like no other, and who says what when.  Does not know: what is wrong with it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

Body = dict[str, Any]

_TEXT = """
answer basket border bridge candle carbon castle circle copper cotton county credit desert dinner
dragon editor effort engine expert fabric family farmer figure filter flight forest garden gather
ground harbor harvest island jacket kitchen ladder launch leader letter linen market master matter
meadow middle mirror moment motion narrow nature needle number orange palace parcel pencil people
planet pocket policy powder prison profit rabbit reason record rescue ribbon river saddle sample
school season secret shadow signal silver singer spirit spring square stable station stream summer
supply switch table temple tenant thread ticket timber tunnel valley velvet village vision volume
wander weapon weather window winter wonder yellow
"""
WORDS = _TEXT.split()


class Sent(NamedTuple):
    """A request about to be sent.

    body          the clean body; may be changed
    conversation  which conversation it belongs to
    turn          which of its turns, from 0
    number        place in the log
    """

    body: Body
    conversation: int
    turn: int
    number: int


Breaker = Callable[[random.Random, Sent], Body]


def sentence(rng: random.Random, *, length: int = 9) -> str:
    """Return a sentence that is like no other."""
    words = [rng.choice(WORDS) for _ in range(length)]
    return f"{words[0].capitalize()} {' '.join(words[1:])}."


def paragraph(rng: random.Random, *, length: int = 4) -> str:
    """Return a few sentences."""
    return " ".join(sentence(rng) for _ in range(length))


class Program:
    """A chat program: one system prompt, some tools, several conversations at once."""

    def __init__(
        self, rng: random.Random, *, conversations: int = 5, turns: int = 4, shots: bool = False
    ) -> None:
        self.rng = rng
        self.rules = [f"- {sentence(rng)}" for _ in range(10)]
        self.tools = [_tool(rng, name) for name in ("search", "add", "weather", "translate")]
        self.shots: list[Body] = []
        for _ in range(4 if shots else 0):
            self.shots += [
                {"role": "user", "content": paragraph(rng, length=2)},
                {"role": "assistant", "content": paragraph(rng, length=2)},
            ]
        self._histories: list[list[Body]] = [[] for _ in range(conversations)]
        self._left = [turns] * conversations

    @property
    def system(self) -> str:
        """The system prompt."""
        return "\n".join(["You are an assistant of a shop. Keep to these rules:", *self.rules])

    def lines(self, breaker: Breaker | None = None) -> list[Body]:
        """Return the log's lines, all turns of all conversations, in an order of the rng's."""
        lines: list[Body] = []
        while any(self._left):
            which = self.rng.choice([i for i, left in enumerate(self._left) if left])
            history = self._histories[which]
            history.append({"role": "user", "content": paragraph(self.rng, length=2)})
            system = {"role": "system", "content": self.system}
            body = copy.deepcopy({"messages": [system, *self.shots, *history]})
            body["tools"] = copy.deepcopy(self.tools)
            if breaker is not None:
                body = breaker(self.rng, Sent(body, which, len(history) // 2, len(lines)))
            reply = paragraph(self.rng)
            history.append({"role": "assistant", "content": reply})
            self._left[which] -= 1
            answer = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
            lines.append({"body": body, "response": answer})
        return lines


def _tool(rng: random.Random, name: str) -> Body:
    properties = {
        rng.choice(WORDS): {"type": "string", "description": sentence(rng)} for _ in range(3)
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    function = {"name": name, "description": sentence(rng), "parameters": parameters}
    return {"type": "function", "function": function}
