"""The tree on paper: a manifest of what is cached, without the K/V.

Owns: the form, its version and its checksum.  Does not know: where K/V is kept; whoever keeps it
moves block `old` to block `new` by the mapping that `load_tree` returns.
Idea: a manifest is taken whole or not at all.  Everything in it is checked before the cache is
touched, so a damaged file can't leave half a tree behind.

    b"RXTREE" | version, 2 bytes | SHA-256 of the rest, 32 bytes | msgpack body
"""

from __future__ import annotations

from collections import Counter
from hashlib import sha256

import msgspec

from radixcache.cache import RadixCache
from radixcache.errors import InvalidSnapshot
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES

MAGIC = b"RXTREE"
"""The first bytes of every manifest."""

VERSION = 2
"""The form that is written, and the only one that is read."""

_HEADER_BYTES = len(MAGIC) + 2 + 32


class _SavedNode(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node; `parent` is its parent's place in the list, -1 below a root."""

    parent: int
    namespace: Namespace
    edge: bytes
    block_ids: list[int]
    last_access: int
    created: int
    num_hits: int
    is_abandoned: bool


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    block_size: int
    nodes: list[_SavedNode]


def dump_tree(cache: RadixCache) -> bytes:
    """Return the manifest of everything that is cached; O(nodes + tokens), changes nothing.

    Private blocks of live leases are not in it.
    """
    places: dict[int, int] = {}
    saved: list[_SavedNode] = []
    for node in cache.tree.walk():
        if node.parent is None:
            continue
        places[node.node_id] = len(saved)
        saved.append(
            _SavedNode(
                parent=places.get(node.parent.node_id, -1),
                namespace=node.namespace,
                edge=bytes(node.edge),
                block_ids=node.block_ids.tolist(),
                last_access=node.last_access,
                created=node.created,
                num_hits=node.num_hits,
                is_abandoned=node.is_abandoned,
            )
        )
    body = msgspec.msgpack.encode(_Body(cache.config.block_size, saved))
    return MAGIC + VERSION.to_bytes(2, "big") + sha256(body).digest() + body


def load_tree(cache: RadixCache, manifest: bytes) -> dict[int, int]:
    """Fill an empty cache from a manifest; return the new block id of each old one.

    Copy each block's K/V before the next step runs.  Hits, creation times and the order of eviction
    are as they were, what is abandoned first; priorities are not kept.  O(nodes + tokens).
    Raises InvalidSnapshot for a damaged or foreign manifest, another block size, a cache that is
    not empty, or a pool or quota too small; the cache is untouched then.
    """
    body = _checked_body(manifest)
    _check_fits(cache, body)
    mapping: dict[int, int] = {}
    nodes: list[Node] = []
    for saved in body.nodes:
        parent = nodes[saved.parent] if saved.parent >= 0 else cache.tree.root(saved.namespace)
        account = cache.accounts.open(saved.namespace)
        block_ids = cache.room.allocate(account, len(saved.block_ids))
        mapping.update(zip(saved.block_ids, block_ids, strict=True))
        node = cache.tree.attach(parent, saved.edge, block_ids)
        node.last_access, node.created = saved.last_access, saved.created
        node.num_hits = saved.num_hits
        cache.pins.attached(node)
        for observer in cache.room.observers:
            observer.stored(node, len(block_ids))
        nodes.append(node)
    for node, saved in zip(nodes, body.nodes, strict=True):
        if saved.is_abandoned:  # now that what hangs below it is there
            node.is_abandoned = True
            cache.pins.reranked(node)
    cache.advance_clock(max((saved.last_access for saved in body.nodes), default=0))
    return mapping


def _checked_body(manifest: bytes) -> _Body:
    """Check form, version and checksum."""
    if manifest[: len(MAGIC)] != MAGIC or len(manifest) < _HEADER_BYTES:
        raise InvalidSnapshot("this is no manifest of a tree: its first bytes are others")
    version = int.from_bytes(manifest[len(MAGIC) : len(MAGIC) + 2], "big")
    if version != VERSION:
        raise InvalidSnapshot(f"the manifest has version {version}, and only {VERSION} is read")
    body = manifest[_HEADER_BYTES:]
    if sha256(body).digest() != manifest[len(MAGIC) + 2 : _HEADER_BYTES]:
        raise InvalidSnapshot("the manifest is damaged: its checksum does not agree")
    try:
        return msgspec.msgpack.decode(body, type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidSnapshot(f"the manifest's body has another form: {error}") from None


def _check_fits(cache: RadixCache, body: _Body) -> None:
    """Check that the body describes a tree, and one that this cache can take."""
    block_size = cache.config.block_size
    if cache.tree.num_nodes or cache.leases:
        raise InvalidSnapshot("a manifest is loaded into an empty cache only")
    if body.block_size != block_size:
        raise InvalidSnapshot(f"its blocks have {body.block_size} tokens, ours {block_size}")
    wanted = Counter[Namespace]()
    for saved in body.nodes:
        wanted[saved.namespace] += len(saved.block_ids)
    for namespace, count in wanted.items():
        account = cache.accounts.by_namespace.get(namespace)
        left = account.num_left if account else None
        if left is not None and count > left:
            raise InvalidSnapshot(
                f"it needs {count} blocks in one namespace, whose quota leaves {left}: "
                "raise its hard limit"
            )
    block_ids = [block for saved in body.nodes for block in saved.block_ids]
    if len(block_ids) > cache.pool.num_free:
        raise InvalidSnapshot(
            f"it needs {len(block_ids)} blocks, and {cache.pool.num_free} are free: "
            "use a larger pool"
        )
    if len(set(block_ids)) != len(block_ids):
        raise InvalidSnapshot("it names a block twice")
    block_bytes = block_size * TOKEN_BYTES
    firsts: set[tuple[int, Namespace, bytes]] = set()
    for place, saved in enumerate(body.nodes):
        if not -1 <= saved.parent < place:
            raise InvalidSnapshot(f"node {place} hangs below one that does not come before it")
        if saved.parent >= 0 and body.nodes[saved.parent].namespace != saved.namespace:
            raise InvalidSnapshot(f"node {place} is in another namespace than its parent")
        if saved.parent >= 0 and body.nodes[saved.parent].is_abandoned > saved.is_abandoned:
            raise InvalidSnapshot(f"node {place} is in use, and its parent is abandoned")
        if not saved.block_ids or len(saved.edge) != len(saved.block_ids) * block_bytes:
            raise InvalidSnapshot(f"node {place}: its tokens do not fill its blocks")
        first = (saved.parent, saved.namespace, saved.edge[:block_bytes])
        if first in firsts:
            raise InvalidSnapshot(f"node {place} begins like one of its siblings")
        firsts.add(first)
