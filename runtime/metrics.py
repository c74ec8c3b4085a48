"""Prometheus metrics of a running server.

Owns: names, units, help texts.  Does not know: HTTP, or how counts are kept; it reads one record.
Idea: the engine's counters are read when somebody scrapes, so a step pays nothing for them; only
durations are observed as they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

# name, help, how to read it
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], int]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.cache.query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", lambda s: s.cache.hit_tokens),
    ("prompt_tokens", "Prompt tokens of requests that began to answer.", lambda s: s.prompt_tokens),
    ("cached_prompt_tokens", "Of those, found at first admission.", lambda s: s.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.completion_tokens),
    ("steps", "Steps computed.", lambda s: s.steps),
    ("preemptions", "Sequences that gave back their blocks.", lambda s: s.preemptions),
    ("evicted_blocks", "Cached blocks given up for room.", lambda s: s.cache.evicted_blocks),
    ("twin_blocks", "Blocks freed as computed twice.", lambda s: s.cache.twin_blocks),
)
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], int]], ...] = (
    ("requests_running", "Sequences being computed.", lambda s: s.running),
    ("requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("tree_nodes", "Nodes of the radix tree.", lambda s: s.cache.num_nodes),
)


class ServerMetrics:
    """The metrics of one server; each has a registry of its own, so tests may run several.

    read_stats  gives the engine's latest counters, from any thread
    """

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(read_stats))
        self.time_to_first_token = Histogram(
            "radixcache_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            ["cached"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.request_duration = Histogram(
            "radixcache_request_duration_seconds",
            "From a request's arrival to its last token.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for name, text, read in _COUNTERS:
            yield CounterMetricFamily(f"radixcache_{name}", text, value=read(stats))
        for name, text, read in _GAUGES:
            yield GaugeMetricFamily(f"radixcache_{name}", text, value=read(stats))
        blocks = GaugeMetricFamily("radixcache_blocks", "Blocks by state.", labels=["state"])
        for state in ("free", "private", "pinned", "evictable"):
            blocks.add_metric([state], getattr(stats.cache, f"num_{state}"))
        yield blocks
        finished = CounterMetricFamily(
            "radixcache_requests_finished", "Requests ended, by reason.", labels=["reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            finished.add_metric([reason], stats.finished.get(reason, 0))
        yield finished
