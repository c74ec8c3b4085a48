"""Eviction policies: which leaf goes first.

Owns: the rank of a node.  Does not know: the index, the pool, or what is pinned.
Idea: a policy is one pure function of facts; the index keeps the order.
"""

from __future__ import annotations

from typing import Any, Protocol

from radixcache.node import NodeFacts

Rank = Any
"""What a policy orders by: anything that compares with `<` against the policy's other ranks."""


class EvictionPolicy(Protocol):
    """Order of eviction: the evictable leaf with the lowest rank goes first."""

    def rank(self, node: NodeFacts) -> Rank:
        """Return the node's rank.

        It may depend on the node's facts alone, and facts change only while the node is pinned
        or just becoming a leaf: so the index never needs to be sorted again.
        """


class LRU:
    """Least recently used first: the leaf whose last acquire or commit is longest ago."""

    def rank(self, node: NodeFacts) -> Rank:
        """Return the logical time of the last access."""
        return node.last_access
