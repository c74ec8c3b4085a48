"""A log replayed through the real cache, one request after the other.

Owns: what each request finds, and how large a pool is that forgets nothing.  Does not know: why
requests differ, how a log is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from radixcache.cache import RadixCache
from radixcache.config import CacheConfig
from radixcache.errors import OutOfBlocks
from radixcache.explain import Cause
from radixcache.lease import PrefixKey
from radixcache.namespace import Namespace
from radixcache.tokens import num_tokens, pack_tokens
from runtime.doctor.log import LoggedRequest, Said, Tool
from runtime.doctor.rendering import Renderer
from runtime.errors import InvalidSetting

MAX_GHOSTS = 1 << 20
"""Evicted blocks that a replay remembers."""


RUN = 8
"""Tokens in a row that two prompts must have in common to share anything."""

_FACTOR = 0x9E3779B97F4A7C15


class Encoded(msgspec.Struct, frozen=True):
    """A logged request as packed token ids: its prompt, and the reply that came back."""

    request: LoggedRequest
    prompt: bytes
    reply: bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return num_tokens(self.prompt)

    @property
    def namespace(self) -> Namespace:
        """Who shares with it: requests of the same model, tenant and salt."""
        own = self.request
        return Namespace(model=own.model, salt=json.dumps([own.tenant, own.salt]))


class Encoder:
    """Encodes requests, each different conversation once."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._prompts: dict[tuple[tuple[Said, ...], tuple[Tool, ...]], bytes] = {}

    def encode(self, request: LoggedRequest) -> Encoded:
        """Return a request's ids."""
        key = request.said, request.tools
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = pack_tokens(self._renderer.ids(request))
        reply = self._renderer.reply_ids(request.reply) if request.reply else []
        return Encoded(request, prompt, pack_tokens(reply))


class Outcome(msgspec.Struct, frozen=True):
    """What a request found.

    num_tokens     of its prompt
    num_cached     of them, those that were found
    cause          why it found no more
    num_elsewhere  tokens that are cached under another salt of the same tenant
    num_evicted    tokens that follow and were evicted
    """

    num_tokens: int
    num_cached: int
    cause: Cause
    num_elsewhere: int = 0
    num_evicted: int = 0


def replay(
    requests: Sequence[Encoded], *, block_size: int, num_blocks: int | None = None
) -> list[Outcome]:
    """Serve requests one after the other by a `RadixCache`; return what each one found.

    num_blocks  of the pool; None: as many as never to evict anything

    Raises InvalidSetting for a pool that a request does not fit into, InvalidConfig.
    """
    if block_size < 1:
        raise InvalidSetting(f"block_size is {block_size}: at least 1")
    if num_blocks is None:
        num_blocks = 1 + sum(_num_blocks(request, block_size) for request in requests)
    cache = cache_of(num_blocks, block_size)
    return [serve(cache, request) for request in requests]


def cache_of(num_blocks: int, block_size: int) -> RadixCache:
    """Return a cache that remembers what it evicts.  Raises InvalidConfig."""
    ghosts = max(1, min(num_blocks, MAX_GHOSTS))
    return RadixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size, max_ghosts=ghosts))


def serve(cache: RadixCache, request: Encoded) -> Outcome:
    """Serve one request as an engine would: look up, compute, publish prompt and reply, let go."""
    key = PrefixKey(request.namespace, request.prompt)
    tenant = json.dumps([request.request.tenant])[:-1]
    among = [
        n
        for n in cache.tree.roots
        if n.model == key.namespace.model and n.salt.startswith(f"{tenant}, ")
    ]
    why = cache.explain(key, among=among)
    try:
        lease = cache.acquire(key)
        cache.append(lease, request.reply)
    except OutOfBlocks:
        raise InvalidSetting(
            f"the request of line {request.request.line} has {request.num_tokens} tokens and does "
            f"not fit into {cache.config.num_blocks} blocks of {cache.config.block_size}: replay "
            "with a larger pool"
        ) from None
    num_cached = lease.num_cached
    cache.commit(lease, lease.num_tokens)
    cache.release(lease)
    evicted = why.evicted.num_blocks if why.evicted else 0
    return Outcome(
        num_tokens=request.num_tokens,
        num_cached=num_cached,
        cause=why.cause,
        num_elsewhere=why.num_elsewhere,
        num_evicted=evicted * cache.config.block_size,
    )


def shared_beyond(earlier: bytes, prompt: bytes, start: int) -> int:
    """Return how many tokens of a prompt behind `start` an earlier one has too, wherever.

    Runs of at least `RUN` tokens count; packed ids.  O(tokens), by numbers that stand for runs.
    """
    known = np.unique(_runs(np.frombuffer(earlier, np.int32)))
    rest = np.frombuffer(prompt, np.int32)[start:]
    found = np.flatnonzero(np.isin(_runs(rest), known))
    covered = np.zeros(len(rest) + RUN, np.int32)
    np.add.at(covered, found, 1)
    np.add.at(covered, found + RUN, -1)
    return int(np.count_nonzero(np.cumsum(covered)[: len(rest)]))


def _runs(ids: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A number for each run of `RUN` ids: a polynomial of them modulo 2⁶⁴."""
    count = max(0, len(ids) - RUN + 1)
    runs = np.zeros(count, np.uint64)
    for at in range(RUN):
        runs = runs * np.uint64(_FACTOR) + ids[at : at + count].astype(np.uint64)
    return runs


def _num_blocks(request: Encoded, block_size: int) -> int:
    return -(-(num_tokens(request.prompt) + num_tokens(request.reply)) // block_size)
