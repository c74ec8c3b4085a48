"""What the cache tells a policy that learns, and what it asks of it.

Owns: the calls.  Does not know: what is learned.
Idea: a rank is entered once and never changes by itself, so a policy whose mind changes ranks by
class, and is asked anew for each victim which class is the next to give one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from radixcache.namespace import Namespace
from radixcache.node import NodeFacts
from radixcache.tokens import Packed

ClassRank = tuple[int, Any]
"""A class, from 0, and the order within it."""


class LearningPolicy(ABC):
    """A policy that hears of every request, and chooses by what it has learned.

    Its ranks are pairs of a class, an int from 0, and an order within the class.  The next victim
    is the first of one of the classes; which one, it says anew for each victim.  Where namespaces
    have shares of their own, whose turn it is goes by the ranks.
    """

    by_recency = False

    @abstractmethod
    def rank(self, node: NodeFacts) -> ClassRank:
        """Return (class, order within the class)."""

    @abstractmethod
    def choose(self, ranks: Sequence[ClassRank]) -> int:
        """Return the place of the one to give up, among the first ranks of all classes."""

    @abstractmethod
    def asked(
        self, namespace: Namespace, tokens: Packed, *, block_size: int, num_found: int, now: int
    ) -> None:
        """Note a prompt that was acquired.

        num_found  tokens of it that were cached, whole blocks
        now        the logical time that `last_access` is of
        """
