"""Counters of the cache as one frozen record.

Owns: the names and what they count.  Does not know: where they are shown.
"""

from __future__ import annotations

import msgspec


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """The cache in numbers.  Blocks: free + private + pinned + evictable = num_blocks.

    num_blocks        blocks in the pool
    num_free          blocks without an owner
    num_private       blocks held by leases alone, not (yet) published
    num_pinned        blocks of the tree that a lease stands on or below
    num_evictable     blocks of the tree that nobody stands on
    num_nodes         nodes of the tree, over all namespaces
    num_leases        leases not released yet
    num_holds         prefixes held by `retain`, neither released nor expired
    queries           times that a prompt was acquired, failures not counted
    query_tokens      tokens of those prompts
    hit_tokens        of those, tokens found in the cache
    published_blocks  blocks that the tree took over
    twin_blocks       blocks given up because another lease had published the same tokens first
    evicted_blocks    cached blocks given up, to make room or by `drop`
    trims             times that a leaf lost its tail only
    out_of_blocks     calls refused because too few blocks were free or evictable
    """

    num_blocks: int
    num_free: int
    num_private: int
    num_pinned: int
    num_evictable: int
    num_nodes: int
    num_leases: int
    num_holds: int
    queries: int
    query_tokens: int
    hit_tokens: int
    published_blocks: int
    twin_blocks: int
    evicted_blocks: int
    trims: int
    out_of_blocks: int


class NamespaceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace in numbers; blocks and counts as in `CacheStats`.

    soft_limit  blocks that others can't evict from it
    hard_limit  blocks that it may own at most; None without limit
    """

    soft_limit: int
    hard_limit: int | None
    num_private: int
    num_pinned: int
    num_evictable: int
    queries: int
    query_tokens: int
    hit_tokens: int
    published_blocks: int
    twin_blocks: int
    evicted_blocks: int
    trims: int
    out_of_blocks: int


class Counters:
    """The running counts behind the records; the cache alone changes them."""

    __slots__ = (
        "evicted_blocks",
        "hit_tokens",
        "out_of_blocks",
        "published_blocks",
        "queries",
        "query_tokens",
        "trims",
        "twin_blocks",
    )

    def __init__(self) -> None:
        self.queries = 0
        self.query_tokens = 0
        self.hit_tokens = 0
        self.published_blocks = 0
        self.twin_blocks = 0
        self.evicted_blocks = 0
        self.trims = 0
        self.out_of_blocks = 0

    def count_query(self, num_tokens: int, num_cached: int) -> None:
        """Note a prompt that was looked up, and how much of it was found."""
        self.queries += 1
        self.query_tokens += num_tokens
        self.hit_tokens += num_cached

    def counts(self) -> dict[str, int]:
        """Return each count under its name."""
        return {name: getattr(self, name) for name in Counters.__slots__}
