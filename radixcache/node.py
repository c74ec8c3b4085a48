"""One node of the radix tree: an edge of whole blocks, and who stands on it.

Owns: the fields.  Does not know: how they change; tree and pins do that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import Protocol

from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES

FEW_CHILDREN = 8
"""Up to so many children are looked through one by one."""


class NodeFacts(Protocol):
    """What an eviction policy may see of a node."""

    @property
    def node_id(self) -> int:
        """Order of creation, unique in the cache."""

    @property
    def last_access(self) -> int:
        """Logical time of the last acquire or commit that ended here, or at an evicted child."""

    @property
    def created(self) -> int:
        """Logical time at which the first block of the edge was published."""

    @property
    def num_hits(self) -> int:
        """Acquires that found the node in the cache and ended here, or at an evicted child."""

    @property
    def start(self) -> int:
        """Tokens of the prefix before the edge."""

    @property
    def num_tokens(self) -> int:
        """Tokens on the edge."""


class Node:
    """A run of tokens whose K/V is cached, behind its parent's.

        parent ──edge: block 0 │ block 1 │ … ──► node ──► children, by their first block

    edge         packed tokens from the parent to here, whole blocks; grows in place on a leaf
    block_ids    one block id for each block of the edge
    children     child nodes by the bytes of their edge's first block
    order        the keys of `children` in order, kept once there were many; else None
    lock_ref     leases that end here + children that are pinned; 0 means evictable
    last_access  logical time of the last acquire or commit that ended here, or at an evicted child
    created      logical time at which the first block of the edge was published
    num_hits     acquires that found it in the cache and ended here, or at an evicted child
    start        tokens of the prefix before the edge
    """

    __slots__ = (
        "block_ids",
        "children",
        "created",
        "edge",
        "last_access",
        "lock_ref",
        "namespace",
        "node_id",
        "num_hits",
        "order",
        "parent",
        "start",
    )

    def __init__(
        self,
        node_id: int,
        *,
        namespace: Namespace,
        parent: Node | None,
        edge: bytearray,
        block_ids: array[int],
        start: int,
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.parent = parent
        self.edge = edge
        self.block_ids = block_ids
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] | None = None
        self.lock_ref = 0
        self.last_access = 0
        self.created = 0
        self.num_hits = 0
        self.start = start

    @property
    def num_tokens(self) -> int:
        """Tokens on the edge."""
        return len(self.edge) // TOKEN_BYTES

    @property
    def is_leaf(self) -> bool:
        """True where no child hangs below; a root is never a leaf."""
        return not self.children and self.parent is not None

    def adopt(self, first_block: bytes, child: Node) -> None:
        """Add a child under its first block, which must be new here."""
        self.children[first_block] = child
        if self.order is not None:
            insort(self.order, first_block)

    def disown(self, first_block: bytes) -> None:
        """Take a child out."""
        del self.children[first_block]
        if self.order is not None:
            del self.order[bisect_left(self.order, first_block)]

    def nearest(self, wanted: bytes) -> list[Node]:
        """Return the children among which is the one whose first block shares most with `wanted`.

        All of few; of many the two neighbours in the order of bytes, found in O(log n).
        """
        if len(self.children) <= FEW_CHILDREN:
            return list(self.children.values())
        if self.order is None:
            self.order = sorted(self.children)
        place = bisect_left(self.order, wanted)
        return [self.children[key] for key in self.order[max(0, place - 1) : place + 1]]

    def __repr__(self) -> str:
        return f"Node({self.node_id}, {self.num_tokens} tokens, lock_ref={self.lock_ref})"
