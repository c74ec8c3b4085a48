"""Who of those that wait is admitted first, and who of those that run gives way first.

Owns: the orderings.  Does not know: room, budgets, or how long anybody may be kept waiting; the
admission lets nobody be overtaken without end, under any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from radixcache.tokens import common_prefix_len
from runtime.sequence import Sequence as Waiting

KEPT_SHARE = 0.25
"""Of the pool, by orderings that care for hits: enough to leave a subtree and come back to it, and
never so much that it costs a batch more than a quarter of its sequences."""


class Lookup(Protocol):
    """Tells what is cached of a sequence now, in tokens; each answer costs a look-up."""

    def cached_len(self, sequence: Waiting) -> int:
        """Return how many tokens of it are cached."""

    def loose_len(self, sequence: Waiting) -> int:
        """Return how many of those nobody holds, so that they may be evicted."""


class Ordering(Protocol):
    """An order of admission.  Sequences come by arrival; what it returns are the same ones.

    kept_share  of the pool: so much of what the next ones will find is not evicted to admit one
                more beside others
    """

    kept_share: float

    def arranged(self, waiting: Sequence[Waiting], lookup: Lookup) -> Iterable[Waiting]:
        """Give those that wait, the first to be admitted first."""

    def weakest(self, running: Sequence[Waiting]) -> Waiting:
        """Return who of those that run, in order of admission, gives its blocks back first."""

    def admitted(self, sequence: Waiting) -> None:
        """Note who was admitted last."""


class FirstCome:
    """By arrival."""

    kept_share = 0.0

    def arranged(self, waiting: Sequence[Waiting], lookup: Lookup) -> Iterable[Waiting]:
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

    kept_share = KEPT_SHARE

    def arranged(self, waiting: Sequence[Waiting], lookup: Lookup) -> list[Waiting]:
        """Return them by cached tokens, most first; of equal ones by arrival.  One match each."""
        return sorted(waiting, key=lookup.cached_len, reverse=True)


class _Candidate(NamedTuple):
    """One that waits: what is cached of it, as `Lookup` has it, what it shares with the last."""

    sequence: Waiting
    cached_len: int
    loose_len: int
    num_shared: int

    @property
    def gain(self) -> tuple[int, int, int]:
        """What it will find and might be lost, how much it shares with the last, how early."""
        found = max(self.cached_len, self.num_shared)
        return self.loose_len + found, self.num_shared, -self.sequence.arrival


class DepthFirst(FirstCome):
    """Depth first over the tree that the waiting prompts form.

    Next comes whoever will find most cached once the last admitted is computed, of equal ones
    whoever shares more with that one: a subtree is finished before it is left, so its prefix is
    computed once and evicted once, however its prompts arrived.  What nobody holds counts twice:
    others run too, and press it out unless somebody goes on from it.
    Source: Zheng et al. 2024 (SGLang), whose theorem says that for a batch known in advance depth
    first gives the best hit rate there is, if the cache holds the longest prompt; it runs one
    prompt at a time.
    """

    kept_share = KEPT_SHARE

    def __init__(self) -> None:
        self._last: Waiting | None = None

    def arranged(self, waiting: Sequence[Waiting], lookup: Lookup) -> Iterator[Waiting]:
        """Yield them one by one; 2 n look-ups, and n comparisons for each that is admitted."""
        left = [
            _Candidate(s, lookup.cached_len(s), lookup.loose_len(s), self._num_shared(s))
            for s in waiting
        ]
        while left:
            last = self._last
            left.sort(key=lambda candidate: candidate.gain)
            while left and self._last is last:  # the order is another once one was admitted
                yield left.pop().sequence
            left = [self._beside_last(candidate) for candidate in left]

    def _beside_last(self, candidate: _Candidate) -> _Candidate:
        """Take what one shares with the last admitted for held, since that one holds it now."""
        num_shared = self._num_shared(candidate.sequence)
        loose_len = min(candidate.loose_len, max(0, candidate.cached_len - num_shared))
        return candidate._replace(loose_len=loose_len, num_shared=num_shared)

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

    def arranged(self, waiting: Sequence[Waiting], lookup: Lookup) -> list[Waiting]:
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
