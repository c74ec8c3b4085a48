"""The engine in numbers.

Owns: the fields.  Does not know: who counts.
"""

from __future__ import annotations

import msgspec

from radixcache.stats import CacheStats


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine in numbers, since it started.

    cached_tokens    prompt tokens found in the cache, counted once, at first admission
    finished         requests ended, by reason
    failed_steps     steps that raised, and were computed again sequence by sequence
    preemptions      times that a sequence gave its blocks back to let an older one get on
    """

    running: int
    waiting: int
    steps: int
    failed_steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    finished: dict[str, int]
    cache: CacheStats
