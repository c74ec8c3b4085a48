"""What a verification tries: prompts, and the manners in which they are computed.

Owns: both lists, quick and thorough.  Does not know: engines, models, comparing.
Idea: two prompts leave a first one inside a block and behind its end, so each scenario has whole
hits, partial blocks, copies and misses; what differs between scenarios is how the work is cut.

    first    |--------------------- 280 tokens ---------------------|
    second   |------------ 203 ------------|-- 30 others --|
    third    |--------------------- 280 ---------------------|-- 20 --|
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

BLOCK_SIZES = (1, 16, 64)
CHUNKS = (1, 7, 64, 512, 0)
COMPANIONS = (0, 1, 7, 31)
LONG, SHORT = 280, 40
"""Tokens of the first prompt: across a border of attention's tiles, or quick in chunks of one."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One manner of computing the prompts.

    block_size  tokens a block
    chunk       tokens of a prompt that a step computes; 0: all
    cached      whether the prefix cache is on
    companions  other requests in the batch of the second round
    preempted   every sequence gives its blocks back after each token
    branches    continuations of each prompt, forked where it ends
    tight       the pool holds little more than one request, so that each evicts the one before
    length      tokens of the first prompt
    """

    block_size: int = 16
    chunk: int = 0
    cached: bool = True
    companions: int = 0
    preempted: bool = False
    branches: int = 1
    tight: bool = False
    length: int = LONG

    def __str__(self) -> str:
        words = [f"blocks of {self.block_size}"]
        words.append(f"chunks of {self.chunk}" if self.chunk else "whole prompts")
        words.append("cache" if self.cached else "no cache")
        words.append(f"{self.companions} companions" if self.companions else "alone")
        if self.branches > 1:
            words.append(f"{self.branches} branches")
        words += ["preempted at each token"] * self.preempted + ["evicted"] * self.tight
        return ", ".join(words)


def quick() -> list[Scenario]:
    """Return a dozen scenarios in which every setting occurs."""
    return [
        Scenario(cached=False),
        Scenario(cached=False, chunk=64, companions=7),
        Scenario(),
        Scenario(block_size=1, chunk=7, companions=1),
        Scenario(block_size=64, chunk=64, companions=7),
        Scenario(chunk=512, companions=31),
        Scenario(chunk=1, companions=1, length=SHORT),
        Scenario(companions=1, preempted=True),
        Scenario(block_size=1, branches=3, length=SHORT),
        Scenario(block_size=64, companions=1, branches=2, preempted=True),
        Scenario(chunk=64, tight=True),
        Scenario(block_size=1, tight=True, length=SHORT),
    ]


def thorough() -> list[Scenario]:
    """Return every block size × chunk × company with the cache, and the rest beside them."""
    chunks = [(chunk, SHORT if chunk == 1 else LONG) for chunk in CHUNKS]
    return [
        *quick(),
        *(
            Scenario(block_size=block, chunk=chunk, companions=company, length=length)
            for block in BLOCK_SIZES
            for chunk, length in chunks
            for company in COMPANIONS
        ),
        *(Scenario(cached=False, chunk=chunk, length=length) for chunk, length in chunks),
        *(
            Scenario(
                block_size=block, chunk=7, companions=7, preempted=preempted, branches=branches
            )
            for block in BLOCK_SIZES
            for preempted in (False, True)
            for branches in (1, 3)
        ),
        *(Scenario(block_size=block, chunk=7, tight=True) for block in BLOCK_SIZES),
        Scenario(chunk=1),
        Scenario(length=3 * LONG, chunk=64, companions=31),
    ]


def prompts(length: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """Return the three prompts whose first one has so many tokens: random ids, the same by seed."""
    draw = random.Random(f"{seed}:{length}")

    def ids(count: int) -> list[int]:
        """Draw so many token ids."""
        return [draw.randrange(vocab_size) for _ in range(count)]

    first = ids(length)
    cut = length * 8 // 11
    while cut % 16 in (0, 15):  # inside a block, whatever its size
        cut -= 1
    return [first, [*first[:cut], *ids(length // 9)], [*first, *ids(length // 14)]]


def companions(count: int, *, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """Yield short prompts, each of another length."""
    for index in range(count):
        draw = random.Random(f"{seed}:companion {index}")
        yield [draw.randrange(vocab_size) for _ in range(3 + 2 * index)]
