"""What happens to the tree, told as it happens.

Owns: the calls.  Does not know: who listens (event streams, memories of what was evicted).
Idea: a listener sees each block exactly twice, as it is published and as it is given up, and keeps
whatever it needs in a table of its own by `node_id`; the tree carries nothing for it.
"""

from __future__ import annotations

from typing import Protocol

from radixcache.node import Node


class TreeObserver(Protocol):
    """Listens to a `RadixCache`.  Must not change it.

    Must not raise, either: a call is told of in its middle, and one that an observer breaks off is
    half done.  A cache where that happened is to be thrown away.
    """

    def stored(self, node: Node, num_blocks: int) -> None:
        """The last `num_blocks` blocks of the node's edge were just published."""

    def removed(self, node: Node, num_blocks: int) -> None:
        """The last `num_blocks` blocks of the leaf's edge are about to be given up."""

    def split(self, upper: Node, lower: Node) -> None:
        """`lower`'s edge was cut; its first blocks are now `upper`'s, its new parent."""
