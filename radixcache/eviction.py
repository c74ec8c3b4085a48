"""Ordered index of the leaves that may be evicted from one tier.

Owns: membership and order.  Does not know: tokens, memory, why a rank is what it is.
Idea: a rank changes only when its node is touched, so a sorted set never needs rebuilding: taking
the next victim costs the same among ten leaves and a million.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import total_ordering

from sortedcontainers import SortedList

from radixcache.errors import InvariantViolation
from radixcache.learning import LearningPolicy
from radixcache.node import Node
from radixcache.policy import EvictionPolicy, Rank

Entry = tuple[Rank, int, Node]
"""A leaf under its rank and id; ids break ties by age."""


@total_ordering
class First:
    """The rank of what nobody is said to come back to: before every policy's, oldest first."""

    __slots__ = ("last_access",)

    def __init__(self, last_access: int) -> None:
        self.last_access = last_access

    def __eq__(self, other: object) -> bool:
        return isinstance(other, First) and self.last_access == other.last_access

    def __lt__(self, other: object) -> bool:
        return not isinstance(other, First) or self.last_access < other.last_access

    __hash__ = None  # type: ignore[assignment]  # compared only, as ranks are


class EvictionIndex:
    """The evictable leaves in the policy's order; every operation O(log n).

    What is abandoned goes before all else, whatever the policy is.

    learning  the policy where it is one that learns; else None
    """

    __slots__ = ("_order", "learning", "policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.learning = policy if isinstance(policy, LearningPolicy) else None
        self._order: SortedList = SortedList()  # of the entries, which the nodes know too

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, node: Node) -> bool:
        return node.entry is not None and node.entry in self._order

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the leaves, the next victim first."""
        return (node for _, _, node in self._order)

    def entries(self) -> Iterator[Entry]:
        """Iterate over the leaves under their ranks, the next victim first."""
        return iter(self._order)

    def num_before(self, entry: Entry) -> int:
        """Return how many leaves go before an entry, which may be another index's; O(log n)."""
        return int(self._order.bisect_left(entry[:2]))

    def add(self, node: Node) -> None:
        """Enter a leaf under its present rank.  Raises InvariantViolation if it is in already."""
        if node.entry is not None:
            raise InvariantViolation(f"{node!r} enters the eviction index twice")
        node.entry = (self.rank(node), node.node_id, node)
        self._order.add(node.entry)

    def remove(self, node: Node) -> None:
        """Take a leaf out; free for the first.  Raises InvariantViolation if it is not in."""
        entry, order = node.entry, self._order
        if entry is None or not order:
            raise InvariantViolation(f"{node!r} is not in the eviction index")
        if order[0] is entry:
            del order[0]
        else:
            order.remove(entry)
        node.entry = None

    def update(self, node: Node) -> None:
        """Enter a leaf anew, under its present rank."""
        if node.entry is not None and self.rank(node) != node.entry[0]:
            self.remove(node)
            self.add(node)

    def rank(self, node: Node) -> Rank:
        """Return what a leaf is ordered by."""
        return First(node.last_access) if node.is_abandoned else self.policy.rank(node)

    def first(self) -> Entry | None:
        """Return the next victim under its rank, or None where nothing can be evicted.

        O(classes · log n) where the policy chooses among the first of each class.
        """
        if not self._order:
            return None
        if self.learning is not None:
            return self._chosen(self.learning)
        entry: Entry = self._order[0]
        return entry

    def _chosen(self, policy: LearningPolicy) -> Entry:
        """Let the policy choose among the first leaves of its classes."""
        order, heads, at = self._order, [], 0
        if isinstance(order[0][0], First):
            abandoned: Entry = order[0]
            return abandoned
        while at < len(order):
            head = order[at]
            heads.append(head)
            at = order.bisect_left(((head[0][0] + 1,),))
        chosen: Entry = heads[policy.choose([head[0] for head in heads])]
        return chosen
