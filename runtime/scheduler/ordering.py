"""Who of those that wait is admitted first, and who of those that run gives way first.

Owns: the orderings.  Does not know: room, budgets, or how long anybody may be kept waiting; the
admission lets nobody be overtaken without end, under any of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol

from radixcache.namespace import Namespace
from runtime.sequence import Sequence as Waiting

CachedLen = Callable[[Waiting], int]
"""Tells how many tokens of a sequence are cached now."""


class Ordering(Protocol):
    """An order of admission.  Sequences come by arrival; what it returns are the same ones."""

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> list[Waiting]:
        """Return those that wait, the first to be admitted first."""

    def weakest(self, running: Sequence[Waiting]) -> Waiting:
        """Return who of those that run, in order of admission, gives its blocks back first."""

    def admitted(self, sequence: Waiting) -> None:
        """Note who was admitted last."""


class FirstCome:
    """By arrival."""

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> list[Waiting]:
        """Return them as they came."""
        return list(waiting)

    def weakest(self, running: Sequence[Waiting]) -> Waiting:
        """Return who was admitted last."""
        return running[-1]

    def admitted(self, sequence: Waiting) -> None:
        """Nothing depends on it."""


class LongestPrefix(FirstCome):
    """The longest cached prefix first, so that what is cached is used before it is evicted.

    Source: Zheng et al. 2024 (SGLang), cache-aware scheduling.
    """

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> list[Waiting]:
        """Return them by cached tokens, most first; of equal ones by arrival.  One match each."""
        return sorted(waiting, key=cached_len, reverse=True)


class DepthFirst(FirstCome):
    """Depth first over the tree that the waiting prompts form, going on from the last admitted.

    Prompts that share a prefix follow each other, so a prefix is computed once and evicted once,
    however they arrived.  The order is that of the packed tokens, round in a circle.
    Source: Zheng et al. 2024 (SGLang), whose theorem says that for a batch known in advance this
    order gives the best hit rate there is, if the cache holds the longest prompt.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[str, str, str, int], bytes] | None = None

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> list[Waiting]:
        """Return them by tokens, beginning behind the last admitted; O(n log n) comparisons."""
        ordered = sorted(waiting, key=_path)
        if self._last is None:
            return ordered
        at = bisect_right(ordered, self._last, key=_path)
        return [*ordered[at:], *ordered[:at]]

    def admitted(self, sequence: Waiting) -> None:
        """Go on behind this one."""
        self._last = _path(sequence)


class ByPriority(FirstCome):
    """The lowest `priority` first; of equal ones by arrival.  The highest gives way first."""

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> list[Waiting]:
        """Return them by priority."""
        return sorted(waiting, key=lambda sequence: sequence.request.priority)

    def weakest(self, running: Sequence[Waiting]) -> Waiting:
        """Return the last admitted of those with the highest number."""
        return max(enumerate(running), key=lambda pair: (pair[1].request.priority, pair[0]))[1]


ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "fcfs": FirstCome,
    "longest_prefix": LongestPrefix,
    "depth_first": DepthFirst,
    "priority": ByPriority,
}
"""Orderings by the names that settings use."""


def _path(sequence: Waiting) -> tuple[tuple[str, str, str, int], bytes]:
    return _namespace_path(sequence.request.namespace), sequence.request.prompt


def _namespace_path(namespace: Namespace) -> tuple[str, str, str, int]:
    return namespace.model, namespace.adapter, namespace.salt, namespace.epoch
