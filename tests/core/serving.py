"""Short forms of what a runtime does with the cache, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from radixcache import DEFAULT_NAMESPACE, Lease, Match, Namespace, PrefixKey, RadixCache


class Inserted(NamedTuple):
    """What became of a request that ran from begin to end.

    reused     tokens found in the cache, at the begin or as twins at the end
    block_ids  its block table just before it let go
    """

    reused: int
    block_ids: tuple[int, ...]


def acquire(
    cache: RadixCache, token_ids: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE
) -> Lease:
    """Acquire a lease on token ids."""
    return cache.acquire(PrefixKey.of(list(token_ids), namespace))


def insert(
    cache: RadixCache, token_ids: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE
) -> Inserted:
    """Serve a whole request: acquire, commit all, release."""
    lease = acquire(cache, token_ids, namespace)
    done = cache.commit(lease, lease.num_tokens)
    block_ids = tuple(lease.block_table)
    cache.release(lease)
    return Inserted(lease.num_cached + done.num_twins * cache.config.block_size, block_ids)


def match(
    cache: RadixCache, token_ids: Iterable[int], namespace: Namespace = DEFAULT_NAMESPACE
) -> Match:
    """Match token ids."""
    return cache.match(PrefixKey.of(list(token_ids), namespace))


def num_owned(cache: RadixCache) -> int:
    """Blocks that the tree owns."""
    stats = cache.stats()
    return stats.num_pinned + stats.num_evictable
