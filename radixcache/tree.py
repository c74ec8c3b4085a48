"""The radix tree: token prefixes to nodes, one disjoint tree a namespace.

Owns: the shape (roots, edges, children).  Does not know: pins, eviction, free blocks.
Idea: edges are packed bytes in whole blocks, and siblings differ in their first block, so a child
is found by hashing one block and an edge is compared by one `startswith` at an offset.

    root ──[A A A A│B B B B]──► n1 ──[C C C C]──► n2        block_size 4
                                 └───[D D D D│E E E E]──► n3
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, Packed, common_prefix_len


class Position(NamedTuple):
    """Where a key leaves the tree.

    node        the last node that the key reaches, perhaps only a part of its edge
    num_tokens  tokens of the key that are in the tree, whole blocks
    inside      tokens of `node`'s edge that the key covers; all of them unless it leaves inside
    """

    node: Node
    num_tokens: int
    inside: int


class RadixTree:
    """Prefixes of packed tokens as nodes with whole-block edges."""

    __slots__ = ("_next_id", "block_size", "num_nodes", "roots")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[Namespace, Node] = {}
        self.num_nodes = 0  # roots not counted
        self._next_id = 0

    def root(self, namespace: Namespace) -> Node:
        """Return the root of a namespace, made if it has none yet."""
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = self._node(namespace, None, b"", array("i"), 0)
        return node

    def drop_root(self, root: Node) -> None:
        """Forget a root without children, so that past namespaces cost nothing."""
        if not root.children:
            self.roots.pop(root.namespace, None)

    def find(self, start: Node, tokens: Packed, offset: int, end: int) -> Position:
        """Follow `tokens[offset:end]` down from `start`; change nothing.

        offset, end  in tokens; `start` stands at `offset`
        returns      `num_tokens` counts from the key's own begin, so it is `offset` on no match

        O(nodes passed) steps and one comparison of the bytes matched.
        """
        block_bytes = self.block_size * TOKEN_BYTES
        node, at, stop = start, offset * TOKEN_BYTES, end * TOKEN_BYTES
        while node.children and at + block_bytes <= stop:
            child = node.children.get(bytes(tokens[at : at + block_bytes]))
            if child is None:
                break
            edge = child.edge
            if at + len(edge) <= stop and tokens.startswith(edge, at):
                node, at = child, at + len(edge)
                continue
            passed = at // TOKEN_BYTES
            same = common_prefix_len(tokens, passed, edge, end - passed)
            inside = same - same % self.block_size
            return Position(child, passed + inside, inside)
        return Position(node, at // TOKEN_BYTES, node.num_tokens)

    def find_partial(self, found: Position, tokens: Packed, end: int) -> tuple[int, int]:
        """Find the block that agrees with most of the tokens where a key left the tree.

        found    where `find` stopped, its `num_tokens` counted from the key's begin
        returns  block id and how many of its first tokens agree, fewer than a block; (-1, 0) where
                 none does

        Costs what `nearest` does; nothing for blocks of one token.
        """
        if self.block_size == 1 or found.num_tokens >= end:
            return -1, 0
        node, block, same = self.nearest(found, tokens, end)
        return (node.block_ids[block], same) if same else (-1, 0)

    def nearest(self, found: Position, tokens: Packed, end: int) -> tuple[Node, int, int]:
        """Find where in the tree most tokens agree beyond the whole blocks of a key.

        found    where `find` stopped, its `num_tokens` counted from the key's begin
        returns  the node, the index of the block within its edge, and how many of that block's
                 first tokens agree, fewer than a block; where none does, `found`'s own node and
                 place, which is one block past its edge if the key covers all of that

        One comparison inside an edge; among children O(log n) steps, as neighbours in the order of
        bytes share the longest beginning.  Changes nothing that can be seen (`Node.nearest` keeps
        many children in order from the first time on).
        """
        node, at, inside = found.node, found.num_tokens, found.inside
        best = (node, inside // self.block_size, 0)
        limit = min(end - at, self.block_size)
        if inside < node.num_tokens:
            first = inside * TOKEN_BYTES
            block = node.edge[first : first + limit * TOKEN_BYTES]
            return node, best[1], common_prefix_len(tokens, at, block, limit)
        wanted = bytes(tokens[at * TOKEN_BYTES : (at + limit) * TOKEN_BYTES])
        for child in node.nearest(wanted):
            same = common_prefix_len(tokens, at, child.edge, limit)
            if same > best[2]:
                best = (child, 0, same)
        return best

    def runs(self, node: Node, above: Node | None) -> list[array[int]]:
        """Return the edges' own block ids on the way from `above` (not counted) down to `node`."""
        runs = []
        current: Node | None = node
        while current is not None and current is not above:
            runs.append(current.block_ids)
            current = current.parent
        runs.reverse()
        return runs

    def blocks_of(self, found: Position) -> bytes:
        """Return the packed ids of the blocks on the way down to a position."""
        runs = self.runs(found.node, None)
        if found.inside < found.node.num_tokens:
            runs[-1] = runs[-1][: found.inside // self.block_size]
        return b"".join(runs)

    def blocks(self, node: Node, above: Node | None) -> array[int]:
        """Return a copy of the block ids on the way from `above` (not counted) down to `node`."""
        ids = array("i")
        for run in self.runs(node, above):
            ids.extend(run)
        return ids

    def split(self, node: Node, inside: int) -> Node:
        """Cut a node's edge after `inside` tokens; return the new upper node.

            parent ──[0 … inside│inside … n]──► node
            parent ──[0 … inside]──► upper ──[inside … n]──► node

        `node` stays the lower part, so whoever holds it holds what it held.  The upper node is
        pinned if the lower is, by that one child.
        """
        cut, cut_blocks = inside * TOKEN_BYTES, inside // self.block_size
        parent = node.parent
        assert parent is not None
        upper = self._node(
            node.namespace, parent, bytes(node.edge[:cut]), node.block_ids[:cut_blocks], node.start
        )
        upper.last_access, upper.created = node.last_access, node.created
        upper.lock_ref = 1 if node.lock_ref else 0
        upper.is_abandoned = node.is_abandoned
        parent.children[self._first_block(upper)] = upper  # in the place of `node`
        node.edge = bytes(node.edge[cut:])
        del node.block_ids[:cut_blocks]
        node.parent = upper
        node.start += inside
        upper.adopt(self._first_block(node), node)
        self.num_nodes += 1
        return upper

    def attach(self, parent: Node, edge: bytes, block_ids: array[int]) -> Node:
        """Hang a new leaf below `parent`; its first block must be new there."""
        start = parent.start + parent.num_tokens
        node = self._node(parent.namespace, parent, edge, block_ids, start)
        parent.adopt(self._first_block(node), node)
        self.num_nodes += 1
        return node

    def extend(self, leaf: Node, edge: Packed, block_ids: array[int]) -> None:
        """Lengthen a leaf's edge in place: a growing sequence stays one node."""
        self._growing(leaf).extend(edge)
        leaf.block_ids.extend(block_ids)

    def trim(self, leaf: Node, num_blocks: int) -> array[int]:
        """Cut the last blocks off a leaf's edge, fewer than all; return their ids."""
        keep = len(leaf.block_ids) - num_blocks
        cut = leaf.block_ids[keep:]
        del leaf.block_ids[keep:]
        del self._growing(leaf)[keep * self.block_size * TOKEN_BYTES :]
        return cut

    def remove(self, leaf: Node) -> Node:
        """Take a leaf off the tree; return its parent."""
        parent = leaf.parent
        assert parent is not None
        parent.disown(self._first_block(leaf))
        leaf.parent = None
        self.num_nodes -= 1
        return parent

    def walk(self) -> Iterator[Node]:
        """Iterate over all nodes, parents before children, roots included."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _node(
        self,
        namespace: Namespace,
        parent: Node | None,
        edge: bytes,
        block_ids: array[int],
        start: int,
    ) -> Node:
        self._next_id += 1
        return Node(
            self._next_id,
            namespace=namespace,
            parent=parent,
            edge=edge,
            block_ids=block_ids,
            start=start,
        )

    def _growing(self, leaf: Node) -> bytearray:
        """A leaf's edge, from now on one that can change in place."""
        if not isinstance(leaf.edge, bytearray):
            leaf.edge = bytearray(leaf.edge)
        return leaf.edge

    def _first_block(self, node: Node) -> bytes:
        return bytes(node.edge[: self.block_size * TOKEN_BYTES])
