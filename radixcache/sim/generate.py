"""Synthetic traces with named parameters, for whoever has none.

Owns: three kinds of traffic and their parameters.  Does not know: caches, files.
Idea: a request is a list of segments, and a segment is a name and a length; blocks are cut from the
list, so no token is ever made.

    chat       sessions that come at random, share a system prompt, and grow by a turn at a time
    agents     tasks that branch: each step tries several continuations and goes on with some
    few-shot   questions behind one of several long preambles, some far more popular than others
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from random import Random
from typing import NamedTuple

import msgspec

from radixcache.errors import InvalidTrace
from radixcache.sim.trace import BlockNames, Trace, TraceRequest

Segment = tuple[int, int]
"""A name of some text, and its tokens."""


class Asked(NamedTuple):
    """One request before it is cut into blocks: when, behind what, and what it is answered."""

    at_s: float
    prompt: tuple[Segment, ...]
    answer: Segment


class Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all kinds have: `rate`, of new sessions, tasks or questions a second, and a seed."""

    rate: float = 0.5
    seed: int = 0

    def asked(self, random: Random) -> Iterator[Asked]:
        """Yield the requests in the order of their arrival."""
        raise NotImplementedError


class Chat(Traffic, frozen=True, kw_only=True):
    """Sessions of a chat.

    sessions       how many
    turns          of a session, on average (geometric)
    system_tokens  of the prompt that all share
    user_tokens    of a user's message, on average (exponential)
    answer_tokens  of an answer, on average
    think_s        seconds between an answer and the next message, on average
    """

    sessions: int = 500
    turns: float = 5.0
    system_tokens: int = 1024
    user_tokens: float = 200.0
    answer_tokens: float = 300.0
    think_s: float = 60.0

    def asked(self, random: Random) -> Iterator[Asked]:
        """Yield the turns of all sessions as they come."""
        at, names = 0.0, iter(range(1, 2**62))
        coming: list[tuple[float, int, tuple[Segment, ...]]] = []
        for session in range(self.sessions):
            at += random.expovariate(self.rate)
            coming.append((at, session, ((0, self.system_tokens),)))
        heapify(coming)
        while coming:
            at, session, history = heappop(coming)
            prompt = (*history, (next(names), _length(random, self.user_tokens)))
            answer = (next(names), _length(random, self.answer_tokens))
            yield Asked(at, prompt, answer)
            if random.random() * self.turns >= 1.0:
                later = at + random.expovariate(1 / self.think_s)
                heappush(coming, (later, session, (*prompt, answer)))


class Agents(Traffic, frozen=True, kw_only=True):
    """Tasks of agents that search a tree.

    tasks          how many
    depth          steps of a task
    branching      continuations tried at each step
    kept           of those, continuations that the next step goes on from
    system_tokens  of the prompt that all tasks share, tools included
    task_tokens    of a task's description, on average
    step_tokens    of a continuation, on average
    step_s         seconds between two steps of a task, on average
    """

    tasks: int = 100
    depth: int = 6
    branching: int = 3
    kept: int = 1
    system_tokens: int = 3072
    task_tokens: float = 800.0
    step_tokens: float = 250.0
    step_s: float = 10.0

    def asked(self, random: Random) -> Iterator[Asked]:
        """Yield the steps of all tasks as they come."""
        at, names = 0.0, iter(range(1, 2**62))
        coming: list[tuple[float, int, int, list[tuple[Segment, ...]]]] = []
        for task in range(self.tasks):
            at += random.expovariate(self.rate)
            text = (next(names), _length(random, self.task_tokens))
            coming.append((at, task, 0, [((0, self.system_tokens), text)]))
        heapify(coming)
        while coming:
            at, task, step, branches = heappop(coming)
            grown = []
            for branch in branches:
                for _ in range(self.branching):
                    answer = (next(names), _length(random, self.step_tokens))
                    grown.append((*branch, answer))
                    yield Asked(at, branch, answer)
            if step + 1 < self.depth:
                later = at + random.expovariate(1 / self.step_s)
                kept = random.sample(grown, min(self.kept, len(grown)))
                heappush(coming, (later, task, step + 1, kept))


class FewShot(Traffic, frozen=True, kw_only=True):
    """Questions behind preambles of examples.

    questions        how many
    preambles        different preambles
    skew             exponent of their popularity (Zipf); 0: all alike
    preamble_tokens  of a preamble, on average
    question_tokens  of a question, on average
    answer_tokens    of an answer, on average
    """

    questions: int = 2000
    preambles: int = 50
    skew: float = 1.0
    preamble_tokens: float = 3000.0
    question_tokens: float = 120.0
    answer_tokens: float = 100.0

    def asked(self, random: Random) -> Iterator[Asked]:
        """Yield the questions as they come."""
        at, names = 0.0, iter(range(self.preambles, 2**62))
        lengths = [_length(random, self.preamble_tokens) for _ in range(self.preambles)]
        weights = [(place + 1) ** -self.skew for place in range(self.preambles)]
        for chosen in random.choices(range(self.preambles), weights, k=self.questions):
            at += random.expovariate(self.rate)
            question = (next(names), _length(random, self.question_tokens))
            answer = (next(names), _length(random, self.answer_tokens))
            yield Asked(at, ((chosen, lengths[chosen]), question), answer)


KINDS: dict[str, type[Traffic]] = {"chat": Chat, "agents": Agents, "few-shot": FewShot}
"""Kinds of traffic by name."""


def traffic_of(text: str) -> Traffic | None:
    """Read `kind` or `kind:name=number,…`; None for what names no kind, such as a file.

    Raises InvalidTrace for a parameter that the kind has not, or a value that it can't have.

    >>> traffic_of("chat:sessions=3").sessions
    3
    """
    name, _, rest = text.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        return None
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        given[key.strip()] = value.strip()
    try:
        traffic = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise InvalidTrace(f"{text}: {error}; {name} has {known}") from None
    for key in kind.__struct_fields__:
        value = getattr(traffic, key)
        if not math.isfinite(value) or value < 0 or (value == 0 and key not in _MAY_BE_0):
            raise InvalidTrace(f"{text}: {key} must be a number above 0, not {value}")
    return traffic


def generate(traffic: Traffic, *, block_size: int, title: str = "") -> Trace:
    """Return a trace of some traffic, in whole blocks; the same seed gives the same trace.

    O(blocks of all requests).  Raises InvalidTrace for a block size below 1.
    """
    if block_size < 1:
        raise InvalidTrace(f"a block has at least one token, not {block_size}")
    names, requests = BlockNames(), []
    for asked in traffic.asked(Random(traffic.seed)):
        path = names.path(_blocks((*asked.prompt, asked.answer), block_size))
        prompt_tokens = sum(length for _, length in asked.prompt)
        first = prompt_tokens // block_size
        requests.append(
            TraceRequest(
                arrival_s=asked.at_s,
                prompt=path[:first],
                answer=path[first:],
                prompt_tokens=prompt_tokens,
                output_tokens=asked.answer[1],
            )
        )
    return Trace(
        title=title or type(traffic).__name__,
        block_size=block_size,
        requests=requests,
        num_distinct=len(names),
    )


_MAY_BE_0 = ("seed", "skew", "system_tokens")


def _length(random: Random, mean: float) -> int:
    """A length with that mean, at least one token."""
    return 1 + int(random.expovariate(1 / mean))


def _blocks(
    segments: tuple[Segment, ...], block_size: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """What stands in each whole block: pieces of segments by name and first token."""
    block: list[tuple[int, int]] = []
    filled = 0
    for name, length in segments:
        at = 0
        while at < length:
            block.append((name, at))
            step = min(length - at, block_size - filled)
            at, filled = at + step, filled + step
            if filled == block_size:
                yield tuple(block)
                block, filled = [], 0
