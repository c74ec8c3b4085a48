"""The tree as it is now, as records that may leave the owning thread, and as text.

Owns: the picture.  Does not know: tokenizers (give `render_text` a decoder) or servers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from radixcache.accounts import Accounts
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import unpack_tokens
from radixcache.tree import RadixTree


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the tree.

    namespace    the tree that it is in
    parent       `node_id` of the parent, None below a root
    depth        nodes between this one and its root
    tokens       packed ids of the edge
    block_ids    blocks of the edge
    lock_ref     leases that end here + pinned children
    last_access  logical time of the last access here or below
    priority     what a `Retention` made it worth, while that lasts; else 0
    evict_order  place among the evictable leaves in the policy's order, 0 goes first but where
                 quotas guard it; None where it can't be evicted
    """

    node_id: int
    namespace: Namespace
    parent: int | None
    depth: int
    tokens: bytes
    block_ids: tuple[int, ...]
    lock_ref: int
    last_access: int
    priority: int
    evict_order: int | None


class TreeView(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes, parents before children, siblings in order of creation; blocks of `block_size`."""

    block_size: int
    nodes: tuple[NodeView, ...]


def view_tree(tree: RadixTree, accounts: Accounts) -> TreeView:
    """Copy the tree into records; O(nodes + tokens)."""
    order = {node.node_id: place for place, node in enumerate(accounts.leaves())}
    views: list[NodeView] = []
    latest: dict[int, int] = {}
    stack: list[tuple[Node, int | None, int]] = [
        (child, None, 0) for root in tree.roots.values() for child in _youngest_first(root)
    ]
    walked: list[tuple[Node, int | None, int]] = []
    while stack:
        node, parent, depth = stack.pop()
        walked.append((node, parent, depth))
        stack.extend((child, node.node_id, depth + 1) for child in _youngest_first(node))
    for node, parent, _ in reversed(walked):
        latest[node.node_id] = max(latest.get(node.node_id, 0), node.last_access)
        if parent is not None:
            latest[parent] = max(latest.get(parent, 0), latest[node.node_id])
    for node, parent, depth in walked:
        views.append(
            NodeView(
                node_id=node.node_id,
                namespace=node.namespace,
                parent=parent,
                depth=depth,
                tokens=bytes(node.edge),
                block_ids=tuple(node.block_ids),
                lock_ref=node.lock_ref,
                last_access=latest[node.node_id],
                priority=node.priority,
                evict_order=order.get(node.node_id),
            )
        )
    return TreeView(block_size=tree.block_size, nodes=tuple(views))


def _youngest_first(node: Node) -> list[Node]:
    return sorted(node.children.values(), key=lambda child: -child.node_id)


def render_text(
    view: TreeView, *, decode: Callable[[list[int]], str] | None = None, width: int = 40
) -> str:
    """Draw a view as indented text, one line a node.

    decode  token ids to text; without it the ids are shown
    width   longest piece of text shown of an edge, in characters

    >>> from radixcache import CacheConfig, PrefixKey, RadixCache
    >>> cache = RadixCache(CacheConfig(num_blocks=4, block_size=2))
    >>> lease = cache.acquire(PrefixKey.of([1, 2, 3]))
    >>> _ = cache.commit(lease, 3)
    >>> print(render_text(cache.view()))
    1 2  · 2 tokens in 1 block · pinned by 1
    """
    lines = []
    for node in view.nodes:
        ids = unpack_tokens(node.tokens)
        text = decode(ids) if decode else " ".join(map(str, ids[:width]))
        text = text.replace("\n", "⏎")
        if len(text) > width:
            text = text[: width - 1] + "…"
        count = len(node.block_ids)
        state = f"pinned by {node.lock_ref}" if node.lock_ref else "evictable"
        if node.evict_order is not None:
            state += f", goes {node.evict_order + 1}."
        size = f"{len(ids)} tokens in {count} block{'s' if count > 1 else ''}"
        lines.append(f"{'   ' * node.depth}{text}  · {size} · {state}")
    return "\n".join(lines)
