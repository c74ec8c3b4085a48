"""`GET /cache/curve`: what a smaller or larger cache would hit, in numbers and in words.

Owns: the answer, who may see what of it, and the gauges.  Does not know: how a curve is made.
Idea: an administrator sees the whole cache and each tenant; a tenant sees its own requests alone,
by what it owns itself, so no number tells of anybody else.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixcache.curve import CurveEstimate
from radixcache.namespace import Namespace
from radixcache.sim.report import advice
from radixcache.stats import NamespaceStats
from runtime.engine import Engine
from runtime.metrics import CURVE_SIZES, Rates
from runtime.server.context import Caller, Served, caller_of
from runtime.server.errors import json_response
from runtime.server.openapi import Endpoint


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated hit rate of a cache of another size, in whole blocks of prompts.

    size                multiple of the present size
    num_blocks          that size
    hit_rate            from 0 to 1
    saved_tokens_per_s  prefill tokens a second computed less than now; None where time is unknown
    """

    size: float
    num_blocks: int
    hit_rate: float
    saved_tokens_per_s: float | None


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The curve of the whole cache, or of one tenant alone.

    tenant        whose; None for the whole cache
    num_blocks    the present size: the pool, or what the tenant owns now
    references    blocks asked for, of which recent ones count for more
    points        by size, ascending
    text          the same in words
    """

    tenant: str | None
    num_blocks: int
    references: float
    points: list[CurvePoint]
    text: str


class CurveAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller may see: the whole cache first, where it may see that."""

    block_size: int
    curves: list[Curve]


class CurveEndpoint:
    """The endpoint, over one engine."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def endpoints(self) -> list[Endpoint]:
        """Return what is served, as it is routed and documented."""
        text = "Estimated hit rate of smaller and larger caches"
        return [Endpoint("GET", "/cache/curve", self.curve, text, answer=CurveAnswer)]

    async def curve(self, request: HttpRequest) -> Response:
        """`GET /cache/curve`: the curves that the caller may see."""
        caller, served = caller_of(request), self._served
        seen = await served.engine.call(lambda engine: curves_of(engine, served, caller))
        if seen is None:
            raise HTTPException(404, "the server was started with --curve-samples 0")
        block_size = served.runtime.engine.cache.config.block_size
        return json_response(CurveAnswer(block_size=block_size, curves=seen))


def curves_of(engine: Engine, served: Served, caller: Caller) -> list[Curve] | None:
    """Return the curves that a caller may see, on the engine's thread; None where there are none.

    O(namespaces + tenants).
    """
    live = engine.scheduler.admission.curves
    if live is None:
        return None
    owned = _owned(served, engine.cache.namespaces())
    sees_all = caller.is_admin or served.config.open_metrics
    if not sees_all:
        mine = live.of_tenant(caller.tenant)
        return [] if mine is None else [_curve(caller.tenant, mine, owned.get(caller.tenant, 0))]
    whole = _curve(None, live.whole(), engine.cache.config.num_blocks)
    return [whole, *(_curve(name, e, owned.get(name, 0)) for name, e in live.tenants().items())]


def gauges_of(curves: list[Curve]) -> tuple[Rates, dict[str, Rates]]:
    """Return the hit rates of the whole cache and of each tenant, as metrics show them."""
    rates = {c.tenant: {point.size: point.hit_rate for point in c.points} for c in curves}
    whole = rates.pop(None, {})
    return whole, {name: of for name, of in rates.items() if name is not None}


def _owned(served: Served, namespaces: Mapping[Namespace, NamespaceStats]) -> dict[str, int]:
    """Blocks that each tenant owns now."""
    owned: dict[str, int] = {}
    for namespace, stats in namespaces.items():
        tenant = served.tenant_of(namespace)
        if tenant is not None:
            mine = stats.num_private + stats.num_pinned + stats.num_evictable
            owned[tenant] = owned.get(tenant, 0) + mine
    return owned


def _curve(tenant: str | None, estimate: CurveEstimate, num_blocks: int) -> Curve:
    num_blocks = max(1, num_blocks)
    estimate = estimate.anchored(num_blocks)
    now, rate = estimate.hit_rate(num_blocks), estimate.tokens_per_s
    points = []
    for size in CURVE_SIZES:
        hit_rate = estimate.hit_rate(num_blocks * size)
        points.append(
            CurvePoint(
                size=size,
                num_blocks=round(num_blocks * size),
                hit_rate=round(hit_rate, 4),
                saved_tokens_per_s=None if rate is None else round(rate * (hit_rate - now), 1),
            )
        )
    return Curve(
        tenant=tenant,
        num_blocks=num_blocks,
        references=round(estimate.references, 1),
        points=points,
        text=advice(lambda times: estimate.hit_rate(num_blocks * times), prompt_tokens_per_s=rate),
    )
