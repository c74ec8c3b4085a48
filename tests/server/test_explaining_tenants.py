"""An explanation tells nothing of what others have: every way across that we know of is tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from tests.server.test_tenants import ACME, GLOBEX, OPS, three_tenants
from tests.support.served import quick_runtime, serving, wait_until_idle

SECRET = "The merger with Initech closes on the ninth of May, and nobody may know it before. " * 2
PROMPT = {"prompt": SECRET}
BEGIN = {"prompt": SECRET[:60]}


@pytest.fixture
def runtime() -> Runtime:
    return quick_runtime(max_ghosts=1000)


@pytest.fixture
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    with (
        serving(runtime, tenants=three_tenants()) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def explain(http: httpx.Client, body: dict[str, Any], headers: Any = None) -> dict[str, Any]:
    answer = http.post("/cache/explain", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def serve(http: httpx.Client, headers: Any = None, **fields: Any) -> None:
    body = PROMPT | {"max_tokens": 1} | fields
    assert http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_another_tenants_prompt_looks_as_if_nobody_ever_sent_it(http: httpx.Client) -> None:
    before = [explain(http, body, GLOBEX) for body in (PROMPT, BEGIN)]
    serve(http, ACME)
    assert [explain(http, body, GLOBEX) for body in (PROMPT, BEGIN)] == before
    assert before[0]["cause"] == "never_seen"
    assert explain(http, PROMPT, ACME)["cached_tokens"] > 16


def test_what_is_cached_of_one_tenant_does_not_show_where_another_diverges(
    http: httpx.Client,
) -> None:
    serve(http, ACME)
    serve(http, GLOBEX, prompt=SECRET[:80])
    why = explain(http, {"prompt": SECRET[:80] + " Then it all fell through, they say."}, GLOBEX)
    assert why["cached"] is None
    assert "nobody may know" not in json.dumps(why)


def test_another_tenants_evictions_are_not_told(http: httpx.Client, runtime: Runtime) -> None:
    serve(http, ACME)
    wait_until_idle(runtime)
    runtime.engine.cache.evict(64)
    assert explain(http, PROMPT, ACME)["cause"] == "evicted"
    why = explain(http, PROMPT, GLOBEX)
    assert (why["cause"], why["evicted_s"], why["evicted_tokens"]) == ("never_seen", None, 0)


def test_a_salt_leads_into_no_other_tenants_namespace(http: httpx.Client, runtime: Runtime) -> None:
    serve(http, ACME, cache_salt="s")
    salts = [namespace.salt for namespace in runtime.engine.cache.namespaces()]
    assert salts
    for salt in ("s", *salts, *(salt.partition(".")[2] for salt in salts)):
        for headers in (GLOBEX, OPS):
            why = explain(http, PROMPT | {"cache_salt": salt or "x"}, headers)
            assert why["cached_tokens"] == 0
    assert explain(http, PROMPT | {"cache_salt": "s"}, ACME)["cached_tokens"] > 16


def test_one_salt_is_not_told_what_another_of_its_own_tenant_has(http: httpx.Client) -> None:
    serve(http, ACME, cache_salt="end user 1")
    for fields in ({"cache_salt": "end user 2"}, {}):
        why = explain(http, PROMPT | fields, ACME)
        assert (why["cause"], why["elsewhere_tokens"]) == ("never_seen", 0)


def test_without_keys_a_salt_keeps_its_secret_from_those_without_it() -> None:
    runtime = quick_runtime()
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        serve(http, cache_salt="mine")
        why = explain(http, PROMPT)
        assert (why["cause"], why["elsewhere_tokens"]) == ("never_seen", 0)


def test_an_administrators_key_is_told_how_much_others_have_and_no_text_of_theirs(
    http: httpx.Client,
) -> None:
    serve(http, ACME)
    why = explain(http, {"prompt": SECRET[:75]}, OPS)
    assert (why["cause"], why["differs_in"]) == ("other_namespace", ["salt"])
    assert why["elsewhere_tokens"] >= 16
    assert why["cached"] is None
    assert "before" not in json.dumps(why)  # what follows in the other's prompt


def test_the_answer_of_a_request_tells_no_more(http: httpx.Client) -> None:
    serve(http, ACME)
    body = PROMPT | {"max_tokens": 1, "radixcache": {"explain": True}}
    answer = http.post("/v1/completions", json=body, headers=GLOBEX)
    (why,) = answer.json()["radixcache"]["explanations"]
    assert (why["cause"], why["elsewhere_tokens"], why["cached"]) == ("never_seen", 0, None)


def test_no_key_no_explanation(http: httpx.Client) -> None:
    for path in ("/cache/explain", "/cache/explain/messages"):
        assert http.post(path, json=PROMPT).status_code == 401


def test_a_public_prefix_counts_for_every_tenant_alike(runtime: Runtime) -> None:
    tokens = runtime.tokenizer.encode(SECRET)[:32]
    with (
        serving(runtime, tenants=three_tenants(), public_prefix=tokens) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        for headers in (ACME, GLOBEX):
            body = {"prompt": [*tokens, *range(900, 950)]}
            why = explain(http, body, headers)
            answer = http.post("/v1/completions", json=body | {"max_tokens": 1}, headers=headers)
            details = answer.json()["usage"]["prompt_tokens_details"]
            assert why["cached_tokens"] == details["cached_tokens"] == 32
