"""What `/metrics` shows, and to whom.

Owns: who may see it, and adding up blocks by tenant.  Does not know: names of metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from radixcache.namespace import Namespace
from radixcache.stats import NamespaceStats
from runtime.engine import Engine
from runtime.errors import EngineFailure
from runtime.metrics import NO_TENANT, TenantBlocks
from runtime.server.context import Caller, Served
from runtime.server.curve import curves_of, gauges_of
from runtime.server.errors import Forbidden


async def scraped_metrics(served: Served, caller: Caller) -> bytes:
    """Return all metrics in Prometheus' text form; blocks by tenant as of this moment.

    Raises Forbidden where there are API keys and the caller's is no administrator's.
    """
    if not caller.is_admin and not served.config.open_metrics:
        raise Forbidden(
            "metrics tell of all tenants: use the key of a tenant with admin = true, or start the "
            "server with --open-metrics"
        )
    try:
        namespaces, curves = await served.engine.call(
            lambda engine: (_namespaces_now(engine), curves_of(engine, served, caller))
        )
    except EngineFailure:  # the counters are still worth seeing, now more than ever
        namespaces, curves = {}, None
    served.metrics.curve, of_tenants = gauges_of(curves or [])
    labels = served.metrics.tenants
    served.metrics.tenant_curves = {name: of_tenants[name] for name in of_tenants if name in labels}
    served.metrics.tenant_blocks = blocks_by_tenant(served, namespaces)
    return served.metrics.render()


def _namespaces_now(engine: Engine) -> Mapping[Namespace, NamespaceStats]:
    """What each namespace owns, after holds whose time is over: an engine at rest ends none."""
    engine.cache.expire()
    return engine.cache.namespaces()


def blocks_by_tenant(
    served: Served, namespaces: Mapping[Namespace, NamespaceStats]
) -> dict[str, TenantBlocks]:
    """Add up what the namespaces of each tenant own; O(namespaces)."""
    owned: dict[str, TenantBlocks] = {name: TenantBlocks() for name in served.metrics.tenants}
    for namespace, stats in namespaces.items():
        tenant = served.tenant_of(namespace)
        name = NO_TENANT if tenant is None else served.metrics.tenant_label(tenant)
        so_far = owned[name]
        owned[name] = TenantBlocks(
            *(
                getattr(so_far, field) + getattr(stats, field)
                for field in msgspec.structs.asdict(so_far)
            )
        )
    return owned
