"""Why a prompt finds as much as it finds, and no more.

Owns: the causes, their order, and the sentences for an operator.  Does not know: leases, pools or
servers; it reads a tree and a memory of evictions, and changes neither.
Idea: a prompt leaves the tree at one token.  That token is found first, by the same two steps as in
`RadixCache.acquire`; the cause is whatever else can be said of the place, the most certain first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from radixcache.ghosts import Evicted, GhostMemory
from radixcache.lease import PrefixKey
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, Packed, unpack_tokens
from radixcache.tree import RadixTree


class Cause(enum.StrEnum):
    """Why tokens of a prompt are missing; the first that holds, in the order of `explain`.

    HIT              none is missing but the last, which is always computed
    SHORT            the rest does not fill a block, and only full blocks are kept
    EVICTED          it was cached, and was evicted
    EPOCH            it was cached before the epoch of the namespace was raised
    OTHER_NAMESPACE  another namespace has a block more of it
    DIVERGED         the cache goes on with another token
    NEVER_SEEN       nothing is known of it
    DISABLED         the prefix cache is off
    """

    HIT = enum.auto()
    SHORT = enum.auto()
    EVICTED = enum.auto()
    EPOCH = enum.auto()
    OTHER_NAMESPACE = enum.auto()
    DIVERGED = enum.auto()
    NEVER_SEEN = enum.auto()
    DISABLED = enum.auto()


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt is cached, where it leaves the cache, and why.

    The last token is always computed, so it is never cached, missing or compared.

    num_tokens         tokens of the prompt
    num_cached         tokens that `RadixCache.acquire` would find now, by a copy too
    num_cached_blocks  whole blocks among them; the rest is the head of one more
    cause              why it is not more
    first_missing      index of the first token that is missing; None where none is
    token              the prompt's token id there; None where nothing is missing
    cached_token       the id that the tree has in its place behind the same tokens, one of them
                       where there are several; None where the tree ends, or agrees in no token
    node_id            the node at or in whose edge the prompt leaves the tree; None where the tree
                       agrees in no token
    evicted            what is remembered of the blocks that follow; None where no memory is kept,
                       or none was asked since nothing is missing or reachable
    other              names of the fields in which the namespace differs that has more of the
                       prompt; never their values, as a salt is a secret
    num_elsewhere      tokens that are cached there; 0 where there is no such namespace
    """

    num_tokens: int
    num_cached: int
    num_cached_blocks: int
    cause: Cause
    first_missing: int | None
    token: int | None
    cached_token: int | None
    node_id: int | None
    evicted: Evicted | None
    other: tuple[str, ...]
    num_elsewhere: int

    def describe(self, decode: Callable[[list[int]], str] | None = None) -> str:
        """Say it in one or two sentences, for an operator: how much, where, why, what to do.

        decode  token ids to text, shown beside an id; without it there are ids alone

        Shows at most two tokens of the prompt and of what is cached, and no name of a namespace.
        """
        much = f"{self.num_cached} of {_count(self.num_tokens, 'token')} cached"
        match self.cause:
            case Cause.HIT if not self.num_tokens:
                return "The prompt is empty: nothing is missing."
            case Cause.HIT:
                return f"{much}; nothing is missing, as the last token is always computed."
            case Cause.DISABLED:
                return f"{much}: the prefix cache is off. Turn it on by `enable_prefix_cache`."
            case Cause.EPOCH if not self.num_elsewhere:
                return (
                    f"{much}: the epoch of the namespace was raised since, so nothing of it can "
                    "be reached. Use the namespace that `raise_epoch` returned."
                )
        return f"{much}; {self._where(decode)}. {self._why()}"

    def _where(self, decode: Callable[[list[int]], str] | None) -> str:
        """The token at which the prompt leaves the cache, and what the cache has there."""

        def show(token: int | None) -> str:
            """Name a token by its id, and by its text where there is a decoder."""
            return f"{token} ({decode([token])!r})" if decode and token is not None else str(token)

        if self.node_id is None:
            return (
                f"nothing cached in this namespace begins with its first token, {show(self.token)}"
            )
        place = f"at index {self.first_missing} the prompt has token {show(self.token)}"
        if self.cached_token is None:
            return f"{place}, where the cache ends (node {self.node_id})"
        return f"{place}, the cache {show(self.cached_token)} (node {self.node_id})"

    def _why(self) -> str:
        """The cause, and what can be done about it."""
        there = _count(self.num_elsewhere, "token")
        match self.cause:
            case Cause.EVICTED if self.evicted is not None:
                return (
                    f"What follows was cached, {_count(self.evicted.num_blocks, 'block')}, and was "
                    f"evicted, the first at time {self.evicted.first_at}: a larger pool keeps more."
                )
            case Cause.EPOCH:
                return (
                    f"An older epoch of the namespace has {there} of it, which are out of use: "
                    "nothing is to be done, it is cached again once it was computed."
                )
            case Cause.OTHER_NAMESPACE:
                fields = " and ".join(self.other)
                return (
                    f"A namespace with another {fields} has {there} of it: send such prompts with "
                    f"the same {fields} where they may share."
                )
            case Cause.DIVERGED:
                return (
                    "Prompts share what stands before their first difference: put what changes "
                    "behind what does not."
                )
            case Cause.SHORT:
                rest = _count(self.num_tokens - self.num_cached, "token")
                return (
                    f"The last {rest} fill no block, and only full blocks are kept: smaller "
                    "blocks keep more."
                )
        if self.evicted is None:
            return (
                "The rest was never cached in this namespace, or was evicted since: a cache with "
                "`max_ghosts` would tell which."
            )
        return (
            "As far as is remembered the rest was never cached in this namespace: it is found "
            "once it was computed."
        )


def explain(
    key: PrefixKey,
    *,
    tree: RadixTree,
    is_enabled: bool,
    newest_epoch: int | None,
    ghosts: GhostMemory | None,
    among: Iterable[Namespace] | None = None,
) -> Explanation:
    """Explain how much of a prompt is cached and why it is not more; change nothing.

    tree          the tree of the cache
    is_enabled    whether the prefix cache is on
    newest_epoch  the epoch to which the key's namespace was raised; None if it never was
    ghosts        the memory of what was evicted, if one is kept
    among         the namespaces, older epochs too, that may be spoken of beside the key's own;
                  all unless given

    Causes are tried in this order: DISABLED; EPOCH, of the key's own namespace; HIT; EVICTED;
    EPOCH, where an older one has more; OTHER_NAMESPACE, the one with most, then the one that
    differs in the fewest fields; DIVERGED, which needs a token that agrees; SHORT; NEVER_SEEN.

    O(tokens of the key, to hash them for the ghosts + for each namespace the nodes and bytes that
    match); where there are many children they are sorted once, as by `acquire`.

    >>> from radixcache import CacheConfig, RadixCache
    >>> cache = RadixCache(CacheConfig(num_blocks=8, block_size=2))
    >>> _ = cache.commit(cache.acquire(PrefixKey.of([1, 2, 3, 4])), 4)
    >>> why = explain(PrefixKey.of([1, 2, 3, 9, 9]), tree=cache.tree, is_enabled=True,
    ...               newest_epoch=None, ghosts=None)
    >>> why.num_cached, why.cause.value, why.token, why.cached_token
    (3, 'diverged', 9, 4)
    """
    is_stale = newest_epoch is not None and key.namespace.epoch < newest_epoch
    is_reachable = is_enabled and not is_stale
    here = _reach(key.namespace, key, tree) if is_reachable else _NOWHERE
    missing = here.num_tokens if here.num_tokens < key.num_tokens - 1 else None
    evicted, elsewhere = None, _NO_OTHER
    cause = Cause.HIT if is_reachable else Cause.EPOCH if is_enabled else Cause.DISABLED
    if is_reachable and missing is not None:
        if ghosts is not None:
            evicted = ghosts.lookup(key.namespace, key.tokens, num_cached=missing)
        cause = Cause.EVICTED
        if evicted is None or not evicted.num_blocks:
            elsewhere = _elsewhere(key, tree, among, missing)
            cause = _cause_of(key, here, elsewhere, tree.block_size)
    return Explanation(
        num_tokens=key.num_tokens,
        num_cached=here.num_tokens,
        num_cached_blocks=here.num_tokens // tree.block_size,
        cause=cause,
        first_missing=missing,
        token=None if missing is None else _token(key.tokens, missing),
        cached_token=None if missing is None else here.cached_token,
        node_id=here.node_id,
        evicted=evicted,
        other=elsewhere.differing,
        num_elsewhere=elsewhere.num_tokens,
    )


class _Reach(NamedTuple):
    """How far a key reaches into a tree: tokens that agree, where it leaves, what stands there."""

    num_tokens: int
    node_id: int | None
    cached_token: int | None


class _Elsewhere(NamedTuple):
    """The other namespace that has more: compares as it is to be preferred."""

    is_older_epoch: bool
    num_tokens: int
    minus_fields: int
    differing: tuple[str, ...]


_NOWHERE = _Reach(0, None, None)
_NO_OTHER = _Elsewhere(False, 0, 0, ())


class _Place(NamedTuple):
    """Where a key leaves a tree: tokens that agree, the node, and how far inside its edge."""

    num_tokens: int
    node: Node
    inside: int


def cached_beyond(key: PrefixKey, *, tree: RadixTree, limit: int) -> list[int]:
    """Return what the tree has behind the place where a key leaves it, at most `limit` tokens.

    Begins with the `cached_token` that `explain` tells of; where the tree branches it follows the
    child that came last.  Empty where the tree ends or agrees in no token.  Changes nothing;
    O(nodes passed + limit).  Of the key's own namespace alone.

    >>> from radixcache import CacheConfig, RadixCache
    >>> cache = RadixCache(CacheConfig(num_blocks=8, block_size=2))
    >>> _ = cache.commit(cache.acquire(PrefixKey.of([1, 2, 3, 4])), 4)
    >>> cached_beyond(PrefixKey.of([1, 2, 9, 9]), tree=cache.tree, limit=9)
    [3, 4]
    """
    place = _place(key.namespace, key, tree)
    if place is None:
        return []
    node, found = place.node, bytearray(place.node.edge[place.inside * TOKEN_BYTES :])
    while len(found) < limit * TOKEN_BYTES and node.children:
        node = next(reversed(node.children.values()))
        found += node.edge
    return unpack_tokens(bytes(found[: limit * TOKEN_BYTES]))


def _place(namespace: Namespace, key: PrefixKey, tree: RadixTree) -> _Place | None:
    """Follow all but the last token of a key into the tree of a namespace, to the token."""
    root = tree.roots.get(namespace)
    if root is None or not key.tokens:
        return None
    end = key.num_tokens - 1
    found = tree.find(root, key.tokens, 0, end)
    node, block, same = tree.nearest(found, key.tokens, end)
    num_tokens = found.num_tokens + same
    return _Place(num_tokens, node, block * tree.block_size + same) if num_tokens else None


def _reach(namespace: Namespace, key: PrefixKey, tree: RadixTree) -> _Reach:
    """Say how far a key reaches into a tree, and which token stands in its next one's place."""
    place = _place(namespace, key, tree)
    if place is None:
        return _NOWHERE
    at, edge = place.inside, place.node.edge
    if at == place.node.num_tokens:  # any child will do: none agrees in a token; the last is news
        at, edge = 0, next((child.edge for child in reversed(place.node.children.values())), b"")
    return _Reach(place.num_tokens, place.node.node_id, _token(edge, at) if edge else None)


def _elsewhere(
    key: PrefixKey, tree: RadixTree, among: Iterable[Namespace] | None, num_cached: int
) -> _Elsewhere:
    """Find the namespace that has a block more of a key, an older epoch of its own before all."""
    best = _NO_OTHER
    for namespace in tree.roots if among is None else among:
        differing = tuple(
            name
            for name in Namespace.__struct_fields__
            if getattr(namespace, name) != getattr(key.namespace, name)
        )
        num_tokens = _reach(namespace, key, tree).num_tokens if differing else 0
        if num_tokens >= num_cached + tree.block_size:
            is_older = differing == ("epoch",) and namespace.epoch < key.namespace.epoch
            best = max(best, _Elsewhere(is_older, num_tokens, -len(differing), differing))
    return best


def _cause_of(key: PrefixKey, here: _Reach, elsewhere: _Elsewhere, block_size: int) -> Cause:
    """Why a token is missing that is not remembered to have been evicted."""
    if elsewhere.is_older_epoch:
        return Cause.EPOCH
    if elsewhere.num_tokens:
        return Cause.OTHER_NAMESPACE
    if here.cached_token is not None:
        return Cause.DIVERGED
    if key.num_tokens - here.num_tokens < block_size:  # it left at the edge of a block
        return Cause.SHORT
    return Cause.NEVER_SEEN


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _token(packed: Packed, index: int) -> int:
    return unpack_tokens(packed[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES])[0]
