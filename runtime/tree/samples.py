"""From a reading of the engine to the sample that an audience gets.

Owns: which numbers are whose.  Does not know: when they are read, or who asks.
Idea: a tenant's sample is made of its own counts alone, so that no number in it moves because
another tenant did something.
"""

from __future__ import annotations

from itertools import islice

from runtime.tree.reading import MAX_RUNNING, Owned, Reading
from runtime.tree.records import Sample
from runtime.tree.tallies import Tally


def whole_sample(reading: Reading, tally: Tally, *, time: float, now: float) -> Sample:
    """Return the sample of everything.

    tally  of all requests
    time   seconds since 1970
    now    seconds of the clock that the tally counts by
    """
    stats, cache = reading.stats, reading.stats.cache
    return Sample(
        time=time,
        asked=stats.prompt_tokens,
        hit=stats.cached_tokens,
        computed=stats.prompt_tokens - stats.cached_tokens,
        generated=stats.completion_tokens,
        free=cache.num_free,
        cached=cache.num_evictable,
        pinned=cache.num_pinned,
        total=cache.num_blocks,
        evicted=cache.evicted_blocks,
        waiting=stats.waiting,
        nodes=cache.num_nodes,
        running=tuple(reading.running[:MAX_RUNNING]),
        running_total=stats.running,
        ttft_warm=tally.median_s(now, is_warm=True),
        ttft_cold=tally.median_s(now, is_warm=False),
    )


def tenant_sample(
    reading: Reading,
    tally: Tally,
    *,
    tenant: str,
    num_nodes: int,
    num_waiting: int,
    time: float,
    now: float,
) -> Sample:
    """Return the sample of one tenant, of what is its own.

    num_nodes    that it sees
    num_waiting  of its requests
    """
    owned = reading.owned.get(tenant, Owned())
    blocks = owned.private + owned.pinned + owned.evictable
    total = max(blocks, owned.limit or 0)
    mine = (sequence for sequence in reading.running if sequence.tenant == tenant)
    return Sample(
        time=time,
        asked=tally.asked,
        hit=tally.hit,
        computed=tally.asked - tally.hit,
        generated=tally.generated,
        free=total - blocks,
        cached=owned.evictable,
        pinned=owned.pinned,
        total=total,
        evicted=owned.evicted,
        waiting=num_waiting,
        nodes=num_nodes,
        running=tuple(islice(mine, MAX_RUNNING)),
        running_total=reading.counts[tenant],
        ttft_warm=tally.median_s(now, is_warm=True),
        ttft_cold=tally.median_s(now, is_warm=False),
    )
