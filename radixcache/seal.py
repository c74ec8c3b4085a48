"""What a committed block is for, told apart from where it stands: its seal.

Owns: the record, deriving it from tokens, and noting it as a block is published.  Does not know:
bytes, layouts, devices; runtime/kv adds those where a block leaves its device.
Idea: a block id says where K/V lies, and nothing of what it is.  So whoever keeps blocks, or wants
to be sure of them, keeps a seal beside each and asks whether it is the one that was expected.

    tokens  │ block 0 │ block 1 │ block 2 │
            0       start      end              the seal of block 1 covers all tokens 0 … end
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from radixcache.errors import BrokenSeal
from radixcache.lease import BlockCopy, Lease
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, Packed

if TYPE_CHECKING:
    from radixcache.cache import RadixCache

DIGEST_BYTES = 16
"""Bytes of the digest in a seal."""


class Seal(msgspec.Struct, frozen=True):
    """What one block holds K/V of.

    namespace  whose it is, with its epoch
    start      position of the block's first token
    prefix     BLAKE2b of the packed ids of all tokens up to the block's end
    """

    namespace: Namespace
    start: int
    prefix: bytes


def seals_of(
    namespace: Namespace, tokens: Packed, block_size: int, *, first: int = 0
) -> list[Seal]:
    """Return the seals of the whole blocks of a sequence, from block `first` on.

    O(tokens), a microsecond for about a thousand.

    >>> [seal.start for seal in seals_of(Namespace(), bytes(4 * 9), 4)]
    [0, 4]
    """
    block_bytes = block_size * TOKEN_BYTES
    digest = blake2b(tokens[: first * block_bytes], digest_size=DIGEST_BYTES)
    seals = []
    for at in range(first * block_bytes, len(tokens) - block_bytes + 1, block_bytes):
        digest.update(tokens[at : at + block_bytes])
        seals.append(Seal(namespace, at // TOKEN_BYTES, digest.digest()))
    return seals


def tree_seals(cache: RadixCache) -> dict[int, Seal]:
    """Return the seal of each cached block by its id, derived from where it stands.

    For whoever takes the blocks elsewhere.  O(tokens · depth).
    """
    return {
        block_id: seal
        for node in cache.tree.walk()
        for block_id, seal in zip(
            node.block_ids, _seals_on(node, cache.tree.block_size), strict=True
        )
    }


class Seals:
    """The seal that each block of one cache was given as it was published; an observer.

    Debugging keeps one, as the runtime does with `debug_seals`: `RadixCache(…, observers=[seals])`.
    A seal is noted once, from the path that the block was hung on, and never follows what happens
    to the tree; so an edge that is cut, grown or trimmed wrongly shows.  About 250 bytes a block.

    >>> from radixcache import CacheConfig, PrefixKey, RadixCache
    >>> seals = Seals(block_size=2)
    >>> cache = RadixCache(CacheConfig(num_blocks=8, block_size=2), observers=[seals])
    >>> lease = cache.acquire(PrefixKey.of([1, 2, 3, 4, 5]))
    >>> _ = cache.commit(lease, 5)
    >>> seals.check_lease(lease)  # raises BrokenSeal for a block that is another's
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_block: dict[int, Seal] = {}

    @property
    def by_block(self) -> Mapping[int, Seal]:
        """The seals by block id."""
        return self._by_block

    def stored(self, node: Node, num_blocks: int) -> None:
        """Note the seals of the last blocks of an edge."""
        seals = _seals_on(node, self._block_size)[-num_blocks:]
        self._by_block.update(zip(node.block_ids[-num_blocks:], seals, strict=True))

    def removed(self, node: Node, num_blocks: int) -> None:
        """Forget the seals of the last blocks of a leaf's edge."""
        for block_id in node.block_ids[-num_blocks:]:
            del self._by_block[block_id]

    def split(self, upper: Node, lower: Node) -> None:
        """Nothing: blocks stay what they are, wherever edges are cut."""

    def check_lease(self, lease: Lease) -> None:
        """Check that each committed block of a lease is sealed for its tokens; O(tokens).

        Raises BrokenSeal.
        """
        committed = bytes(lease.tokens[: lease.num_committed * TOKEN_BYTES])
        wanted = seals_of(lease.namespace, committed, self._block_size)
        for block_id, seal in zip(lease.block_table, wanted, strict=False):
            self._check(repr(lease), block_id, seal)

    def check_copy(self, copy: BlockCopy, lease: Lease, *, also: Namespace) -> None:
        """Check that a block from which a lease copies is of its namespace, and for that position.

        also  a namespace that it may be of as well

        A block that is not sealed is another branch's own.  Raises BrokenSeal.
        """
        found = self._by_block.get(copy.src)
        start = lease.block_table.index(copy.dst) * self._block_size
        if found and (found.start != start or found.namespace not in (lease.namespace, also)):
            raise BrokenSeal(
                f"{lease!r} copies from block {copy.src} to position {start}, but that was sealed "
                "for another position or namespace"
            )

    def check_tree(self, cache: RadixCache) -> None:
        """Check that each cached block is sealed for where it stands, and no other is sealed.

        O(tokens · depth).  Raises BrokenSeal.
        """
        standing = tree_seals(cache)
        for block_id, seal in standing.items():
            self._check("the tree", block_id, seal)
        for block_id in self._by_block.keys() - standing.keys():
            raise BrokenSeal(f"block {block_id} is sealed, but stands nowhere")

    def _check(self, who: str, block_id: int, wanted: Seal) -> None:
        found = self._by_block.get(block_id)
        if found == wanted:
            return
        if found is None:
            raise BrokenSeal(f"{who} uses block {block_id}, which was never sealed")
        fields = [
            name
            for name in wanted.__struct_fields__
            if getattr(found, name) != getattr(wanted, name)
        ]
        raise BrokenSeal(
            f"{who} uses block {block_id} for the tokens from {wanted.start} on, but it was sealed "
            f"for others: {', '.join(fields)} differ"
        )


def _seals_on(node: Node, block_size: int) -> list[Seal]:
    """Return the seals of the blocks of a node's edge."""
    edges, above = [], node.parent
    while above is not None:
        edges.append(bytes(above.edge))
        above = above.parent
    tokens = b"".join(reversed(edges)) + bytes(node.edge)
    first = (len(tokens) - len(node.edge)) // (block_size * TOKEN_BYTES)
    return seals_of(node.namespace, tokens, block_size, first=first)
