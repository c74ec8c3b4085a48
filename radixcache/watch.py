"""Which nodes of a tree changed since somebody looked, as values for whoever draws it.

Owns: the rows, and which nodes were told of.  Does not know: time, tenants, who reads.
Idea: the tree notes a changed node in a set, once however often it changes.  A row is made only
when the notes are taken, so work is by nodes touched, never by nodes there are; the first rows come
of a walk that goes on where it stopped, while the tree changes under it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from radixcache.errors import InvalidConfig
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.pins import Pins
from radixcache.tree import RadixTree

State = Literal["p", "e", "i", "r"]
"""pinned · evictable leaf · unpinned above others · unpinned and worth more by a `Retention`."""


class NodeRow(msgspec.Struct, frozen=True, gc=False):
    """One node as it was when the row was made.

    Not seen by the garbage collector: a hundred thousand at once would have it walk all there is.

    node_id      for the node's life; an edge that is cut keeps it for its lower part
    parent       `node_id` of its parent, 0 for a root
    num_tokens, num_blocks
                 on its edge; 0 for a root
    num_hits, last_access
                 as `NodeFacts` has them: of those that ended here, not below
    lock_ref     leases and holds that end here + pinned children
    """

    node_id: int
    parent: int
    num_tokens: int
    num_blocks: int
    num_hits: int
    last_access: int
    lock_ref: int
    state: State
    namespace: Namespace

    @classmethod
    def of(cls, node: Node) -> NodeRow:
        """Return the row of a node as it is now."""
        state: State = "p"
        if not node.lock_ref:
            state = "i" if node.parent is None or node.children else "e"
            if node.retention is not None:
                state = "r"
        return cls(
            node.node_id,
            0 if node.parent is None else node.parent.node_id,
            node.num_tokens,
            len(node.block_ids),
            node.num_hits,
            node.last_access,
            node.lock_ref,
            state,
            node.namespace,
        )


class Changes(msgspec.Struct, frozen=True):
    """What is different: nodes that are new or changed, in no order, and ids of those gone."""

    rows: list[NodeRow]
    removed: list[int]


class TreeWatch:
    """Watches a tree from now on; of one thread, the cache's.  One at a time; close it.

    The rows taken until `num_pending` is 0, those of the same id replaced and those removed taken
    out, are the tree's nodes at that moment, roots included.
    Keeps an entry for each node.  Raises InvalidConfig where the tree is watched already.

    >>> from radixcache import CacheConfig, PrefixKey, RadixCache
    >>> cache = RadixCache(CacheConfig(num_blocks=4, block_size=2))
    >>> watch = TreeWatch(cache.tree, cache.pins)
    >>> lease = cache.acquire(PrefixKey.of([1, 2, 3]))
    >>> _ = cache.commit(lease, 3)
    >>> sorted((row.node_id, row.parent, row.num_tokens) for row in watch.take(9).rows)
    [(1, 0, 0), (2, 1, 2)]
    """

    __slots__ = ("_known", "_pins", "_touched", "_tree", "_unseen")

    def __init__(self, tree: RadixTree, pins: Pins) -> None:
        if pins.touched is not None:
            raise InvalidConfig("the tree is watched already: close the other TreeWatch first")
        self._tree = tree
        self._pins = pins
        self._touched: set[Node] = set()
        self._unseen: list[Node] = list(tree.roots.values())
        self._known: dict[int, Node] = {}
        pins.touched = self._touched

    @property
    def num_touched(self) -> int:
        """Nodes that were noted since they were told of last; the first walk's are not counted."""
        return len(self._touched)

    @property
    def num_pending(self) -> int:
        """Nodes that are to be told of, as far as is known; 0 where all was taken."""
        return len(self._touched) + len(self._unseen)

    def take(self, limit: int) -> Changes:
        """Return what changed, of at most `limit` nodes; about 2 µs each.

        What was noted comes before what the first walk has not reached.
        """
        changes = Changes([], [])
        for _ in range(limit):
            if self._touched:
                node = self._touched.pop()
            elif self._unseen:
                node = self._unseen.pop()
                self._unseen.extend(node.children.values())
            else:
                break
            self._tell(node, changes)
        return changes

    def node(self, node_id: int) -> Node | None:
        """Return a node that was told of and is still there; None for any other."""
        node = self._known.get(node_id)
        return node if node is not None and self._is_there(node) else None

    def close(self) -> None:
        """Watch no more; nothing is noted from then on."""
        self._pins.touched = None

    def _tell(self, node: Node, changes: Changes) -> None:
        if self._is_there(node):
            self._known[node.node_id] = node
            changes.rows.append(NodeRow.of(node))
        elif self._known.pop(node.node_id, None) is not None:
            changes.removed.append(node.node_id)

    def _is_there(self, node: Node) -> bool:
        return node.parent is not None or self._tree.roots.get(node.namespace) is node
