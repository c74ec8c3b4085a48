"""Who of those that wait is admitted first, and who of those that run gives way first.

Owns: the orderings.  Does not know: room, budgets, or how long anybody may be kept waiting; the
admission lets nobody be overtaken without end, under any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from radixcache.tokens import common_prefix_len
from runtime.sequence import Sequence as Waiting

CachedLen = Callable[[Waiting], int]
"""Tells how many tokens of a sequence are cached now."""


class Ordering(Protocol):
    """An order of admission.  Sequences come by arrival; what it returns are the same ones."""

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> Iterable[Waiting]:
        """Give those that wait, the first to be admitted first."""

    def weakest(self, running: Sequence[Waiting]) -> Waiting:
        """Return who of those that run, in order of admission, gives its blocks back first."""

    def admitted(self, sequence: Waiting) -> None:
        """Note who was admitted last."""


class FirstCome:
    """By arrival."""

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> Iterable[Waiting]:
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
    """Depth first over the tree that the waiting prompts form.

    Next comes whoever will find most cached once the last admitted is computed, of equal ones
    whoever shares more with that one: a subtree is finished before it is left, so its prefix is
    computed once and evicted once, however its prompts arrived.
    Source: Zheng et al. 2024 (SGLang), whose theorem says that for a batch known in advance depth
    first gives the best hit rate there is, if the cache holds the longest prompt.
    """

    def __init__(self) -> None:
        self._last: Waiting | None = None

    def arranged(self, waiting: Sequence[Waiting], cached_len: CachedLen) -> Iterator[Waiting]:
        """Yield them one by one; n matches, and n comparisons for each that is admitted."""
        left = [(sequence, cached_len(sequence)) for sequence in waiting]
        while left:
            last = self._last
            left.sort(key=self._gain)
            while left and self._last is last:  # the order is another once one was admitted
                yield left.pop()[0]

    def _gain(self, pair: tuple[Waiting, int]) -> tuple[int, int, int]:
        """What a sequence will find cached, how much it shares with the last, how early it came."""
        sequence, num_cached = pair
        num_shared = self._num_shared(sequence)
        return max(num_cached, num_shared), num_shared, -sequence.arrival

    def admitted(self, sequence: Waiting) -> None:
        """Go on beside this one."""
        self._last = sequence

    def _num_shared(self, sequence: Waiting) -> int:
        if self._last is None or self._last.request.namespace != sequence.request.namespace:
            return 0
        mine, last = sequence.request.prompt, self._last.request.prompt
        return common_prefix_len(mine, 0, last, len(last))


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
