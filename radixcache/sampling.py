"""A fixed number of blocks out of all that are ever asked for, the same ones each time.

Owns: which blocks are watched.  Does not know: what is noted of them.
Idea: spatial sampling.  A block is watched if the hash of its whole prefix is below a threshold, so
all uses of one block are seen or none.  As more blocks are met than there is memory for, the
threshold falls, and those above it are forgotten.

Source: Waldspurger et al. 2015 (SHARDS).
"""

from __future__ import annotations

from hashlib import blake2b
from heapq import heappop, heappush
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixcache.errors import InvalidConfig, InvariantViolation
from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES, Packed

_ALL = 1 << 64
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class PrefixSample:
    """Chooses blocks by the hash of the prefix that ends with them.

    block_size   tokens a block
    max_samples  blocks watched at most
    seed         which blocks are watched; whoever knew it could ask for blocks that never are

    Raises InvalidConfig for numbers below 1.
    """

    __slots__ = ("_by_hash", "_max_samples", "_salts", "_threshold", "_weights", "block_size")

    def __init__(self, *, block_size: int, max_samples: int, seed: int) -> None:
        if block_size < 1 or max_samples < 1:
            raise InvalidConfig("block_size and max_samples must be above 0")
        random = Random(seed)
        self.block_size = block_size
        self._max_samples = max_samples
        self._weights = np.array([random.getrandbits(64) | 1 for _ in range(block_size)], np.uint64)
        self._salts = random.getrandbits(64), random.getrandbits(64) | 1
        self._threshold = _ALL
        self._by_hash: list[int] = []  # a heap, of the hashes backwards

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def share(self) -> float:
        """Part of all blocks that is watched, from 0 to 1."""
        return self._threshold / _ALL

    def watched(self, namespace: Namespace, tokens: Packed) -> list[tuple[int, int]]:
        """Return which whole blocks of a run are to be watched, as (hash, place), by place.

        About 20 µs, and 12 ns a token.
        """
        num_blocks = len(tokens) // (self.block_size * TOKEN_BYTES)
        if not num_blocks:
            return []
        hashes = self._hashes(namespace, tokens, num_blocks)
        if self._threshold == _ALL:
            return list(zip(hashes.tolist(), range(num_blocks), strict=True))
        places = np.flatnonzero(hashes < np.uint64(self._threshold))
        return list(zip(hashes[places].tolist(), places.tolist(), strict=True))

    def admit(self, block: int) -> int | None:
        """Take a block in that is not watched yet; return which one is forgotten for it, if any.

        It may be the block itself.  O(log samples).
        """
        if block >= self._threshold:
            return block
        heappush(self._by_hash, -block)
        if len(self._by_hash) <= self._max_samples:
            return None
        self._threshold = -heappop(self._by_hash)
        return self._threshold

    def check(self, blocks: set[int]) -> None:
        """Raise InvariantViolation unless exactly these blocks are watched, and few enough."""
        hashes = {-negative for negative in self._by_hash}
        if hashes != blocks or len(hashes) != len(self._by_hash):
            raise InvariantViolation("what is noted is not what is watched")
        if len(hashes) > self._max_samples or any(h >= self._threshold for h in hashes):
            raise InvariantViolation("blocks are watched that should have been forgotten")

    def _hashes(self, namespace: Namespace, tokens: Packed, num_blocks: int) -> NDArray[np.uint64]:
        """Hash the prefix that ends with each whole block.

        A block is a sum of its tokens with random weights; a prefix is the sum of its blocks, each
        mixed with its place.  64 bits, as good as the weights are secret.
        """
        first, step = self._salts
        ids = np.frombuffer(tokens, np.int32, num_blocks * self.block_size)
        sums = ids.reshape(num_blocks, self.block_size).astype(np.uint64) @ self._weights
        name = blake2b(msgspec.json.encode(namespace), digest_size=8).digest()
        begin = (first + int.from_bytes(name, "little")) % _ALL  # the same in every process
        sums += np.arange(num_blocks, dtype=np.uint64) * np.uint64(step) + np.uint64(begin)
        return _mixed(np.cumsum(_mixed(sums), dtype=np.uint64))


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed 64-bit values (splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> _SHIFTS[0])) * _MIX[0]
    values = (values ^ (values >> _SHIFTS[1])) * _MIX[1]
    return values ^ (values >> _SHIFTS[2])
