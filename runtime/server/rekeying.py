"""Keys that are read anew while the server runs.

Owns: what changes with them, and in which order.  Does not know: files, signals, how keys are
compared.
Idea: the engine's thread takes over quotas and salts, and in the same call the new keys begin to
count and the old ones end; so no key is let in whose quota is not set.
"""

from __future__ import annotations

from runtime.engine import Engine
from runtime.server.context import Served
from runtime.server.tenants import Tenants


async def follow_keys(served: Served, tenants: Tenants, newer: Tenants) -> None:
    """Let in whoever a newer reading of the file lets in, and nobody else.

    Tenants that stay keep what they have cached; requests under way go on, whoever's they are.
    Raises InvalidSetting where `newer` has other salts, EngineFailure; nothing changes then.
    """
    tenants.check_salts_of(newer)

    def take_over(engine: Engine) -> None:
        """Change quotas and keys together, between two steps."""
        cache = engine.cache
        before, after = (of.quotas(cache.config.num_blocks) for of in (tenants, newer))
        for namespace, quota in before.items():  # first, or shares together may exceed the pool
            if after.get(namespace) != quota:
                cache.set_quota(cache.epochs.current(namespace), None)
        for namespace, quota in after.items():
            if before.get(namespace) != quota:
                cache.set_quota(cache.epochs.current(namespace), quota)
        tenants.follow(newer)

    await served.engine.call(take_over)
    for name in newer.names:
        served.metrics.know_tenant(name)
