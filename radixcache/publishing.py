"""How a lease's blocks come to stand in the tree: edges cut, grown and hung.

Owns: every change of an edge on behalf of a lease.  Does not know: eviction, or who asked.
Idea: edges are cut only where somebody must stand in the middle, or where two parts of one edge are
worth different priorities; a sequence that grows alone stays one node.
"""

from __future__ import annotations

from array import array
from operator import ne

from radixcache.accounts import Account
from radixcache.lease import Commit, Lease
from radixcache.node import Node
from radixcache.room import Room
from radixcache.tokens import TOKEN_BYTES


class Publisher:
    """The edges of a tree, as commits change them."""

    __slots__ = ("_block_size", "_deadlines", "_pins", "_room", "_tree")

    def __init__(self, room: Room) -> None:
        self._room = room
        self._tree = room.tree
        self._pins = room.pins
        self._deadlines = room.deadlines
        self._block_size = room.tree.block_size

    def upper(self, node: Node, inside: int) -> Node:
        """Return the node whose edge ends after `inside` tokens of `node`'s: itself, or cut off."""
        if inside == node.num_tokens:
            return node
        upper = self._tree.split(node, inside)
        self._deadlines.split(upper, node)
        self._pins.reranked(node)
        self._pins.note(upper)
        for observer in self._room.observers:
            observer.split(upper, node)
        return upper

    def commit(self, lease: Lease, end: int, now: int) -> Commit:
        """Make the tokens of a lease up to `end` part of the tree: what is there already is used.

        end  in tokens, whole blocks, above `lease.num_committed`
        now  logical time of the commit
        """
        account = self._room.accounts.by_namespace[lease.namespace]
        start, node = lease.num_committed, lease.node
        num_twins, known = 0, start
        if node.children:  # else nobody has published anything behind it
            found = self._tree.find(node, lease.tokens, start, end)
            known = found.num_tokens
            if known > start:
                node = self.upper(found.node, found.inside)
                num_twins = self._remap(lease, node, known, account)
                self._pins.lock(node)
                self._room.unlock(lease.node)
        published = (end - known) // self._block_size
        if published:
            parent, ours = node, node is lease.node
            node = self._publish(lease, parent, known, end, may_extend=ours)
            if node is not parent:
                node.created = now
        node.last_access = now
        lease.node = node
        lease.num_committed = end
        counters = self._room.counters
        counters.published_blocks += published
        account.published_blocks += published
        counters.twin_blocks += num_twins
        account.twin_blocks += num_twins
        return Commit(published, num_twins)

    def _remap(self, lease: Lease, node: Node, end: int, account: Account) -> int:
        """Give up a lease's private blocks below token `end` for those that the tree has.

        Returns how many of them were twins: other blocks with the same content.
        """
        first, last = (n // self._block_size for n in (lease.num_committed, end))
        own, theirs = lease.block_table[first:last], self._tree.blocks(node, lease.node)
        self._room.free(account, own)
        lease.block_table[first:last] = theirs
        return sum(map(ne, own, theirs))

    def _publish(self, lease: Lease, node: Node, start: int, end: int, *, may_extend: bool) -> Node:
        """Hand the lease's private blocks of tokens `start … end` to the tree, below `node`.

        The lease's pin on `node` passes to the node that is returned.
        """
        first, last = (n // self._block_size for n in (start, end))
        block_ids: array[int] = lease.block_table[first:last]
        edge = lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
        if may_extend and self._grows(node, lease, start, end):
            self._tree.extend(node, edge, block_ids)
            self._pins.extended(node, len(block_ids))
            leaf = node
        else:
            leaf = self._tree.attach(node, bytes(edge), block_ids)
            self._pins.attached_below_pin(leaf)
        for observer in self._room.observers:
            observer.stored(leaf, len(block_ids))
        return leaf

    def _grows(self, node: Node, lease: Lease, start: int, end: int) -> bool:
        """True where an edge may grow in place: one lease is there, and all is worth the same."""
        if node.lock_ref != 1 or not node.is_leaf:
            return False
        if node.num_hits and not self._room.accounts.index.policy.by_recency:
            return False
        if node.retention is None:
            return True
        reaches = [(r.overlap(self._block_size, start, end), r) for r in lease.retentions]
        touching = [(reach, r) for reach, r in reaches if reach]
        return (
            len(touching) == 1
            and touching[0][0] == (start, end)
            and touching[0][1].strength == node.retention.strength
        )
