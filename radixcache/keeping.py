"""What is kept beyond its turn: prefixes held for a time, and token ranges worth more than others.

Owns: what a hold or a priority does to the tree, and what its end does.  Does not know: leases'
blocks, or when time passes; deadlines say what is due.
Idea: a hold is a pin that ends of itself, and a priority is a fact of whole nodes, so that eviction
needs to know of neither.
"""

from __future__ import annotations

from radixcache.deadlines import Deadlines, Hold
from radixcache.errors import InvalidLease
from radixcache.lease import Lease
from radixcache.node import Node
from radixcache.publishing import Publisher
from radixcache.retention import Retention
from radixcache.room import Room
from radixcache.tree import Position


class Keeper:
    """Holds and priorities on the nodes of a tree."""

    __slots__ = ("_deadlines", "_publisher", "_room")

    def __init__(self, room: Room, publisher: Publisher, deadlines: Deadlines) -> None:
        self._room = room
        self._publisher = publisher
        self._deadlines = deadlines

    def touch(self, found: Position, last_access: int) -> None:
        """Note that a prefix will be wanted; nodes above it go after it, and inherit its time."""
        node = self._publisher.upper(found.node, found.inside)
        node.last_access = last_access
        self._room.pins.revive(node)
        self._room.pins.reranked(node)

    def abandon(self, found: Position, start: int) -> int:
        """Mark the end of a prefix that nobody else has gone on from; return how many blocks.

            ──[shared]──┬──[another's]
                        └──[own: marked, from `start` on]──► found

        Up to where another branch leaves: a place that two came through is worth as much as ever.
        """
        node, start = found.node, -(-start // self._room.tree.block_size)
        start, count = start * self._room.tree.block_size, 0
        if found.inside < node.num_tokens and not node.is_abandoned:
            return 0  # a longer prompt goes on from here
        if not all(child.is_abandoned for child in node.children.values()):
            return 0
        while node.parent is not None and not node.lock_ref and start < node.end:
            if not node.is_abandoned:
                if node.start < start:
                    self._publisher.upper(node, start - node.start)
                node.is_abandoned = True
                self._room.pins.reranked(node)
                count += len(node.block_ids)
            node = node.parent
            if len(node.children) > 1:
                break
        return count

    def hold(self, hold: Hold, until: float) -> None:
        """Pin the node of a new hold until a time."""
        self._room.pins.lock(hold.node)
        self._deadlines.hold(hold, until)

    def end_hold(self, hold: Hold) -> None:
        """Unpin a hold's node; nothing if that was done.  Raises InvalidLease for a foreign one."""
        if hold.has_ended:
            return
        if self._deadlines.holds.get(hold.hold_id) is not hold:
            raise InvalidLease(f"{hold!r} belongs to another cache")
        hold.has_ended = True
        self._deadlines.end(hold)
        self._room.unlock(hold.node)

    def expire(self) -> None:
        """End what is due."""
        for ended in self._deadlines.due():
            if isinstance(ended, Hold):
                self.end_hold(ended)
            elif ended.lock_ref:
                self._deadlines.refresh(ended)  # in use: its time has not begun
            else:
                self._deadlines.forget(ended)
                self._room.pins.reranked(ended)

    def refresh(self, node: Node) -> None:
        """Let the time of each priority on the way down to a node begin anew; O(depth)."""
        current: Node | None = node if self._deadlines.num_retained else None
        while current is not None:
            if current.retention is not None:
                self._deadlines.refresh(current)
            current = current.parent

    def retain(self, lease: Lease, start: int, end: int) -> None:
        """Give the nodes of tokens `start … end` of a lease's path what its ranges are worth.

        What is worth as much or more already stays as it is.  O(nodes passed) for each range.
        """
        for retention in lease.retentions:
            reach = retention.overlap(self._room.tree.block_size, start, end)
            node: Node | None = lease.node if reach else None
            while reach and node is not None and node.end > reach[0]:
                node = self._retain(node, retention, *reach).parent

    def _retain(self, node: Node, retention: Retention, first: int, last: int) -> Node:
        """Mark what of one edge lies in `first … last`; return the uppermost node of that edge."""
        if node.start >= last or node.parent is None:
            return node
        if node.retention is not None and node.retention.strength >= retention.strength:
            if node.retention.strength == retention.strength:
                self._deadlines.refresh(node)
            return node
        marked = self._publisher.upper(node, min(last, node.end) - node.start)
        above = marked
        if marked.start < first:
            above = self._publisher.upper(marked, first - marked.start)
        self._deadlines.retain(marked, retention)  # pinned, so no index has its rank
        return above
