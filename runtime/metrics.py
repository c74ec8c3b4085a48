"""Prometheus metrics of a running server.

Owns: names, units, help texts, what is observed as it happens.  Does not know: HTTP, or how the
engine's counts are kept; it reads one record.
Idea: the engine's counters are read when somebody scrapes, so a step pays nothing for them; what
is observed token by token is one addition to a list.  vLLM's names show the same numbers again,
so that dashboards and routers made for it work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from runtime.engine_stats import EngineStats
from runtime.recheck import RecheckStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Whatever else is asked for: the library's OpenMetrics form writes `vllm_` for `vllm:`."""
NO_TENANT, OTHER_TENANTS = "default", "other"
REASONS = ("stop", "length", "abort", "timeout", "error")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = tuple(float(2**power) for power in range(18))

Read = Callable[[EngineStats], float]

# name, help, how to read it
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("prefix_cache_queries", "Tokens looked up at admissions.", lambda s: s.cache.query_tokens),
    ("prefix_cache_hits", "Of those, found in the cache.", lambda s: s.cache.hit_tokens),
    ("prompt_tokens", "Prompt tokens of requests, as they begin.", lambda s: s.prompt_tokens),
    ("cached_prompt_tokens", "Of those, found at first admission.", lambda s: s.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.completion_tokens),
    ("steps", "Steps computed.", lambda s: s.steps),
    ("failed_steps", "Steps that raised, computed again in parts.", lambda s: s.failed_steps),
    ("preemptions", "Sequences that gave back their blocks.", lambda s: s.preemptions),
    ("evicted_blocks", "Cached blocks given up for room.", lambda s: s.cache.evicted_blocks),
    ("published_blocks", "Blocks that the tree took over.", lambda s: s.cache.published_blocks),
    ("twin_blocks", "Blocks freed as computed twice.", lambda s: s.cache.twin_blocks),
    ("out_of_blocks", "Calls refused for want of blocks.", lambda s: s.cache.out_of_blocks),
)
_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("requests_running", "Sequences being computed.", lambda s: s.running),
    ("requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("tree_nodes", "Nodes of the radix tree.", lambda s: s.cache.num_nodes),
    ("cache_leases", "Leases of running sequences.", lambda s: s.cache.num_leases),
    ("cache_holds", "Prefixes held for sessions.", lambda s: s.cache.num_holds),
)
_VLLM_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    # vLLM counts a request once, however often it is resumed
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", lambda s: s.cached_tokens),
    ("prompt_tokens", "Prompt tokens of requests, as they begin.", lambda s: s.prompt_tokens),
    ("prompt_tokens_cached", "Of those, found in the cache.", lambda s: s.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.completion_tokens),
    ("num_preemptions", "Sequences that gave back their blocks.", lambda s: s.preemptions),
)
_VLLM_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("num_requests_running", "Sequences being computed.", lambda s: s.running),
    ("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting),
    ("kv_cache_usage_perc", "Blocks in use, from 0 to 1.", lambda s: _used(s)),
    ("gpu_cache_usage_perc", "Blocks in use, from 0 to 1.", lambda s: _used(s)),
)


class Distribution:
    """How often a value fell into each bucket, and their sum; for one thread.

    bounds  upper end of each bucket, ascending
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Show the counts as Prometheus wants them: each bucket with all below it."""
        buckets, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), seen))
        family.add_metric(labels, buckets, self.total)


class TenantCounts:
    """What one tenant's requests came to since the start, in tokens."""

    __slots__ = ("cached_tokens", "generation_tokens", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0


CURVE_SIZES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
"""Of which sizes hit rates are estimated, as multiples of the present one."""

Rates = Mapping[float, float]
"""Estimated hit rates by size, as a multiple of the present one."""


class TenantBlocks(msgspec.Struct, frozen=True):
    """What one tenant's namespaces own of the pool now."""

    num_private: int = 0
    num_pinned: int = 0
    num_evictable: int = 0


class ServerMetrics:
    """The metrics of one server; each has a registry of its own, so tests may run several.

    read_stats  gives the engine's latest counters, from any thread
    model       the model's name, as vLLM's metrics have it
    block_size  tokens of a block
    exact       whether answers with and without the cache were found to have the same bits
    tenants     names that may be labels, the first `max_tenants` of them; all others are "other"
    read_recheck
                gives what was checked again, from any thread

    All that is observed belongs to one thread, the event loop's.
    """

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        *,
        model: str = "",
        block_size: int = 0,
        tenants: Iterable[str] = (),
        max_tenants: int = 64,
        exact: bool = False,
        read_recheck: Callable[[], RecheckStats] = RecheckStats,
    ) -> None:
        self.first_token_cached = Distribution(_SECONDS)
        self.first_token_uncached = Distribution(_SECONDS)
        self.request_duration = Distribution(_SECONDS)
        self.queue_time = Distribution(_SECONDS)
        self.prefill_time = Distribution(_SECONDS)
        self.decode_time = Distribution(_SECONDS)
        self.inter_token = Distribution(_SHORT_SECONDS)
        self.request_prompt_tokens = Distribution(_TOKENS)
        self.request_output_tokens = Distribution(_TOKENS)
        self.http_requests: Counter[tuple[str, int]] = Counter()  # by endpoint and status
        self.read_stats = read_stats
        self.read_recheck = read_recheck
        self.model = model
        self.block_size = block_size
        self.exact = exact
        names = (NO_TENANT, *list(tenants)[:max_tenants], OTHER_TENANTS)
        self.tenants = {name: TenantCounts() for name in names}
        self._max_tenants = max_tenants
        self.tenant_blocks: Mapping[str, TenantBlocks] = {}
        self.curve: Rates = {}  # of the whole cache, and of tenants by label
        self.tenant_curves: Mapping[str, Rates] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self))
        self._registry.register(_RequestCollector(self))
        self._registry.register(_VllmCollector(self))
        ProcessCollector(registry=self._registry)

    def know_tenant(self, name: str) -> None:
        """Give a tenant a label of its own, unless there are as many as there may be."""
        if len(self.tenants) < self._max_tenants + 2:  # beside "default" and "other"
            self.tenants.setdefault(name, TenantCounts())

    def tenant_label(self, tenant: str) -> str:
        """Return the label of a tenant; of so few that a dashboard can hold them."""
        label = tenant or NO_TENANT
        return label if label in self.tenants else OTHER_TENANTS

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's and the cache's counters, under our names."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's numbers as they are now."""
        stats = self._metrics.read_stats()
        for name, text, read in _COUNTERS:
            yield CounterMetricFamily(f"radixcache_{name}", text, value=read(stats))
        for name, text, read in _GAUGES:
            yield GaugeMetricFamily(f"radixcache_{name}", text, value=read(stats))
        yield GaugeMetricFamily(
            "radixcache_exact",
            "1 where the check at the start found that the cache changes no bit, else 0.",
            value=self._metrics.exact,
        )
        blocks = GaugeMetricFamily(
            "radixcache_blocks", "Blocks by tier and state.", labels=["tier", "state"]
        )
        for state in ("free", "private", "pinned", "evictable"):
            blocks.add_metric(["device", state], getattr(stats.cache, f"num_{state}"))
        yield blocks
        finished = CounterMetricFamily(
            "radixcache_requests_finished", "Requests ended, by reason.", labels=["reason"]
        )
        for reason in REASONS:
            finished.add_metric([reason], stats.finished.get(reason, 0))
        yield finished
        yield from _of_recheck(self._metrics.read_recheck())


class _RequestCollector(Collector):
    """What the server observed of requests and tenants, under our names."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield what was observed until now."""
        metrics = self._metrics
        first = HistogramMetricFamily(
            "radixcache_time_to_first_token_seconds",
            "From a request's arrival to its first token, by whether any of its prompt was cached.",
            labels=["cached"],
        )
        metrics.first_token_cached.add_to(first, ["yes"])
        metrics.first_token_uncached.add_to(first, ["no"])
        yield first
        for name, text, values in (
            ("request_duration_seconds", "From arrival to the last token.", "request_duration"),
            ("queue_time_seconds", "From submission to first admission.", "queue_time"),
            ("prefill_time_seconds", "From first admission to first token.", "prefill_time"),
            ("decode_time_seconds", "From first to last token.", "decode_time"),
            ("inter_token_seconds", "Between a choice's tokens.", "inter_token"),
            ("request_prompt_tokens", "Prompt tokens of a request.", "request_prompt_tokens"),
            ("request_output_tokens", "New tokens of a choice.", "request_output_tokens"),
        ):
            yield _histogram(f"radixcache_{name}", text, [getattr(metrics, values)], {})
        http = CounterMetricFamily(
            "radixcache_http_requests", "HTTP requests answered.", labels=["endpoint", "status"]
        )
        for (endpoint, status), count in metrics.http_requests.items():
            http.add_metric([endpoint, str(status)], count)
        yield http
        yield from self._of_tenants()
        yield from self._curves()

    def _curves(self) -> Iterator[Metric]:
        whole = GaugeMetricFamily(
            "radixcache_curve_hit_rate",
            "Estimated hit rate of a cache of so many times the present size, from 0 to 1.",
            labels=["size"],
        )
        for times, rate in self._metrics.curve.items():
            whole.add_metric([f"{times:g}"], rate)
        yield whole
        apart = GaugeMetricFamily(
            "radixcache_tenant_curve_hit_rate",
            "The same for a tenant alone, from what its requests own.",
            labels=["tenant", "size"],
        )
        for tenant, rates in self._metrics.tenant_curves.items():
            for times, rate in rates.items():
                apart.add_metric([tenant, f"{times:g}"], rate)
        yield apart

    def _of_tenants(self) -> Iterator[Metric]:
        for name, text in (
            ("prompt_tokens", "Prompt tokens of a tenant's requests."),
            ("cached_tokens", "Of those, found in the cache."),
            ("generation_tokens", "Tokens generated for a tenant."),
        ):
            family = CounterMetricFamily(f"radixcache_tenant_{name}", text, labels=["tenant"])
            for tenant, counts in self._metrics.tenants.items():
                family.add_metric([tenant], getattr(counts, name))
            yield family
        blocks = GaugeMetricFamily(
            "radixcache_tenant_blocks",
            "Blocks of a tenant, by tier and state.",
            labels=["tenant", "tier", "state"],
        )
        for tenant, owned in self._metrics.tenant_blocks.items():
            for state in ("private", "pinned", "evictable"):
                blocks.add_metric([tenant, "device", state], getattr(owned, f"num_{state}"))
        yield blocks


class _VllmCollector(Collector):
    """The same numbers under vLLM's names, with its labels."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the same as vLLM would."""
        metrics, stats = self._metrics, self._metrics.read_stats()
        labels = {"model_name": metrics.model, "engine": "0"}
        for name, text, read in _VLLM_COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(labels))
            counter.add_metric(list(labels.values()), read(stats))
            yield counter
        for name, text, read in _VLLM_GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(labels))
            gauge.add_metric(list(labels.values()), read(stats))
            yield gauge
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended, by reason.",
            labels=[*labels, "finished_reason"],
        )
        for reason in REASONS:
            success.add_metric([*labels.values(), reason], stats.finished.get(reason, 0))
        yield success
        pool = {"block_size": metrics.block_size, "num_gpu_blocks": stats.cache.num_blocks}
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The pool; always 1.", labels=[*labels, *pool]
        )
        config.add_metric([*labels.values(), *map(str, pool.values())], 1)
        yield config
        first = [metrics.first_token_cached, metrics.first_token_uncached]
        for name, text, parts in (
            ("time_to_first_token_seconds", "From arrival to the first token.", first),
            ("inter_token_latency_seconds", "Between tokens.", [metrics.inter_token]),
            ("e2e_request_latency_seconds", "From arrival to the end.", [metrics.request_duration]),
            ("request_queue_time_seconds", "From submission to admission.", [metrics.queue_time]),
            ("request_prefill_time_seconds", "To the first token.", [metrics.prefill_time]),
            ("request_decode_time_seconds", "From first to last token.", [metrics.decode_time]),
            ("request_prompt_tokens", "Prompt tokens.", [metrics.request_prompt_tokens]),
            ("request_generation_tokens", "New tokens.", [metrics.request_output_tokens]),
        ):
            yield _histogram(f"vllm:{name}", text, parts, labels)


def _of_recheck(stats: RecheckStats) -> Iterator[Metric]:
    rechecks = CounterMetricFamily(
        "radixcache_rechecks",
        "Finished requests that were computed again, by what came of it.",
        labels=["result"],
    )
    for result in ("same", "kv", "sampled", "abandoned"):
        rechecks.add_metric([result], getattr(stats, result))
    yield rechecks
    yield CounterMetricFamily(
        "radixcache_rechecked_tokens", "Tokens whose K/V is the same again.", value=stats.tokens
    )


def _histogram(
    name: str, text: str, parts: list[Distribution], labels: Mapping[str, str]
) -> HistogramMetricFamily:
    """Show distributions of equal buckets as one."""
    whole = Distribution(parts[0].bounds)
    whole.counts = [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)]
    whole.total = sum(part.total for part in parts)
    family = HistogramMetricFamily(name, text, labels=list(labels))
    whole.add_to(family, list(labels.values()))
    return family


def _used(stats: EngineStats) -> float:
    return (stats.cache.num_private + stats.cache.num_pinned) / stats.cache.num_blocks
