"""Which nodes of a large tree are shown on a small screen, and in which order.

Owns: what is open, the order, and what is left out and told so.  Does not know: colours, keys.
Idea: unless told otherwise, the largest node is opened next as long as its children fit, so a
screen of any height shows what takes up the room.  What is left out is a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, nlargest
from typing import NamedTuple

from runtime.top.model import Node, TreeModel

FEW = 8
"""Children of a node that are shown at first; as many more each time that they are asked for."""

ORDERS: dict[str, Callable[[Node], float]] = {
    "size": lambda node: node.all_blocks,
    "heat": lambda node: node.used,
    "hits": lambda node: node.all_hits,
}
"""What siblings are ordered by, the greatest first."""


class Line(NamedTuple):
    """One line of the tree.

    node     the node, or of what is left out the parent
    guides   for each level above, whether more follows there; the last is its own level's
    is_open  whether its children are shown
    num_left_out, blocks_left_out
             of a line that stands for siblings that are not shown; else 0
    """

    node: Node
    guides: tuple[bool, ...]
    is_open: bool
    num_left_out: int = 0
    blocks_left_out: int = 0

    @property
    def key(self) -> tuple[int, bool]:
        """What the line is known by from frame to frame."""
        return self.node.node_id, self.num_left_out > 0


class Listing:
    """What somebody opened and closed, and the order that they chose."""

    def __init__(self) -> None:
        self.order = "size"
        self._said: dict[int, bool] = {}  # ids of nodes that were opened or closed by hand
        self._more: dict[int, int] = {}  # further children shown, by the parent's id

    def next_order(self) -> None:
        """Order by the next of `ORDERS`."""
        names = list(ORDERS)
        self.order = names[(names.index(self.order) + 1) % len(names)]

    def open(self, line: Line) -> None:
        """Show a node's children; of what is left out, some more."""
        node_id = line.node.node_id
        if line.num_left_out:
            self._more[node_id] = self._more.get(node_id, 0) + FEW
        else:
            self._said[node_id] = True

    def close(self, line: Line) -> None:
        """Show a node's children no more."""
        self._said[line.node.node_id] = False

    def forget(self) -> None:
        """Open and close by size alone again."""
        self._said.clear()
        self._more.clear()

    def lines(self, model: TreeModel, height: int) -> list[Line]:
        """Return the lines of the tree, about `height` of them unless more was opened by hand."""
        opened = self._opened(model, height)
        lines: list[Line] = []
        stack = [Line(node, (), False) for node in reversed(self._sorted(model.roots.values()))]
        while stack:
            line = stack.pop()
            is_open = line.node.node_id in opened and not line.num_left_out
            lines.append(line._replace(is_open=is_open))
            if is_open:
                stack += reversed(self._below(line))
        return lines

    def _below(self, line: Line) -> list[Line]:
        shown = self._shown(line.node)
        left_out = len(line.node.children) - len(shown)
        last = len(shown) - 1
        lines = [
            Line(child, (*line.guides, place < last or left_out > 0), False)
            for place, child in enumerate(shown)
        ]
        if left_out:
            blocks = line.node.all_blocks - line.node.blocks
            blocks -= sum(node.all_blocks for node in shown)
            guides = (*line.guides, False)
            lines.append(Line(line.node, guides, False, left_out, blocks))
        return lines

    def _opened(self, model: TreeModel, height: int) -> set[int]:
        """Choose what is open: the largest first, as long as it fits."""
        opened: set[int] = set()
        count = len(model.roots)
        heap = [(-node.all_blocks, node.node_id, node) for node in model.roots.values()]
        heapify(heap)
        while heap:
            _, node_id, node = heappop(heap)
            shown = self._shown(node)
            cost = len(shown) + (len(node.children) > len(shown))
            said = self._said.get(node_id)
            fits = count + cost <= height if said is None else said
            if not fits or not shown:
                continue
            opened.add(node_id)
            count += cost
            for child in shown:
                heappush(heap, (-child.all_blocks, child.node_id, child))
        return opened

    def _shown(self, node: Node) -> list[Node]:
        most = FEW + self._more.get(node.node_id, 0)
        if len(node.children) <= most + 1:  # one left out would take up the line that it saves
            return self._sorted(node.children.values())
        return nlargest(most, node.children.values(), key=self._key)

    def _sorted(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self._key, reverse=True)

    def _key(self, node: Node) -> tuple[float, int]:
        return ORDERS[self.order](node), -node.node_id
