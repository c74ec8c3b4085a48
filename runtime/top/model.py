"""The tree as its feed tells it, with what lies below each node added up.

Owns: the rows, and sums over them.  Does not know: HTTP, what is drawn.
Idea: a row that comes changes the sums on its way up and no others, so a large tree costs no more
to keep than a small one.
"""

from __future__ import annotations

import msgspec

from runtime.tree.records import Sample

ROOT = 0
"""The id that stands for the parent of a namespace's root."""


class Label(msgspec.Struct, frozen=True):
    """What a namespace is called, and whose it is."""

    label: str
    tenant: str | None


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of nodes as they are sent: a list for each column."""

    id: list[int]
    parent: list[int]
    tokens: list[int]
    blocks: list[int]
    hits: list[int]
    used: list[float]
    pins: list[int]
    state: list[str]
    tier: list[str]
    namespace: list[int]
    namespaces: list[Label]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole tree at one moment."""

    seq: int
    time: float
    block_size: int
    num_blocks: int
    nodes: Columns
    sample: Sample
    show_text: bool


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What changed since the snapshot or change before."""

    seq: int
    time: float
    nodes: Columns
    removed: list[int]


class Node:
    """One node: its row, and what was added up.

    used         seconds since 1970, of the warmest at or below it
    above        its parent; None for the root of a namespace
    num_below    nodes below it
    all_blocks   its own and those below
    all_hits     likewise
    """

    __slots__ = (
        "above",
        "all_blocks",
        "all_hits",
        "blocks",
        "children",
        "hits",
        "label",
        "node_id",
        "num_below",
        "parent",
        "pins",
        "state",
        "tokens",
        "used",
    )

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id
        self.parent = ROOT
        self.above: Node | None = None
        self.children: dict[int, Node] = {}
        self.tokens = self.blocks = self.hits = self.pins = 0
        self.used = 0.0
        self.state = self.label = ""
        self.num_below = self.all_blocks = self.all_hits = 0

    @property
    def end(self) -> int:
        """Tokens of the prefix up to and with its edge; O(depth)."""
        count, node = 0, self
        while node.above is not None:
            count += node.tokens
            node = node.above
        return count + node.tokens

    def attach(self, above: Node) -> None:
        """Hang it, and all below it, below another node."""
        self.above = above
        above.children[self.node_id] = self
        self._add_above(1 + self.num_below, self.all_blocks, self.all_hits)
        above.warm(self.used)

    def gather(self, child: Node) -> None:
        """Count a child whose own sums are whole already; for a tree that is built at once."""
        self.num_below += 1 + child.num_below
        self.all_blocks += child.all_blocks
        self.all_hits += child.all_hits
        self.used = max(self.used, child.used)

    def detach(self) -> None:
        """Take it, and all below it, off; nothing where it hangs nowhere."""
        if self.above is not None:
            self._add_above(-1 - self.num_below, -self.all_blocks, -self.all_hits)
            del self.above.children[self.node_id]
            self.above = None

    def grow(self, blocks: int, hits: int) -> None:
        """Have other blocks and hits from now on."""
        more_blocks, more_hits = blocks - self.blocks, hits - self.hits
        self.blocks, self.hits = blocks, hits
        self.all_blocks += more_blocks
        self.all_hits += more_hits
        if more_blocks or more_hits:
            self._add_above(0, more_blocks, more_hits)

    def warm(self, used: float) -> None:
        """Be used at a time, and with it all above that were used before."""
        node: Node | None = self
        while node is not None and node.used < used:
            node.used = used
            node = node.above

    def _add_above(self, nodes: int, blocks: int, hits: int) -> None:
        node = self.above
        while node is not None:
            node.num_below += nodes
            node.all_blocks += blocks
            node.all_hits += hits
            node = node.above


class TreeModel:
    """Keeps the nodes, and their sums, as events come; O(depth) a row.

    block_size, num_blocks  tokens a block, and blocks of the pool
    nodes                   by id, roots of namespaces included
    roots                   by id
    """

    def __init__(self) -> None:
        self.seq = 0
        self.block_size = 0
        self.num_blocks = 0
        self.nodes: dict[int, Node] = {}
        self.roots: dict[int, Node] = {}

    def start(self, snapshot: Snapshot) -> None:
        """Begin anew with a snapshot."""
        self.seq = snapshot.seq
        self.block_size, self.num_blocks = snapshot.block_size, snapshot.num_blocks
        self.nodes, self.roots = {}, {}
        self._rows_taken(snapshot.nodes)
        for node in self.nodes.values():
            node.above = self.nodes.get(node.parent)
            siblings = self.roots if node.above is None else node.above.children
            siblings[node.node_id] = node
        order = list(self.roots.values())
        for node in order:  # grows: parents before children
            order += node.children.values()
        for node in reversed(order):
            if node.above is not None:
                node.above.gather(node)

    def apply(self, change: Change) -> bool:
        """Take over a change; False where one before it is missing, and nothing was done."""
        if change.seq != self.seq + 1:
            return False
        self.seq = change.seq
        for node_id in change.removed:
            node = self.nodes.pop(node_id, None)
            self.roots.pop(node_id, None)
            if node is not None:
                node.detach()
        for node in self._rows_taken(change.nodes):
            above = self.nodes.get(node.parent)
            if above is None:
                self.roots[node.node_id] = node
            else:
                node.attach(above)
        return True

    def _rows_taken(self, rows: Columns) -> list[Node]:
        """Take over rows; return the nodes that hang nowhere: new, or below another parent now."""
        moved: list[Node] = []
        places = zip(rows.id, rows.parent, rows.tokens, rows.blocks, rows.hits, strict=True)
        others = zip(rows.used, rows.pins, rows.state, rows.namespace, strict=True)
        for (node_id, parent, tokens, blocks, hits), (used, pins, state, label) in zip(
            places, others, strict=True
        ):
            node = self.nodes.get(node_id)
            if node is None:
                node = self.nodes[node_id] = Node(node_id)
                moved.append(node)
            elif node.parent != parent:
                node.detach()
                moved.append(node)
            node.parent, node.tokens, node.pins, node.state = parent, tokens, pins, state
            node.label = rows.namespaces[label].label
            node.grow(blocks, hits)
            node.warm(used)
        return moved
