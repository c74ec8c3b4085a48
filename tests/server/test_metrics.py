"""Metrics: what is counted is what happened, under our names and vLLM's; the dashboard asks for
names that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from runtime.loading import Runtime
from runtime.metrics import NO_TENANT, OTHER_TENANTS, Distribution
from runtime.server.config import ServerConfig
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import NAME, HashExecutor, quick_runtime, serving, wait_until_idle

COMPLETIONS = "/v1/completions"
PROMPT = {"prompt": list(range(100, 180)), "max_tokens": 5, "ignore_eos": True, "seed": 1}
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def values(http: httpx.Client, **headers: str) -> dict[str, float]:
    """Every sample of /metrics, by its name and labels as they stand there."""
    answer = http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_two_equal_requests_count_as_one_miss_and_one_hit(http: httpx.Client) -> None:
    for _ in range(2):
        assert http.post(COMPLETIONS, json=PROMPT).status_code == 200
    seen = values(http)
    assert seen["radixcache_prompt_tokens_total"] == 160
    assert seen["radixcache_cached_prompt_tokens_total"] == 79
    assert seen["radixcache_generation_tokens_total"] == 10
    assert seen['radixcache_requests_finished_total{reason="length"}'] == 2
    assert seen['radixcache_time_to_first_token_seconds_count{cached="yes"}'] == 1
    assert seen['radixcache_time_to_first_token_seconds_count{cached="no"}'] == 1
    assert seen["radixcache_inter_token_seconds_count"] == 8
    assert seen["radixcache_queue_time_seconds_count"] == 2
    assert seen["radixcache_request_duration_seconds_count"] == 2
    assert seen["radixcache_request_prompt_tokens_sum"] == 160
    assert seen["radixcache_request_output_tokens_sum"] == 10
    first, parts = (
        seen['radixcache_time_to_first_token_seconds_sum{cached="no"}'],
        [seen[f"radixcache_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")],
    )
    assert 0 < first < seen["radixcache_request_duration_seconds_sum"]
    assert min(parts) > 0
    assert sum(parts) < seen["radixcache_request_duration_seconds_sum"]
    assert seen["radixcache_prefill_time_seconds_count"] == 2
    assert seen["radixcache_decode_time_seconds_count"] == 2
    endpoint = 'endpoint="POST /v1/completions",status="200"'
    assert seen[f"radixcache_http_requests_total{{{endpoint}}}"] == 2


def test_vllms_names_say_the_same(http: httpx.Client) -> None:
    for _ in range(2):
        http.post(COMPLETIONS, json=PROMPT)
    seen = values(http)
    label = f'{{engine="0",model_name="{NAME}"}}'
    for theirs, ours in (
        ("prefix_cache_queries_total", "prompt_tokens_total"),
        ("prefix_cache_hits_total", "cached_prompt_tokens_total"),
        ("prompt_tokens_cached_total", "cached_prompt_tokens_total"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("num_preemptions_total", "preemptions_total"),
        ("inter_token_latency_seconds_count", "inter_token_seconds_count"),
        ("e2e_request_latency_seconds_sum", "request_duration_seconds_sum"),
        ("request_queue_time_seconds_count", "queue_time_seconds_count"),
        ("request_prefill_time_seconds_sum", "prefill_time_seconds_sum"),
        ("request_decode_time_seconds_sum", "decode_time_seconds_sum"),
    ):
        assert seen[f"vllm:{theirs}{label}"] == seen[f"radixcache_{ours}"]
    assert seen[f"vllm:time_to_first_token_seconds_count{label}"] == 2
    for name in ("gpu_cache_usage_perc", "kv_cache_usage_perc"):
        assert seen[f"vllm:{name}{label}"] == 0  # nothing runs: what is cached counts as free
    done = f'{{engine="0",finished_reason="length",model_name="{NAME}"}}'
    assert seen[f"vllm:request_success_total{done}"] == 2
    pool = f'{{block_size="16",engine="0",model_name="{NAME}",num_gpu_blocks="64"}}'
    assert seen[f"vllm:cache_config_info{pool}"] == 1


def test_a_request_that_is_resumed_counts_once_for_vllms_dashboards() -> None:
    runtime = quick_runtime(num_blocks=8)
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as http:
        prompts = [list(range(10, 50)), list(range(60, 100))]
        http.post(COMPLETIONS, json=PROMPT | {"prompt": prompts, "max_tokens": 60})
        seen = values(http)
    assert seen["radixcache_preemptions_total"] > 0
    assert seen["radixcache_prefix_cache_queries_total"] > 80
    assert seen[f'vllm:prefix_cache_queries_total{{engine="0",model_name="{NAME}"}}'] == 80


def test_names_are_the_same_for_a_scraper_that_prefers_openmetrics(http: httpx.Client) -> None:
    asked = http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    assert asked.headers["content-type"].startswith("text/plain; version=0.0.4")
    parsed = text_string_to_metric_families(asked.text)
    found = {sample.name for family in parsed for sample in family.samples}
    assert {"process_resident_memory_bytes", "vllm:prompt_tokens_total"} < found


def test_blocks_of_all_states_are_the_pool(http: httpx.Client) -> None:
    http.post(COMPLETIONS, json=PROMPT)
    seen = values(http)
    blocks = {name: value for name, value in seen.items() if name.startswith("radixcache_blocks{")}
    assert sum(blocks.values()) == 64
    assert blocks['radixcache_blocks{state="evictable",tier="device"}'] == 5


def test_the_times_between_tokens_are_those_of_the_steps(
    runtime: Runtime, http: httpx.Client
) -> None:
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.03
    http.post(COMPLETIONS, json=PROMPT | {"stream": True})
    seen = values(http)
    assert seen['radixcache_inter_token_seconds_bucket{le="0.025"}'] == 0
    assert seen["radixcache_inter_token_seconds_count"] == 4


def test_a_request_that_was_left_is_observed_as_far_as_it_came(
    runtime: Runtime, http: httpx.Client
) -> None:
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.02
    body = PROMPT | {"max_tokens": 400, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    wait_until_idle(runtime, limit_s=5)
    seen = values(http)
    assert seen['radixcache_requests_finished_total{reason="abort"}'] == 1
    assert 2 < seen["radixcache_request_output_tokens_sum"] < 400


def tenant(name: str) -> Tenant:
    return Tenant(keys=(f"sk-{name}-12345",), admin=name == "ops")


def test_each_tenant_has_its_own_counts_as_far_as_there_are_labels(runtime: Runtime) -> None:
    tenants = Tenants({n: tenant(n) for n in ("one", "two", "ops")}, secret=b"0123456789abcdef")
    settings = ServerConfig(max_tenant_labels=1)
    with (
        serving(runtime, settings=settings, tenants=tenants) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        for name, count in (("one", 2), ("two", 1), ("ops", 1)):
            for _ in range(count):
                http.post(COMPLETIONS, json=PROMPT, headers={"x-api-key": f"sk-{name}-12345"})
        http.post(
            COMPLETIONS,
            json=PROMPT | {"cache_salt": "narrow"},
            headers={"x-api-key": "sk-one-12345"},
        )
        seen = values(http, **{"x-api-key": "sk-ops-12345"})

    def of(name: str, tenant: str) -> float:
        return seen[f'radixcache_tenant_{name}{{tenant="{tenant}"}}']

    assert [of("prompt_tokens_total", n) for n in ("one", OTHER_TENANTS)] == [240, 160]
    assert [of("cached_tokens_total", n) for n in ("one", OTHER_TENANTS)] == [79, 0]
    assert [of("generation_tokens_total", n) for n in ("one", OTHER_TENANTS)] == [15, 10]
    blocks = 'radixcache_tenant_blocks{state="evictable",tenant="%s",tier="device"}'
    assert [seen[blocks % n] for n in ("one", OTHER_TENANTS, NO_TENANT)] == [10, 10, 0]
    assert 'radixcache_tenant_curve_hit_rate{size="1",tenant="one"}' in seen
    assert not [name for name in seen if "two" in name or "ops" in name]


def test_prompts_that_are_only_scored_are_counted_and_hit(http: httpx.Client) -> None:
    for _ in range(2):
        http.post(COMPLETIONS, json=PROMPT | {"max_tokens": 0, "echo": True})
    seen = values(http)
    assert seen["radixcache_prompt_tokens_total"] == 160
    assert seen["radixcache_cached_prompt_tokens_total"] == 79


def test_an_unknown_path_or_method_makes_no_new_label(http: httpx.Client) -> None:
    for number in range(5):
        http.get(f"/nowhere/{number}")
        http.request(f"METHOD{number}", COMPLETIONS)
        http.get(f"/v1/models/{number}")
    names = [name for name in values(http) if name.startswith("radixcache_http_requests_total")]
    assert len(names) == 3


@given(st.lists(st.floats(0, 100), max_size=30))
def test_buckets_hold_what_is_below_them(observed: list[float]) -> None:
    bounds = (0.5, 1.0, 10.0)
    counted = Distribution(bounds)
    for value in observed:
        counted.observe(value)
    family = HistogramMetricFamily("x", "x", labels=[])
    counted.add_to(family, [])
    samples = {s.labels.get("le", s.name): s.value for s in family.samples}
    for bound in bounds:
        assert samples[str(bound)] == sum(value <= bound for value in observed)
    assert samples["+Inf"] == samples["x_count"] == len(observed)
    assert samples["x_sum"] == pytest.approx(sum(observed))


def families(http: httpx.Client) -> dict[str, set[str]]:
    """The samples that a server shows after a request, by name, each with its labels."""
    http.post(COMPLETIONS, json=PROMPT)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[str]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [*asked, *(v["definition"] for v in dashboard["templating"]["list"][1:])]


def test_every_metric_of_the_dashboard_exists_with_its_labels(http: httpx.Client) -> None:
    exist = families(http)
    assert len(queries()) > 30
    for query in queries():
        names = re.findall(r"\b(?:radixcache_|vllm:|process_)[a-z_0-9]+", query)
        assert names, query
        for name in names:
            assert name in exist, query
        labels = set(re.findall(r"(\w+)=~?\"", query))
        for group in re.findall(r"by \(([^)]*)\)", query):
            labels |= {label.strip() for label in group.split(",")}
        labels -= {"job"}  # Prometheus adds it
        assert labels <= set.union(*(exist[name] for name in names)), query


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
