"""What bench_core.py measures of a cache: look-ups, requests, evictions, conversations.

Owns: the token streams and what is timed.  Does not know: which cache it is; it speaks the verbs
of core_ours.py and its peers.
Idea: a workload is built once, then sampled again and again; a sample is the median of many calls.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

VOCABULARY = 128_000
POOL_TOKENS = 1 << 20
now = time.perf_counter


def token_ids(rng: np.random.Generator, count: int) -> Any:
    """Return random token ids, int32."""
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def calls(function: Callable[[], object], *, most: int = 2000, seconds: float = 0.05) -> float:
    """Return the median µs of a call; at least three calls."""
    durations: list[float] = []
    stop = now() + seconds
    while len(durations) < 3 or (now() < stop and len(durations) < most):
        began = now()
        function()
        durations.append(now() - began)
    return statistics.median(durations) * 1e6


def serve(cache: Any, run: Any) -> None:
    """Run one request through: everything in it is cached afterwards."""
    sequence = cache.begin(run)
    cache.publish(sequence)
    cache.end(sequence)


class Match:
    """A cached prompt of `length` tokens among 200 others.

    shape  "whole": published at once; "turns": 512 tokens at a time; "branches": so, and each turn
           got another answer once, so that every tree has a node for each
    """

    def __init__(self, cache: Any, *, block_size: int, length: int, shape: str = "whole") -> None:
        rng, turn = np.random.default_rng(0), 512
        spare = 200 * 1024 + 2 * length + (length // turn) * turn
        cache.build(block_size, spare // block_size)
        for _ in range(200):
            serve(cache, cache.run_of(token_ids(rng, 1024)))
        prompt, other = cache.run_of(token_ids(rng, length)), token_ids(rng, turn)
        if shape != "whole" and cache.by_turns:
            for end in range(turn, length, turn):
                serve(cache, cache.head(prompt, end))
                if shape == "branches":
                    branch = cache.run_of(other[: max(block_size, 16)])
                    serve(cache, cache.head(prompt, end) + branch)
        serve(cache, prompt)
        self.cache, self.key = cache, cache.key(prompt)
        found, least = cache.match(self.key), length - block_size
        assert found >= least, f"{cache.name} found {found} of {length}"

    def sample(self) -> dict[str, float]:
        result = {"us": calls(lambda: self.cache.match(self.key))}
        if hasattr(self.cache, "match_len"):
            result["match_len_us"] = calls(lambda: self.cache.match_len(self.key))
        return result


class Lookup:
    """The same, from the list of ints that a tokenizer gives."""

    def __init__(self, cache: Any, *, block_size: int, length: int) -> None:
        cache.build(block_size, 2 * length // block_size)
        ids = token_ids(np.random.default_rng(0), length)
        serve(cache, cache.run_of(ids))
        self.cache, self.ids = cache, ids.tolist()

    def sample(self) -> dict[str, float]:
        return {"us": calls(lambda: self.cache.match(self.cache.key_of_list(self.ids)))}


class Cycle:
    """Requests of `suffix` new tokens behind a cached prefix."""

    def __init__(
        self, cache: Any, *, block_size: int, prefix: int, suffix: int, samples: int, shape: str
    ) -> None:
        self.rng, turn = np.random.default_rng(0), 512
        self.count = 100 if prefix <= 4096 else 20
        tokens = 3 * prefix + (samples + 1) * self.count * (suffix + block_size)
        cache.build(block_size, tokens // block_size)
        self.cache, self.suffix = cache, suffix
        self.prefix = cache.run_of(token_ids(self.rng, prefix))
        if shape == "branches" and cache.by_turns:
            other = token_ids(self.rng, max(block_size, 16))
            for end in range(turn, prefix, turn):
                serve(cache, cache.head(self.prefix, end) + cache.run_of(other))
        serve(cache, self.prefix)
        self.sample()  # the prefix is cut from its first continuation once

    def sample(self) -> dict[str, float]:
        cache, parts = self.cache, []
        runs = [
            self.prefix + cache.run_of(token_ids(self.rng, self.suffix)) for _ in range(self.count)
        ]
        for run in runs:
            began = now()
            sequence = cache.begin(run)
            begun = now()
            cache.publish(sequence)
            published = now()
            cache.end(sequence)
            parts.append((now() - began, begun - began, published - begun))
        medians = [statistics.median(part) * 1e6 for part in zip(*parts, strict=True)]
        return dict(zip(("us", "begin_us", "publish_us"), medians, strict=True))


class Leaves:
    """A full pool: `leaves` prompts of one block, nobody using them."""

    def __init__(self, cache: Any, *, block_size: int, leaves: int, policy: str = "lru") -> None:
        if policy == "lru":
            cache.build(block_size, leaves)
        else:
            cache.build(block_size, leaves, policy)
        self.cache, self.block_size, self.served = cache, block_size, 0
        self.tail = np.full(block_size, 7, np.int32)
        self.fill(leaves)

    def run(self) -> Any:
        """Return a prompt of one block that nobody has seen."""
        self.tail[0] = self.served
        self.served += 1
        return self.cache.run_of(self.tail)

    def fill(self, count: int) -> None:
        for _ in range(count):
            serve(self.cache, self.run())


class Evict(Leaves):
    """Evict blocks one at a time, and many at once, among `leaves`.

    Under policies other than LRU every fourth leaf was hit once, so that ranks are mixed.
    """

    def __init__(self, cache: Any, *, block_size: int, leaves: int, policy: str = "lru") -> None:
        self.every = 0 if policy == "lru" else 4
        super().__init__(cache, block_size=block_size, leaves=leaves, policy=policy)

    def fill(self, count: int) -> None:
        for _ in range(count):
            run = self.run()
            serve(self.cache, run)
            if self.every and self.served % self.every == 0:
                self.cache.end(self.cache.begin(run + run[: self.cache.token_bytes]))

    def sample(self) -> dict[str, float]:
        single = [0]

        def evict() -> None:
            self.cache.evict(1)
            single[0] += 1

        one = calls(evict, most=200, seconds=0.5)
        many = min(1000, len(self) // 10)
        began = now()
        self.cache.evict(many)
        share = (now() - began) / many * 1e6
        self.fill(single[0] + many)
        return {"us": one, "thousand_us": share}

    def __len__(self) -> int:
        return self.cache.num_cached_tokens() // self.block_size


class Full(Leaves):
    """Every request is new and needs the block that is evicted for it."""

    def sample(self) -> dict[str, float]:
        cache = self.cache
        runs = [self.run() for _ in range(300)]
        left = iter(runs)
        return {"us": calls(lambda: serve(cache, next(left)), most=300, seconds=1.0)}


class Chat:
    """Conversations of eight turns, 64 at a time: 64 tokens asked, 128 answered a turn."""

    def __init__(self, cache: Any, *, block_size: int) -> None:
        self.rng, self.choice = np.random.default_rng(7), random.Random(7)
        cache.build(block_size, POOL_TOKENS // block_size)
        self.cache = cache
        self.systems = [cache.run_of(token_ids(self.rng, 2048)) for _ in range(1000)]
        self.order = zipf(1000, 20_000)
        self.chats = [[self.system(), 0] for _ in range(64)]
        for _ in range(4000):
            self.turn()

    def system(self) -> Any:
        return self.systems[next(self.order)]

    def turn(self) -> float:
        cache, chat = self.cache, self.choice.choice(self.chats)
        prompt = chat[0] + cache.run_of(token_ids(self.rng, 64))
        answer = cache.run_of(token_ids(self.rng, 128))
        began = now()
        sequence = cache.begin(prompt)
        cache.publish(sequence)
        cache.extend(sequence, answer)
        cache.end(sequence)
        took = now() - began
        chat[:] = (prompt + answer, chat[1] + 1) if chat[1] < 7 else (self.system(), 0)
        return took

    def sample(self) -> dict[str, float]:
        turns = [self.turn() for _ in range(500)]
        return {"us": statistics.fmean(turns) * 1e6, "median_us": statistics.median(turns) * 1e6}


def zipf(kinds: int, count: int) -> Iterator[int]:
    """Iterate over `count` choices among `kinds`, the first the most frequent."""
    weights = 1.0 / np.arange(1, kinds + 1) ** 1.1
    choices = np.random.default_rng(7).choice(kinds, size=count, p=weights / weights.sum())
    return iter(choices.tolist())


class Floor:
    """One comparison of the bytes that a match must compare at least, and nothing else.

    `with_ids_us` is that and one copy of the block ids that a match gives back, int32.
    """

    def __init__(self, length: int, block_size: int) -> None:
        self.key = token_ids(np.random.default_rng(0), length).tobytes()
        self.edge = bytearray(self.key)
        self.ids = bytearray(4 * (length // block_size))

    def sample(self) -> dict[str, float]:
        key, edge = self.key, self.edge
        ids = self.ids
        return {
            "us": calls(lambda: key.startswith(edge, 0)),
            "with_ids_us": calls(lambda: (key.startswith(edge, 0), bytes(ids))),
        }
