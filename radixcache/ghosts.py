"""A bounded memory of what was evicted, to tell "no longer cached" from "never seen".

Owns: which prefixes were evicted lately, and when.  Does not know: why they were, or who asks.
Idea: a prefix is remembered as one 64-bit hash of it, chained block by block, with the time; the
oldest is forgotten first.  As children are evicted before their parents, what is remembered of a
prompt is never missing its begin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from radixcache.config import CacheConfig
from radixcache.errors import InvalidConfig, InvariantViolation
from radixcache.hashing import ChainTable
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, Packed
from radixcache.tree import RadixTree

_HASH_BYTES = 8


class Evicted(msgspec.Struct, frozen=True):
    """What is remembered of a prompt beyond its cached part.

    num_blocks  blocks that follow the cached part and were once cached themselves, without a gap
    first_at    when the first of them was evicted; None where there is none
    """

    num_blocks: int
    first_at: float | None


class GhostMemory:
    """Remembers the last blocks that a `RadixCache` evicted.  A `TreeObserver`.

    max_blocks  evicted blocks remembered at most, about 150 bytes each
    block_size  that of the cache
    clock       tells the time of an eviction; without one, time is the number of blocks evicted
                before

    Keeps 8 bytes for each cached block beside.  Raises InvalidConfig for numbers below 1.
    Two prefixes share a hash about once in 2⁶⁰ pairs: good for an explanation, not for sharing.

    >>> from radixcache import CacheConfig, PrefixKey, RadixCache, pack_tokens
    >>> ghosts = GhostMemory(max_blocks=8, block_size=2)
    >>> cache = RadixCache(CacheConfig(num_blocks=4, block_size=2), observers=[ghosts])
    >>> lease = cache.acquire(PrefixKey.of([1, 2, 3, 4]))
    >>> _ = cache.commit(lease, 4), cache.release(lease), cache.evict(1)
    >>> ghosts.lookup(Namespace(), pack_tokens([1, 2, 3, 4, 5, 6]), num_cached=2)
    Evicted(num_blocks=1, first_at=0)
    """

    __slots__ = ("_block_size", "_clock", "_ghosts", "_max_blocks", "_num_evicted", "_table")

    def __init__(
        self, *, max_blocks: int, block_size: int, clock: Callable[[], float] | None = None
    ) -> None:
        if max_blocks < 1 or block_size < 1:
            raise InvalidConfig("max_blocks and block_size must be at least 1")
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._clock = clock
        self._num_evicted = 0
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()  # oldest first
        self._table = ChainTable(_hashes, _HASH_BYTES)

    def __len__(self) -> int:
        """Return how many evicted blocks are remembered."""
        return len(self._ghosts)

    def lookup(self, namespace: Namespace, tokens: Packed, *, num_cached: int) -> Evicted:
        """Tell what is remembered of a prompt behind the part of it that is cached.

        tokens      packed ids of the prompt
        num_cached  tokens of it that are cached; a block begun counts as not cached

        Hashes the prompt from its begin, about 0.25 µs a block of 16 tokens.
        """
        first = num_cached // self._block_size
        hashes = _hashes(namespace, tokens, block_size=self._block_size, parent=b"")
        times = list(map(self._ghosts.get, hashes[first:]))
        num_blocks = times.index(None) if None in times else len(times)
        return Evicted(num_blocks, times[0] if num_blocks else None)

    def check(self, tree: RadixTree) -> None:
        """Raise InvariantViolation unless the memory is bounded and its hashes are the tree's."""
        self._table.check(tree)
        if len(self._ghosts) > self._max_blocks:
            raise InvariantViolation(f"{len(self._ghosts)} > {self._max_blocks} ghosts remembered")

    def stored(self, node: Node, num_blocks: int) -> None:
        """Note that the last blocks of an edge were published: they are ghosts no more."""
        grown = self._table.stored(node, num_blocks)
        for ghost in grown.hashes if grown else ():
            self._ghosts.pop(ghost, None)

    def removed(self, node: Node, num_blocks: int) -> None:
        """Note that the last blocks of a leaf are evicted, the last one first."""
        now = self._clock() if self._clock else self._num_evicted
        for ghost in self._table.removed(node, num_blocks):
            self._ghosts[ghost] = now
        self._num_evicted += num_blocks
        while len(self._ghosts) > self._max_blocks:
            self._ghosts.popitem(last=False)

    def split(self, upper: Node, lower: Node) -> None:
        """Note that an edge was cut."""
        self._table.split(upper, lower)


def _hashes(namespace: Namespace, tokens: Packed, *, block_size: int, parent: bytes) -> list[bytes]:
    """64-bit hashes of the whole blocks of a run; Python's own hash, so of this process alone."""
    run = bytes(tokens)
    block_bytes = block_size * TOKEN_BYTES
    hashes = []
    current = hash(namespace) if not parent else int.from_bytes(parent, "little", signed=True)
    for end in range(block_bytes, len(run) + 1, block_bytes):
        current = hash((current, run[end - block_bytes : end]))
        hashes.append(current.to_bytes(_HASH_BYTES, "little", signed=True))
    return hashes


def remember_ghosts(config: CacheConfig, clock: Callable[[], float] | None) -> GhostMemory | None:
    """Return the memory that a cache's settings ask for, None where they ask for none."""
    if not config.max_ghosts:
        return None
    return GhostMemory(max_blocks=config.max_ghosts, block_size=config.block_size, clock=clock)
