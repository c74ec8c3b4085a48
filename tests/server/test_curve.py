"""`GET /cache/curve`: right for one tenant and for all, and nobody sees another's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import quick_runtime, serving

COMPLETIONS = "/v1/completions"


def prompt(begin: int, length: int = 80) -> dict[str, object]:
    return {"prompt": list(range(begin, begin + length)), "max_tokens": 2, "ignore_eos": True}


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = quick_runtime()
    yield runtime
    curves = runtime.engine.scheduler.admission.curves
    if curves is not None:
        curves.check()


def test_the_curve_tells_what_more_memory_would_bring(runtime: Runtime) -> None:
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(3):
            assert http.post(COMPLETIONS, json=prompt(100)).status_code == 200
        answer = http.get("/cache/curve").json()
        metrics = http.get("/metrics").text
    (curve,) = answer["curves"]
    assert (curve["tenant"], curve["references"]) == (None, pytest.approx(15, abs=0.1))
    rates = {point["size"]: point["hit_rate"] for point in curve["points"]}
    # Of three times five blocks the cache found four twice: the last token is computed anew.
    assert rates[1.0] == rates[2.0] == pytest.approx(8 / 15, abs=0.01)
    assert curve["text"] == "the hit rate is 53 % and more memory changes nothing"
    assert 'radixcache_curve_hit_rate{size="2"} 0.53' in metrics


def test_a_tenant_sees_its_own_curve_and_an_administrator_all(runtime: Runtime) -> None:
    keys = {name: {"x-api-key": f"sk-{name}-12345"} for name in ("one", "two", "ops")}
    tenants = Tenants(
        {n: Tenant(keys=(keys[n]["x-api-key"],), admin=n == "ops") for n in keys},
        secret=b"0123456789abcdef",
    )
    with (
        serving(runtime, tenants=tenants) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        http.post(COMPLETIONS, json=prompt(100), headers=keys["one"])
        before = http.get("/cache/curve", headers=keys["one"]).json()
        for begin in (100, 100, 300, 500):
            http.post(COMPLETIONS, json=prompt(begin), headers=keys["two"])
        after = http.get("/cache/curve", headers=keys["one"]).json()
        nobody = http.get("/cache/curve", headers=keys["ops"]).json()
        denied = http.get("/metrics", headers=keys["one"]).status_code
        metrics = http.get("/metrics", headers=keys["ops"]).text
        assert http.get("/cache/curve").status_code == 401
    (mine,), (still_mine,) = before["curves"], after["curves"]
    assert mine["tenant"] == "one"
    assert still_mine["num_blocks"] == mine["num_blocks"] == 5
    assert still_mine["points"] == [
        p | {"saved_tokens_per_s": q["saved_tokens_per_s"]}
        for p, q in zip(mine["points"], still_mine["points"], strict=True)
    ]
    assert [curve["tenant"] for curve in nobody["curves"]] == [None, "one", "two"]
    assert denied == 403
    assert 'radixcache_tenant_curve_hit_rate{size="1",tenant="two"}' in metrics


def test_a_server_may_be_told_to_watch_nothing(runtime: Runtime) -> None:
    settings = ServerConfig(curve_samples=0)
    with (
        serving(runtime, settings=settings) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        answer = http.get("/cache/curve")
        metrics = http.get("/metrics").text
    assert answer.status_code == 404
    assert "--curve-samples 0" in answer.json()["error"]["message"]
    assert "radixcache_curve_hit_rate{" not in metrics
