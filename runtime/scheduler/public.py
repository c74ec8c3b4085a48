"""A prefix that everybody may share, whatever their namespace: a system prompt, told to all anyway.

Owns: which tokens those are, and the copies that bring their K/V to a sequence.  Does not know: who
is a tenant, or how the prefix was computed.
Idea: namespaces stay disjoint.  What is public is computed once in a namespace of its own and held;
a sequence that begins with it and does not find it in its namespace gets a copy of its blocks, and
publishes those as its own.  So nobody waits for it, and nobody can tell who else has asked for it.
"""

from __future__ import annotations

from typing import NamedTuple

from radixcache.cache import RadixCache
from radixcache.lease import BlockCopy, Lease, PrefixKey
from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES, Packed, common_prefix_len

PUBLIC = Namespace(salt="public prefix")
"""Where public K/V is computed; no caller's salt can be this text."""


class Brought(NamedTuple):
    """How many tokens of a lease have their K/V, and which copies that counts on."""

    num_in_place: int
    copies: tuple[BlockCopy, ...] = ()


class PublicPrefix:
    """One public prefix.

    tokens  packed ids
    """

    def __init__(self, cache: RadixCache, tokens: bytes) -> None:
        self.tokens = tokens
        self._cache = cache
        self._block_size = cache.config.block_size

    def brought(self, lease: Lease) -> Brought:
        """Return what a lease just acquired can have of the prefix beyond what it found.

        Carry the copies out before the step that computes the rest.  One look-up, and O(blocks
        copied).
        """
        size, own = self._block_size, lease.num_cached
        if lease.namespace == PUBLIC:
            return Brought(own)
        whole = self._shared(lease.tokens)
        if whole <= own:
            return Brought(own)
        found = self._cache.match(PrefixKey(PUBLIC, self.tokens[: whole * TOKEN_BYTES]))
        # The last token of a sequence is computed in any case, and written to its own block.
        count = min(found.num_tokens, lease.num_tokens - 1)
        if count <= own:
            return Brought(own)
        sources = found.block_ids
        places = range(lease.num_committed // size, -(-count // size))
        copies = (
            BlockCopy(sources[i], lease.block_table[i], min(size, count - i * size)) for i in places
        )
        return Brought(count, tuple(copies))

    def reach(self, tokens: Packed) -> int:
        """Return how many tokens of a prompt could be had of the prefix now; one look-up."""
        whole = self._shared(tokens)
        if not whole:
            return 0
        found = self._cache.match_len(PrefixKey(PUBLIC, self.tokens[: whole * TOKEN_BYTES]))
        return min(found, len(tokens) // TOKEN_BYTES - 1)

    def _shared(self, tokens: Packed) -> int:
        """Tokens of the prefix that others begin with, in whole blocks."""
        most = min(len(self.tokens), len(tokens))
        return (
            common_prefix_len(tokens, 0, self.tokens, most) // self._block_size * self._block_size
        )
