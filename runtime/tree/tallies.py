"""What each tenant's requests came to, counted as it happens, and what was evicted of each.

Owns: the counts.  Does not know: HTTP, or who may see them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from statistics import median

from radixcache.namespace import Namespace
from radixcache.node import Node

WINDOW_S = 60.0
"""Seconds over which times to the first token count."""

MAX_TIMES = 512
"""Of each kind so many are kept at most, the last ones."""


class Tally:
    """Of one tenant, or of all: tokens since the start, and the last times to a first token."""

    __slots__ = ("_times", "asked", "generated", "hit")

    def __init__(self) -> None:
        self.asked = 0
        self.hit = 0
        self.generated = 0
        self._times: dict[bool, deque[tuple[float, float]]] = {
            is_warm: deque(maxlen=MAX_TIMES) for is_warm in (True, False)
        }

    def first_token(self, seconds: float, now: float, *, is_warm: bool) -> None:
        """Note how long a request waited for its first token."""
        self._times[is_warm].append((now, seconds))

    def median_s(self, now: float, *, is_warm: bool) -> float | None:
        """Return the median over the last minute; None where there were none."""
        times = self._times[is_warm]
        while times and times[0][0] < now - WINDOW_S:
            times.popleft()
        return median(seconds for _, seconds in times) if times else None


class Tallies:
    """The tallies of all and of each tenant; for one event loop."""

    def __init__(self) -> None:
        self.all = Tally()
        self._tenants: dict[str, Tally] = {}

    def of(self, tenant: str) -> Tally:
        """Return a tenant's tally, new if it has none; there are as many as tenants."""
        tally = self._tenants.get(tenant)
        if tally is None:
            tally = self._tenants[tenant] = Tally()
        return tally

    def note_prompt(self, tenant: str, *, asked: int, hit: int) -> None:
        """Note the prompt of a request that begins to answer."""
        for tally in (self.all, self.of(tenant)):
            tally.asked += asked
            tally.hit += hit

    def note_first_token(self, tenant: str, seconds: float, now: float, *, is_warm: bool) -> None:
        """Note the first token of a branch."""
        for tally in (self.all, self.of(tenant)):
            tally.first_token(seconds, now, is_warm=is_warm)


class EvictionTally:
    """Counts evicted blocks by tenant.  A `TreeObserver`, so of the engine's thread.

    tenant_of  whose a namespace is; None for nobody's, which are not counted
    """

    def __init__(self, tenant_of: Callable[[Namespace], str | None]) -> None:
        self._tenant_of = tenant_of
        self.blocks: Counter[str] = Counter()

    def stored(self, node: Node, num_blocks: int) -> None:
        """Nothing to count."""

    def removed(self, node: Node, num_blocks: int) -> None:
        """Count the blocks of a leaf that are given up."""
        tenant = self._tenant_of(node.namespace)
        if tenant is not None:
            self.blocks[tenant] += num_blocks

    def split(self, upper: Node, lower: Node) -> None:
        """Nothing to count."""
