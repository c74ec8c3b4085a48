"""Eviction policies: which leaf goes first.

Owns: the rank of a node.  Does not know: the index, the pool, or what is pinned.
Idea: a policy is one pure function of facts; the index keeps the order.
"""

from __future__ import annotations

from typing import Any, Protocol

from radixcache.adaptive import Adaptive
from radixcache.errors import InvalidConfig
from radixcache.learning import LearningPolicy
from radixcache.node import NodeFacts

Rank = Any
"""What a policy orders by: anything that compares with `<` against the policy's other ranks."""


class EvictionPolicy(Protocol):
    """Order of eviction: the evictable leaf with the lowest rank goes first.

    by_recency  whether the rank of nodes of one priority is the last access alone.  A leaf that
                was hit then goes on growing in place; under any other policy what grows behind a
                hit is a node of its own, with facts of its own
    """

    by_recency: bool

    def rank(self, node: NodeFacts) -> Rank:
        """Return the node's rank.

        It may depend on the node's facts alone; the cache enters a leaf anew when they change.
        It must not raise, as observers must not, and compares with every other rank: no NaN.
        """


def check_policy(policy: EvictionPolicy) -> None:
    """Raise InvalidConfig for what is no policy, such as a class in place of its instance."""
    if isinstance(policy, type) or not callable(getattr(policy, "rank", None)):
        raise InvalidConfig(f"a policy is an object with a method `rank`, not {policy!r}")
    if not isinstance(getattr(policy, "by_recency", None), bool):
        raise InvalidConfig(f"{policy!r} must have `by_recency`: does it rank by recency alone?")


class LRU:
    """Least recently used first: the leaf whose last acquire or commit is longest ago."""

    by_recency = True

    def rank(self, node: NodeFacts) -> Rank:
        """Return the logical time of the last access."""
        return node.last_access


class MRU:
    """Most recently used first: for scans that never come back."""

    by_recency = False

    def rank(self, node: NodeFacts) -> Rank:
        """Return the logical time of the last access, backwards."""
        return -node.last_access


class FIFO:
    """Oldest first, however often it was used."""

    by_recency = False

    def rank(self, node: NodeFacts) -> Rank:
        """Return the logical time of creation."""
        return node.created


class LFU:
    """Least often hit first, the least recently used among equals.

    A request counts once, when it finds the node; publishing is no hit.
    """

    by_recency = False

    def rank(self, node: NodeFacts) -> Rank:
        """Return (hits, last access)."""
        return node.num_hits, node.last_access


class SLRU:
    """Segmented LRU: nodes hit fewer than `threshold` times go before all others.

    Source: Karedla et al. 1994, with a count of hits in place of a cap on the protected segment.
    """

    by_recency = False

    def __init__(self, threshold: int = 2) -> None:
        self.threshold = threshold

    def rank(self, node: NodeFacts) -> Rank:
        """Return (is protected, last access)."""
        return node.num_hits >= self.threshold, node.last_access


class CostAware:
    """Least recently used first, where each token's cost of computing it anew counts as recency.

    A token at position p costs 1 + p / `attention_len`: the products with weights, and attention
    over what is before it.  A block deep in a long prefix thus outlives one near a root by
    `weight` accesses for each time that it costs as much again.

    attention_len  prefix length at which attention costs as much as all else, in tokens
    weight         accesses that one unit of cost is worth
    """

    by_recency = False

    def __init__(self, *, attention_len: int = 4096, weight: float = 64.0) -> None:
        self.attention_len = attention_len
        self.weight = weight

    def rank(self, node: NodeFacts) -> Rank:
        """Return last access + weight · cost of the edge's last token."""
        cost = 1 + (node.start + node.num_tokens) / self.attention_len
        return node.last_access + self.weight * cost


class Priority:
    """Lowest priority first (see `Retention`), another policy's order among equals.

    within  that other policy, LRU unless given; not one that learns, as it must choose alone
    """

    def __init__(self, within: EvictionPolicy | None = None) -> None:
        if isinstance(within, LearningPolicy):
            raise InvalidConfig("a policy that learns can't order what has equal priorities")
        self.within = within or LRU()
        self.by_recency = self.within.by_recency

    def rank(self, node: NodeFacts) -> Rank:
        """Return (priority, rank among equals)."""
        return node.priority, self.within.rank(node)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "mru": MRU,
    "fifo": FIFO,
    "lfu": LFU,
    "slru": SLRU,
    "cost": CostAware,
    "priority": Priority,
    "adaptive": Adaptive,
}
"""Policies by the name that settings give them."""
