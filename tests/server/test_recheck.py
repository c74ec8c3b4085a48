"""A server that checks what it has served."""

from __future__ import annotations

import re

import httpx
import pytest

from runtime.cli.main import build_parser
from runtime.cli.server_options import server_config
from runtime.errors import InvalidSetting
from runtime.plan import Difference
from runtime.server.config import ServerConfig
from tests.support.served import NAME, quick_runtime, serving

BODY = {"model": NAME, "prompt": "one two three " * 20, "max_tokens": 4}


def results(client: httpx.Client) -> dict[str, float]:
    """How many rechecks came to which result, zeros left out."""
    text = client.get("/metrics").text
    found = re.findall(r'^radixcache_rechecks_total\{result="(\w+)"\} (\S+)', text, re.MULTILINE)
    assert len(found) == 4
    return {name: float(count) for name, count in found if float(count)}


def settled(client: httpx.Client, count: int) -> dict[str, float]:
    """The results, once there are so many."""
    for _ in range(3000):
        found = results(client)
        if sum(found.values()) >= count:
            return found
    raise AssertionError(f"the checks did not come to an end: {found}")


def test_a_server_checks_one_in_n_of_its_requests_and_tells_what_came_of_it():
    runtime = quick_runtime()
    settings = ServerConfig(recheck_every=2)
    with serving(runtime, settings=settings) as url, httpx.Client(base_url=url) as client:
        for _ in range(4):
            client.post("/v1/completions", json=BODY).raise_for_status()
        assert settled(client, 2) == {"same": 2}
        runtime.executor.difference = Difference(block=1, layer=3)
        for _ in range(2):
            client.post("/v1/completions", json=BODY).raise_for_status()
        assert settled(client, 3) == {"same": 2, "kv": 1}
        runtime.executor.difference = None
        usage = client.post("/v1/completions", json=BODY).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        usage = client.post("/v1/completions", json=BODY).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert settled(client, 4) == {"same": 3, "kv": 1}
        assert "radixcache_rechecked_tokens_total " in client.get("/metrics").text


def test_a_session_goes_on_after_its_namespace_was_quarantined():
    runtime = quick_runtime()
    settings = ServerConfig(recheck_every=1)
    with serving(runtime, settings=settings) as url, httpx.Client(base_url=url) as client:
        opened = client.post("/v1/sessions", json={"prompt": BODY["prompt"]}).raise_for_status()
        turn = f"/v1/sessions/{opened.json()['id']}/generate"
        runtime.executor.difference = Difference(block=0, layer=0)
        client.post(turn, json={"max_tokens": 4}).raise_for_status()
        assert settled(client, 1) == {"kv": 1}
        runtime.executor.difference = None
        client.post(turn, json={"max_tokens": 4}).raise_for_status()
        assert settled(client, 2) == {"kv": 1, "same": 1}


def test_without_the_flag_nothing_is_checked():
    with serving(quick_runtime()) as url, httpx.Client(base_url=url) as client:
        client.post("/v1/completions", json=BODY).raise_for_status()
        assert results(client) == {}


def test_the_flag_is_a_setting_of_the_server():
    args = build_parser().parse_args(["serve", "--recheck-every", "50"])
    assert server_config(args).recheck_every == 50
    with pytest.raises(InvalidSetting, match="recheck_every is -1: 1 or more"):
        ServerConfig(recheck_every=-1)
