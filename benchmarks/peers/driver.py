"""A crowd that plays a workload, and what it saw.

Owns: a closed loop over a workload's nodes.  Does not know: how servers start, what they are.
Idea: so many clients, each with one request at a time; a node may be sent once its parent was
answered, and who may be sent earlier goes first.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks.peers.client import Answer
from benchmarks.peers.workloads import Node

Ask = Callable[[list[int], int], Answer]


class TooLate(Exception):
    """The workload's time is over."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts and answers of all nodes by id, and the seconds that they took together."""

    wall_s: float
    prompts: dict[str, list[int]]
    answers: dict[str, Answer]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in numbers.

    requests          that were sent, of so many `of`
    computed, cached  prompt tokens; None where the server does not tell
    """

    requests: int
    of: int
    wall_s: float
    ttft_median_ms: float
    ttft_p95_ms: float
    prompt_tokens: int
    computed: int | None
    cached: int | None
    output_tokens: int
    output_tokens_s: float


class _Crowd:
    """State of a run; the clients' threads share it under one lock."""

    def __init__(self, nodes: Sequence[Node], ask: Ask) -> None:
        self.ask = ask
        self.children: dict[str, list[Node]] = {}
        for node in nodes:
            self.children.setdefault(node.parent, []).append(node)
        self.ready = deque(self.children.get("", ()))
        self.left = len(nodes)
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, Answer] = {}
        self.error: Exception | None = None
        self.changed = threading.Condition()

    def client(self) -> None:
        """Send one request after another until there are none, or one failed."""
        while (node := self._next()) is not None:
            try:
                answer = self.ask(self.prompts[node.id], node.max_tokens)
            except Exception as error:  # any: told by `play`, where somebody waits for it
                with self.changed:
                    self.error = error
                    self.changed.notify_all()
                return
            with self.changed:
                self.answers[node.id] = answer
                self.ready.extend(self.children.get(node.id, ()))
                self.left -= 1
                self.changed.notify_all()

    def _next(self) -> Node | None:
        with self.changed:
            self.changed.wait_for(lambda: self.ready or self.over)
            if self.over:
                return None
            node = self.ready.popleft()
            before = (
                [*self.prompts[node.parent], *self.answers[node.parent].tokens]
                if node.parent
                else []
            )
            self.prompts[node.id] = before + node.tokens
            return node

    @property
    def over(self) -> bool:
        return self.left == 0 or self.error is not None


def play(nodes: Sequence[Node], ask: Ask, *, clients: int, limit_s: float) -> Played:
    """Send all requests of a workload.

    ask      sends one and returns its answer; called from `clients` threads
    limit_s  seconds that the workload may take
    Errors: whatever `ask` raises; TooLate, and then the threads still wait for their answers.
    """
    crowd = _Crowd(nodes, ask)
    began = time.perf_counter()
    for _ in range(clients):
        threading.Thread(target=crowd.client, daemon=True).start()
    with crowd.changed:
        in_time = crowd.changed.wait_for(lambda: crowd.over, limit_s)
        if not in_time:
            crowd.error = TooLate(f"{crowd.left} requests were left after {limit_s:.0f} s")
    wall = time.perf_counter() - began
    if crowd.error is not None:
        raise crowd.error
    return Played(wall_s=wall, prompts=crowd.prompts, answers=crowd.answers)


def see(played: Played, *, of: int) -> Seen:
    """Return a run in numbers.  of: requests of the whole workload."""
    answers = list(played.answers.values())
    firsts = sorted(answer.ttft_s * 1e3 for answer in answers)
    prompt_tokens = sum(map(len, played.prompts.values()))
    output_tokens = sum(len(answer.tokens) for answer in answers)
    told = [answer.cached for answer in answers if answer.cached is not None]
    cached = sum(told) if len(told) == len(answers) else None
    return Seen(
        requests=len(answers),
        of=of,
        wall_s=round(played.wall_s, 2),
        ttft_median_ms=round(statistics.median(firsts), 1),
        ttft_p95_ms=round(firsts[-(-95 * len(firsts) // 100) - 1], 1),
        prompt_tokens=prompt_tokens,
        computed=None if cached is None else prompt_tokens - cached,
        cached=cached,
        output_tokens=output_tokens,
        output_tokens_s=round(output_tokens / played.wall_s, 1),
    )


def agreement(ours: Played, theirs: Played) -> dict[str, int]:
    """Return how many requests had the same prompt on both servers, and then the same answer."""
    shared: Mapping[str, list[int]] = {
        name: prompt for name, prompt in theirs.prompts.items() if ours.prompts.get(name) == prompt
    }
    same = [name for name in shared if ours.answers[name].tokens == theirs.answers[name].tokens]
    return {"same_prompts": len(shared), "same_answers": len(same)}
