"""One node of the radix tree: an edge of whole blocks, and who stands on it.

Owns: the fields.  Does not know: how they change; tree and pins do that.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from sortedcontainers import SortedList

from radixcache.namespace import Namespace
from radixcache.retention import Retention
from radixcache.tokens import TOKEN_BYTES, Packed

FEW_CHILDREN = 8
"""Up to so many children are looked through one by one."""

NO_CHILDREN: dict[bytes, Any] = {}
"""The children of every node that has none; never written to."""

Heads = dict[bytes, Any]
"""First blocks by their first token: one as it is, a list of few, a SortedList of many."""


class NodeFacts(Protocol):
    """What an eviction policy may see of a node."""

    @property
    def node_id(self) -> int:
        """Order of creation, unique in the cache."""

    @property
    def edge(self) -> Packed:
        """Packed tokens from the parent to here."""

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

    @property
    def priority(self) -> int:
        """What a `Retention` made it worth, while that lasts; else 0."""


class Node:
    """A run of tokens whose K/V is cached, behind its parent's.

        parent ──edge: block 0 │ block 1 │ … ──► node ──► children, by their first block

    edge         packed tokens from the parent to here, whole blocks; bytes, of which the first
                 block is its own key where it is the only one, and a bytearray once it grew
    block_ids    one block id for each block of the edge
    children     child nodes by the bytes of their edge's first block
    heads        the keys of `children` by their first token, kept once there were many; else None
    lock_ref     leases that end here + children that are pinned; 0 means evictable
    last_access  logical time of the last acquire or commit that ended here, or at an evicted child
    created      logical time at which the first block of the edge was published
    num_hits     acquires that found it in the cache and ended here, or at an evicted child
    start        tokens of the prefix before the edge
    retention    what the whole edge is worth to policies that ask; None: no more than others
    is_abandoned whether nobody is said to come back to it, nor to anything below: it goes first
    entry        (rank, node_id, node) in its namespace's eviction index; None where it is in none
    """

    __slots__ = (
        "block_ids",
        "children",
        "created",
        "edge",
        "entry",
        "heads",
        "is_abandoned",
        "last_access",
        "lock_ref",
        "namespace",
        "node_id",
        "num_hits",
        "parent",
        "retention",
        "start",
    )

    def __init__(
        self,
        node_id: int,
        *,
        namespace: Namespace,
        parent: Node | None,
        edge: Packed,
        block_ids: array[int],
        start: int,
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.parent = parent
        self.edge = edge
        self.block_ids = block_ids
        self.children: dict[bytes, Node] = NO_CHILDREN
        self.heads: Heads | None = None
        self.lock_ref = 0
        self.last_access = 0
        self.created = 0
        self.num_hits = 0
        self.start = start
        self.retention: Retention | None = None
        self.is_abandoned = False
        self.entry: tuple[Any, int, Node] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens on the edge."""
        return len(self.edge) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """Tokens of the prefix up to here, the edge included."""
        return self.start + len(self.edge) // TOKEN_BYTES

    @property
    def priority(self) -> int:
        """What a retention made the edge worth, while that lasts; else 0."""
        return self.retention.priority if self.retention else 0

    @property
    def is_leaf(self) -> bool:
        """True where no child hangs below; a root is never a leaf."""
        return not self.children and self.parent is not None

    def adopt(self, first_block: bytes, child: Node) -> None:
        """Add a child under its first block, which must be new here."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[first_block] = child
        if self.heads is not None:
            self._enter(self.heads, first_block)

    def disown(self, first_block: bytes) -> None:
        """Take a child out."""
        del self.children[first_block]
        if self.heads is not None:
            head = first_block[:TOKEN_BYTES]
            alike = self.heads[head]
            if not isinstance(alike, bytes):
                alike.remove(first_block)
            if isinstance(alike, bytes) or not alike:
                del self.heads[head]

    def nearest(self, wanted: bytes) -> list[Node]:
        """Return the children among which is the one whose first block shares most with `wanted`.

        All of few.  Of many, those that share its first token: if they are many too, the two
        neighbours in the order of bytes, found in O(log n).
        """
        if len(self.children) <= FEW_CHILDREN:
            return list(self.children.values())
        if self.heads is None:
            self.heads = {}
            for first_block in self.children:
                self._enter(self.heads, first_block)
        alike = self.heads.get(wanted[:TOKEN_BYTES], ())
        if isinstance(alike, bytes):
            return [self.children[alike]]
        if isinstance(alike, SortedList):
            place = alike.bisect_left(wanted)
            alike = alike[max(0, place - 1) : place + 1]
        return [self.children[first_block] for first_block in alike]

    def _enter(self, heads: Heads, first_block: bytes) -> None:
        head = first_block[:TOKEN_BYTES]
        alike = heads.setdefault(head, first_block)
        if alike is first_block:
            return
        if isinstance(alike, SortedList):
            alike.add(first_block)
        elif isinstance(alike, bytes):
            heads[head] = [alike, first_block]
        else:
            alike.append(first_block)
            if len(alike) > FEW_CHILDREN:
                heads[head] = SortedList(alike)

    def __repr__(self) -> str:
        return f"Node({self.node_id}, {self.num_tokens} tokens, lock_ref={self.lock_ref})"
