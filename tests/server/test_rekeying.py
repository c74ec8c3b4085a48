"""Keys read anew while the server runs: who comes, who goes, and what stays cached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from radixcache import Quota
from runtime.errors import InvalidSetting
from runtime.loading import Runtime
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.server.tenants import Share, Tenant, Tenants
from tests.support.served import assert_nothing_held, quick_runtime

SECRET = b"0123456789abcdef"
OLD, NEW, OTHER, OPS = "sk-old-12345", "sk-new-12345", "sk-other-123", "sk-ops-12345"
PROMPT = {"prompt": list(range(100, 180)), "max_tokens": 1}
Visit = Callable[[httpx.AsyncClient, Callable[[Tenants], Awaitable[None]]], Awaitable[None]]


def tenants_of(*, secret: bytes = SECRET, **tenants: Tenant) -> Tenants:
    return Tenants(tenants | {"ops": Tenant(keys=(OPS,), admin=True)}, secret=secret)


def visited(runtime: Runtime, tenants: Tenants, visit: Visit) -> None:
    """Serve within this thread, and let a visitor call and change keys."""
    app = create_app(runtime, ServerConfig(max_tenant_labels=3), tenants=tenants)

    async def live() -> None:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                await visit(http, app.state.follow_keys)

    asyncio.run(live())
    assert_nothing_held(runtime)


async def asked(http: httpx.AsyncClient, key: str) -> Any:
    """Cached tokens of a prompt, or the status of a refusal."""
    answer = await http.post("/v1/completions", json=PROMPT, headers={"x-api-key": key})
    if answer.status_code != 200:
        return f"{answer.status_code}"
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_key_comes_beside_another_and_the_other_goes_and_all_stays_cached() -> None:
    async def visit(http: httpx.AsyncClient, follow: Callable[[Tenants], Awaitable[None]]) -> None:
        assert [await asked(http, key) for key in (OLD, NEW)] == [0, "401"]
        await follow(tenants_of(acme=Tenant(keys=(OLD, NEW))))
        assert [await asked(http, key) for key in (OLD, NEW)] == [79, 79]
        await follow(tenants_of(acme=Tenant(keys=(NEW,))))
        assert [await asked(http, key) for key in (OLD, NEW)] == ["401", 79]

    visited(quick_runtime(), tenants_of(acme=Tenant(keys=(OLD,))), visit)


def test_tenants_come_and_go_with_quotas_labels_and_a_place_on_the_tree() -> None:
    runtime = quick_runtime()
    cache = runtime.engine.cache
    acme = Tenant(keys=(OLD,), quota=Share(soft=0.75, hard=0.75))
    other = Tenant(keys=(OTHER,), quota=Share(soft=0.75))

    async def visit(http: httpx.AsyncClient, follow: Callable[[Tenants], Awaitable[None]]) -> None:
        await asked(http, OLD)
        await follow(tenants_of(evil=other))  # both shares together would exceed the pool
        assert [await asked(http, key) for key in (OLD, OTHER, OTHER)] == ["401", 0, 79]
        quotas = {a.namespace: a.quota for a in cache.accounts if a.quota and a.quota.soft_limit}
        salts = {name: salt for salt, name in tenants_of(evil=other).salts.items()}
        assert {ns.salt: quota for ns, quota in quotas.items()} == {
            salts["evil"]: Quota(soft_limit=48)
        }
        await follow(tenants_of(acme=acme, fourth=Tenant(keys=(OTHER,))))
        assert await asked(http, OLD) == 79  # what it had is still its own
        history = await http.get("/tree/history", headers={"x-api-key": OTHER})
        assert history.status_code == 200

    visited(runtime, tenants_of(acme=acme), visit)


def test_a_new_tenant_has_its_own_label_while_there_is_one() -> None:
    async def visit(http: httpx.AsyncClient, follow: Callable[[Tenants], Awaitable[None]]) -> None:
        names = {f"t{i}": Tenant(keys=(f"sk-number-{i}",)) for i in range(4)}
        await follow(tenants_of(**names))
        for i in range(4):
            assert await asked(http, f"sk-number-{i}") == 0
        metrics = (await http.get("/metrics", headers={"x-api-key": OPS})).text
        told = [f'tenant_prompt_tokens_total{{tenant="{n}"}} 80.0' in metrics for n in names]
        assert told == [True, False, False, False]  # "acme" and "ops" were there before
        assert 'tenant_prompt_tokens_total{tenant="other"} 240.0' in metrics

    visited(quick_runtime(), tenants_of(acme=Tenant(keys=(OLD,))), visit)


def test_another_secret_changes_nothing() -> None:
    async def visit(http: httpx.AsyncClient, follow: Callable[[Tenants], Awaitable[None]]) -> None:
        with pytest.raises(InvalidSetting, match="needs a restart"):
            await follow(tenants_of(acme=Tenant(keys=(NEW,)), secret=b"x" * 16))
        assert [await asked(http, key) for key in (OLD, NEW)] == [0, "401"]

    visited(quick_runtime(), tenants_of(acme=Tenant(keys=(OLD,))), visit)
