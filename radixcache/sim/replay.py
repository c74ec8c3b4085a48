"""Replaying a trace through a real `RadixCache`.

Owns: what a request does to the cache, and when, and what is counted.  Does not know: files, or
what a policy decides by.
Idea: the cache under test is the product, so nothing is modelled twice.  It has blocks of one
token, which is the block's name, and one block more than asked for: that one holds the token that
every request computes anew, so a request with all of its blocks cached counts as hit whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

import msgspec

from radixcache.cache import RadixCache
from radixcache.config import CacheConfig
from radixcache.errors import InvalidConfig, OutOfBlocks
from radixcache.lease import Lease, PrefixKey
from radixcache.namespace import DEFAULT_NAMESPACE
from radixcache.policy import EvictionPolicy
from radixcache.sim.informed import BlockPolicy, ToldClosed
from radixcache.sim.trace import MAX_NAMES, Trace, TraceRequest

PRIVATE = MAX_NAMES
"""Stands for tokens that no other request will ever ask for."""

GROWTH_POINTS = 64
"""Moments at which a replay notes how large the tree is."""

PROGRESS_EVERY = 256
"""Requests between two reports."""

Progress = Callable[[int], None]
"""Is told how many requests were replayed."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How long a request is served, in a trace that tells only when it came.

    prefill_rate  tokens a second that are computed of a prompt
    decode_rate   tokens a second of an answer

    Raises InvalidConfig for what is not above 0.
    """

    prefill_rate: float = 8000.0
    decode_rate: float = 50.0

    def __post_init__(self) -> None:
        for name in ("prefill_rate", "decode_rate"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{name} must be above 0, not {getattr(self, name)!r}")

    def seconds(self, computed_tokens: int, output_tokens: int) -> float:
        """Return how long a request is served from admission to its end."""
        return computed_tokens / self.prefill_rate + output_tokens / self.decode_rate


class Growth(msgspec.Struct, frozen=True):
    """The tree after so many requests: its nodes, and the blocks that they hold."""

    requests: int
    num_nodes: int
    num_blocks: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to, in blocks.

    references   blocks of all prompts
    hits         of those, found in the cache
    evicted      blocks given up
    unserved     requests that were larger than the whole cache; all of their blocks are misses
    waited       requests that had to wait until others ended
    most_pinned  blocks that requests held at once, at most
    growth       the tree at up to `GROWTH_POINTS` moments
    """

    references: int
    hits: int
    evicted: int
    unserved: int
    waited: int
    most_pinned: int
    growth: tuple[Growth, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Hits as a share of the references, 0 where there are none."""
        return self.hits / self.references if self.references else 0.0


class Replay:
    """One trace in one cache.

    policy     order of eviction; new for each replay where it learns
    num_blocks blocks that the cache holds
    speed      how long requests are served; None: each ends before the next comes
    """

    def __init__(
        self,
        trace: Trace,
        policy: EvictionPolicy,
        *,
        num_blocks: int,
        speed: Speed | None = None,
    ) -> None:
        self._trace = trace
        self._speed = speed
        self._by_block = policy if isinstance(policy, BlockPolicy) else None
        self._closing = policy.closing if isinstance(policy, ToldClosed) else frozenset[int]()
        observer = self._by_block.observer if self._by_block else None
        self.cache = RadixCache(
            # One more: a token to compute is private, and takes a block while its request runs.
            CacheConfig(num_blocks=num_blocks + 1, block_size=1),
            policy=policy,
            observers=() if observer is None else (observer,),
        )
        self._running: list[tuple[float, int, Lease, TraceRequest]] = []  # a heap, by end
        self._free_at = 0.0  # when the last one that waited was let in; nobody overtakes
        self._growth: list[Growth] = []
        self._hits = self._unserved = self._waited = self._most_pinned = 0

    def run(self, progress: Progress | None = None) -> Outcome:
        """Replay all requests; about 20 µs each, and 5 µs a leaf that is evicted."""
        every = -(-len(self._trace.requests) // GROWTH_POINTS)
        for place, request in enumerate(self._trace.requests):
            self._serve(place, request)
            if (place + 1) % every == 0:
                self._note_growth(place + 1)
            if progress and place % PROGRESS_EVERY == PROGRESS_EVERY - 1:
                progress(place + 1)
        while self._running:
            self._end_first()
        if progress:
            progress(len(self._trace.requests))
        return Outcome(
            references=self._trace.num_references,
            hits=self._hits,
            evicted=self.cache.stats().evicted_blocks,
            unserved=self._unserved,
            waited=self._waited,
            most_pinned=self._most_pinned,
            growth=tuple(self._growth),
        )

    def _note_growth(self, requests: int) -> None:
        stats = self.cache.stats()
        num_blocks = stats.num_pinned + stats.num_evictable
        self._growth.append(Growth(requests, stats.num_nodes, num_blocks))

    def _serve(self, place: int, request: TraceRequest) -> None:
        """Let one request in; whoever comes while the cache is full of others' pins waits."""
        now = max(request.arrival_s, self._free_at)
        while self._running and (self._speed is None or self._running[0][0] <= now):
            self._end_first()
        lease = self._acquire(request, arrives=True)
        waited = lease is None and bool(self._running)
        while lease is None and self._running:
            now = self._end_first()
            lease = self._acquire(request, arrives=False)
        self._waited += waited
        if lease is None:
            self._unserved += 1
            return
        self._free_at = now if waited else 0.0
        prompt_blocks = len(request.prompt)
        hits = min(lease.num_cached, prompt_blocks)
        self._hits += hits
        self.cache.commit(lease, prompt_blocks)
        stats = self.cache.stats()
        self._most_pinned = max(self._most_pinned, stats.num_pinned + stats.num_private)
        end = now
        if self._speed is not None:
            cached = min(hits * self._trace.block_size, request.prompt_tokens)
            end += self._speed.seconds(request.prompt_tokens - cached, request.output_tokens)
        heappush(self._running, (end, place, lease, request))
        if self._speed is None:
            self._end_first()

    def _acquire(self, request: TraceRequest, *, arrives: bool) -> Lease | None:
        """Take a lease on a request's blocks; None where the cache has too few to give.

        arrives  whether this is the first time that the request is tried
        """
        private = array("i", [PRIVATE]) * self._num_private(request)
        key = PrefixKey(DEFAULT_NAMESPACE, (request.prompt + request.answer + private).tobytes())
        try:
            if self._by_block is not None:
                self._make_room(self._by_block, request, key, arrives)
            return self.cache.acquire(key)
        except OutOfBlocks:
            return None

    def _make_room(
        self, policy: BlockPolicy, request: TraceRequest, key: PrefixKey, arrives: bool
    ) -> None:
        """Evict for a request one block at a time, so that each has its own rank."""
        hold = self.cache.retain(key)
        if arrives:
            for node in policy.arrive(request, min(hold.num_tokens, len(request.prompt))):
                self.cache.pins.reranked(node)
        needed = key.num_tokens - hold.num_tokens
        while self.cache.stats().num_free < needed and self.cache.evict(1):
            pass
        self.cache.end_hold(hold)

    def _num_private(self, request: TraceRequest) -> int:
        """Blocks beside those that the trace names: an answer's, and the token to compute."""
        if self._speed is None or request.answer:
            return 1
        return max(1, -(-request.output_tokens // self._trace.block_size))

    def _end_first(self) -> float:
        """End the request that is the first to end; return when that is."""
        end, place, lease, request = heappop(self._running)
        self.cache.commit(lease, len(request.prompt) + len(request.answer))
        self.cache.release(lease)
        if place in self._closing:
            path = (request.prompt + request.answer).tobytes()
            self.cache.abandon(PrefixKey(DEFAULT_NAMESPACE, path))
        return end
