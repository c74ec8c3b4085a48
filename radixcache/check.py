"""Every invariant of the cache, derived anew from its parts.

Owns: what must hold, and saying what does not.  Does not know: how the counts are kept; it trusts
none of them.
Idea: the numbering is that of docs/invariants.md.  Content (I10) can't be seen from here: the
tests' content oracle guards it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from radixcache.deadlines import Hold
from radixcache.errors import InvariantViolation
from radixcache.lease import Lease
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from radixcache.cache import RadixCache


def verify(cache: RadixCache) -> None:
    """Raise InvariantViolation for the first invariant of `cache` that does not hold."""
    nodes = list(cache.tree.walk())
    _check_pool(cache, nodes)
    _check_pins(cache, nodes)
    for node in nodes:
        _check_node(cache, node)
    _check_index(cache, nodes)
    _check_leases(cache, nodes)
    _check_counts(cache, nodes)
    _check_accounts(cache, nodes)
    cache.deadlines.check(nodes)


def _hold(name: str, condition: bool, detail: str, *subjects: object) -> None:
    """Raise unless the condition holds; the detail is only then filled in with its subjects."""
    if not condition:
        raise InvariantViolation(f"{name}: {detail.format(*subjects)}")


def _check_pool(cache: RadixCache, nodes: list[Node]) -> None:
    """I1 every block is free or owned; I3 refcount = tree's ownership + private holders."""
    owned = Counter(block for node in nodes for block in node.block_ids)
    _hold("I3", all(n == 1 for n in owned.values()), "a block stands on two edges")
    block_size = cache.config.block_size
    expected = owned.copy()
    for lease in cache.leases.values():
        expected.update(lease.block_table[lease.num_committed // block_size :])
    free = cache.pool.free_ids()
    _hold("I1", len(set(free)) == len(free), "a block is on the free list twice")
    for block in range(cache.pool.capacity):
        refs = cache.pool.refcount(block)
        _hold(
            "I3", refs == expected[block], "block {}: {} ≠ {} owners", block, refs, expected[block]
        )
    _hold(
        "I1",
        set(free) == {b for b in range(cache.pool.capacity) if not expected[b]},
        "the free list is not exactly the blocks without an owner",
    )


def _check_pins(cache: RadixCache, nodes: list[Node]) -> None:
    """I2 lock_ref = leases and holds that end on the node + its pinned children."""
    ends = Counter(id(lease.node) for lease in cache.leases.values())
    ends.update(id(hold.node) for hold in cache.deadlines.holds.values())
    _hold("I2", ends.keys() <= {id(node) for node in nodes}, "a lease ends on a node off the tree")
    for hold in cache.deadlines.holds.values():
        _hold("I2", hold.node.end == hold.num_tokens, "{!r} ends at {!r}", hold, hold.node)
        _hold("I2", not hold.has_ended, "{!r} is kept, but has ended", hold)
    for node in nodes:
        pinned = sum(1 for child in node.children.values() if child.lock_ref)
        expected = ends[id(node)] + pinned
        goes_first = [child.is_abandoned for child in node.children.values()]
        is_left = not node.lock_ref and all(goes_first)
        _hold("I5", is_left or not node.is_abandoned, "{!r} is abandoned, but used", node)
        _hold("I2", node.lock_ref == expected, "{!r}: lock_ref should be {}", node, expected)


def _check_node(cache: RadixCache, node: Node) -> None:
    """I4 edges are whole blocks, and children are found by their first block."""
    block_bytes = cache.config.block_size * TOKEN_BYTES
    blocks, rest = divmod(len(node.edge), block_bytes)
    _hold("I4", rest == 0 and blocks == len(node.block_ids), "{!r}: edge and blocks differ", node)
    _hold("I4", (blocks == 0) == (node.parent is None), "{!r}: only a root has no edge", node)
    for first, child in node.children.items():
        _hold("I4", child.parent is node, "{!r} does not know its parent", child)
        _hold("I4", bytes(child.edge[:block_bytes]) == first, "{!r} under a foreign key", child)
        _hold("I4", child.namespace == node.namespace, "{!r} in two namespaces", child)
    if node.heads is not None:
        filed = [
            (head, first)
            for head, alike in node.heads.items()
            for first in ([alike] if isinstance(alike, bytes) else alike)
        ]
        expected = [(first[:TOKEN_BYTES], first) for first in node.children]
        _hold(
            "I4", sorted(filed) == sorted(expected), "{!r}: its heads are not its children's", node
        )
    if node.parent is not None:
        start = node.parent.start + node.parent.num_tokens
        _hold("I4", node.start == start, "{!r}: its edge should start at {}", node, start)
    if node.parent is None:
        _hold("I4", cache.tree.roots.get(node.namespace) is node, "{!r}: root of nothing", node)
        _hold("I4", bool(node.children or node.lock_ref), "{!r}: an unused root is kept", node)


def _check_index(cache: RadixCache, nodes: list[Node]) -> None:
    """I5 the indexes hold exactly the unpinned leaves, each under its present rank, in order."""
    expected = {node.node_id: node for node in nodes if node.is_leaf and not node.lock_ref}
    indexes = {id(account.index): account.index for account in cache.accounts}
    indexes[id(cache.accounts.index)] = cache.accounts.index
    total = 0
    for index in indexes.values():
        listed = list(index)
        total += len(listed)
        _hold("I5", len(listed) == len(index), "an index lists too many or too few")
        for entry in index.entries():
            rank, _, node = entry
            account = cache.accounts.by_namespace.get(node.namespace)
            _hold("I11", account is not None, "{!r} is in a namespace without account", node)
            own = account.index if account else None
            _hold("I5", expected.get(node.node_id) is node, "{!r} is indexed, not evictable", node)
            _hold("I5", index is own, "{!r} is in the index of another namespace", node)
            _hold("I5", node.entry is entry, "{!r} knows another entry than its own", node)
            _hold("I5", rank == index.rank(node), "{!r}: stale rank", node)
        ranks = [entry[:2] for entry in index.entries()]
        _hold("I5", ranks == sorted(ranks), "an index is out of order")
    _hold("I5", total == len(expected), "{} leaves are indexed, {} evictable", total, len(expected))


def _check_leases(cache: RadixCache, nodes: list[Node]) -> None:
    """I4 and I7 for leases: the committed part is exactly the path to the lease's node."""
    block_size = cache.config.block_size
    for lease in cache.leases.values():
        path: list[Node] = []
        node: Node | None = lease.node
        while node is not None:
            path.append(node)
            node = node.parent
        edge = b"".join(bytes(n.edge) for n in reversed(path))
        blocks = [b for n in reversed(path) for b in n.block_ids]
        committed = lease.num_committed
        _hold("I7", len(edge) == committed * TOKEN_BYTES, "{!r}: its path is another length", lease)
        _hold("I7", lease.tokens.startswith(edge), "{!r}: its path has other tokens", lease)
        shared = lease.block_table[: committed // block_size].tolist()
        _hold("I7", shared == blocks, "{!r}: its table names other blocks than its path", lease)
        _hold(
            "I4",
            len(lease.block_table) == -(-lease.num_tokens // block_size),
            "{!r}: {} blocks",
            lease,
            len(lease.block_table),
        )
        _hold("I4", lease.namespace == lease.node.namespace, "{!r}: foreign namespace", lease)


def _check_counts(cache: RadixCache, nodes: list[Node]) -> None:
    """I8 counters equal what a walk finds."""
    pinned = sum(len(node.block_ids) for node in nodes if node.lock_ref)
    evictable = sum(len(node.block_ids) for node in nodes if not node.lock_ref)
    inner = sum(1 for node in nodes if node.parent is not None)
    pins = cache.pins
    _hold("I8", pins.num_pinned == pinned, "{} pinned counted, {} found", pins.num_pinned, pinned)
    _hold("I8", pins.num_evictable == evictable, "{} ≠ {} evictable", pins.num_evictable, evictable)
    _hold("I8", cache.tree.num_nodes == inner, "{} nodes ≠ {}", cache.tree.num_nodes, inner)


def _check_accounts(cache: RadixCache, nodes: list[Node]) -> None:
    """I11 each account counts what its namespace owns; the order of those over is present."""
    block_size = cache.config.block_size
    owned: dict[Namespace, set[int]] = {account.namespace: set() for account in cache.accounts}
    owners: list[Node | Lease | Hold] = [*nodes, *cache.leases.values()]
    for owner in (*owners, *cache.deadlines.holds.values()):
        _hold("I11", owner.namespace in owned, "{!r} is in a namespace without account", owner)
    nodes_of: dict[Namespace, list[Node]] = {namespace: [] for namespace in owned}
    for node in nodes:
        nodes_of[node.namespace].append(node)
        owned[node.namespace].update(node.block_ids)
    for lease in cache.leases.values():
        owned[lease.namespace].update(lease.block_table[lease.num_committed // block_size :])
    cache.accounts.settle()
    for account in cache.accounts:
        mine = nodes_of[account.namespace]
        pinned = sum(len(node.block_ids) for node in mine if node.lock_ref)
        counted = (account.num_owned, account.num_pinned, account.num_evictable)
        found = (
            len(owned[account.namespace]),
            pinned,
            sum(len(n.block_ids) for n in mine) - pinned,
        )
        _hold(
            "I11", counted == found, "{}: {} counted, {} found", account.namespace, counted, found
        )
        _hold("I11", bool(mine or account.quota), "the account of {} is kept", account.namespace)
        is_apart = account.index is not cache.accounts.index
        _hold("I11", is_apart == (account.quota is not None), "{}: wrong index", account.namespace)
    cache.accounts.check()
