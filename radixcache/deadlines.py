"""What is kept for a time: prefixes held, and priorities of token ranges.

Owns: which holds and priorities there are, and when they end.  Does not know: what time is (it is
given a clock), pins, or what an end means for the tree; the cache is told what it concerns.
Idea: everything that ends stands once in one sorted list, so looking at the time costs nothing
until something is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from sortedcontainers import SortedList

from radixcache.errors import InvalidConfig, InvariantViolation
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.retention import Retention, check_duration


class Hold:
    """A prefix that stays cached until it is released, or its time is over.

    namespace   that it is in
    num_tokens  tokens held, whole blocks; 0 where nothing was cached
    has_ended   whether it was released or has expired
    """

    __slots__ = ("has_ended", "hold_id", "namespace", "node", "num_tokens")

    def __init__(self, hold_id: int, namespace: Namespace, num_tokens: int, node: Node) -> None:
        self.hold_id = hold_id
        self.namespace = namespace
        self.num_tokens = num_tokens
        self.node = node  # where it ends in the tree; pinned until `has_ended`
        self.has_ended = False

    def __repr__(self) -> str:
        return f"Hold({self.hold_id}, {self.num_tokens} tokens)"


class Deadlines:
    """Holds and priorities by the time at which they end.

    clock  tells the time in seconds, never backwards; None: nothing may have a duration
    """

    __slots__ = ("_due", "clock", "holds", "num_retained", "order")

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self.clock = clock
        self.holds: dict[int, Hold] = {}
        self.num_retained = 0  # nodes with a priority
        self.order: SortedList = SortedList()  # (time, kind and id, hold or node)
        self._due: dict[tuple[str, int], tuple[float, tuple[str, int], Hold | Node]] = {}

    def after(self, duration_s: float | None) -> float:
        """Return the time that is so many seconds from now; infinity for None.

        Raises InvalidConfig for a duration that is none, or where there is no clock.
        """
        if duration_s is None:
            return math.inf
        check_duration(duration_s)
        if self.clock is None:
            raise InvalidConfig("a duration needs a clock: RadixCache(…, clock=time.monotonic)")
        return self.clock() + duration_s

    def checked(self, retentions: Iterable[Retention]) -> tuple[Retention, ...]:
        """Return ranges as a tuple.  Raises InvalidConfig for what is none, or lacks a clock."""
        ranges = tuple(retentions)
        for retention in ranges:
            if not isinstance(retention, Retention):
                raise InvalidConfig(f"a range of tokens is a Retention, not {retention!r}")
            self.after(retention.duration_s)
        return ranges

    def hold(self, hold: Hold, until: float) -> None:
        """Enter a hold that ends at a time."""
        self.holds[hold.hold_id] = hold
        self._set(("hold", hold.hold_id), hold, until)

    def end(self, hold: Hold) -> None:
        """Take a hold out."""
        del self.holds[hold.hold_id]
        self._set(("hold", hold.hold_id), hold, math.inf)

    def retain(self, node: Node, retention: Retention) -> None:
        """Give a node a priority, from now on."""
        self.num_retained += node.retention is None
        node.retention = retention
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Note that a node with a priority is in use: its time begins anew."""
        assert node.retention is not None
        self._set(("node", node.node_id), node, self.after(node.retention.duration_s))

    def forget(self, node: Node) -> None:
        """Take a node's priority away, if it has one."""
        if node.retention is not None:
            node.retention = None
            self.num_retained -= 1
            self._set(("node", node.node_id), node, math.inf)

    def split(self, upper: Node, lower: Node) -> None:
        """Give the upper half of a cut edge what the lower has."""
        if lower.retention is not None:
            upper.retention = lower.retention
            self.num_retained += 1
            due = self._due.get(("node", lower.node_id))
            self._set(("node", upper.node_id), upper, due[0] if due else math.inf)

    def due(self) -> Iterator[Hold | Node]:
        """Iterate over what has ended by now.  Each must be ended, forgotten or refreshed.

        What is refreshed comes again at the next call at the earliest, however short its time.
        """
        if not self.order or self.clock is None:
            return
        until = (self.clock(), ("~", 0))  # behind the kinds of all that is due now
        for _, _, ended in list(self.order[: self.order.bisect_right(until)]):
            yield ended

    def check(self, nodes: list[Node]) -> None:
        """Raise InvariantViolation unless exactly what has a duration stands in the order."""
        retained = {node.node_id: node for node in nodes if node.retention is not None}
        timed = {
            ("node", node.node_id)
            for node in nodes
            if node.retention is not None and node.retention.duration_s is not None
        }
        held = {key for key in self._due if key[0] == "hold"}
        if self.num_retained != len(retained) or timed | held != self._due.keys():
            raise InvariantViolation("I8: priorities or their ends are counted wrong")
        if any(key[1] not in self.holds for key in held):
            raise InvariantViolation("I8: a hold that has ended is still to end")
        if list(self.order) != sorted(self._due.values(), key=lambda entry: entry[:2]):
            raise InvariantViolation("I8: the order of ends is not that of their times")

    def _set(self, key: tuple[str, int], what: Hold | Node, until: float) -> None:
        old = self._due.pop(key, None)
        if old is not None:
            self.order.remove(old)
        if until < math.inf:
            entry = (until, key, what)
            self._due[key] = entry
            self.order.add(entry)
