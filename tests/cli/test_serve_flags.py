"""`radixcache serve`: its flags of keys, limits, logs and traces do what they say."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from runtime.cli.serve import Server
from runtime.cli.server_options import add_server_flags, server_config, tenants_of, tracer_of
from runtime.errors import InvalidSetting
from runtime.server.config import ServerConfig
from runtime.server.tenants import Tenants

KEYS = '[tenants.acme]\nkeys = ["sk-acme-1234"]\n'


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return parser.parse_args(arguments)


def test_without_flags_the_settings_are_the_defaults() -> None:
    args = parsed()
    assert server_config(args) == ServerConfig()
    assert tenants_of(args, random_secret=b"") is None
    assert tracer_of(args, model="x") is None


FLAGS = [
    ("max_body_bytes", ("--max-body", "1MiB"), 1 << 20),
    ("max_header_bytes", ("--max-header", "2k"), 2048),
    ("held_share", ("--held-share", "0.25"), 0.25),
    ("open_metrics", ("--open-metrics",), True),
    *(
        (name, (f"--{name.replace('_', '-')}", "7"), 7)
        for name in ServerConfig.__struct_fields__
        if name.startswith("max_") and not name.endswith("_bytes")
    ),
    *(
        (name, (f"--{name.removesuffix('_s').replace('_', '-')}", "2.5"), 2.5)
        for name in ServerConfig.__struct_fields__
        if name.endswith("_s")
    ),
]


@pytest.mark.parametrize(("name", "arguments", "value"), FLAGS, ids=[flag[0] for flag in FLAGS])
def test_each_flag_sets_its_field_and_no_other(
    name: str, arguments: tuple[str, ...], value: object
) -> None:
    found = server_config(parsed(*arguments))
    assert getattr(found, name) == value
    for other in set(ServerConfig.__struct_fields__) - {name}:
        assert getattr(found, other) == getattr(ServerConfig(), other)


def test_a_file_of_keys_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidSetting, match=r"nowhere\.toml"):
        tenants_of(parsed("--api-keys", "nowhere.toml"), random_secret=b"")


def test_traces_go_to_a_url() -> None:
    with pytest.raises(InvalidSetting, match="--otel-endpoint"):
        tracer_of(parsed("--otel-endpoint", "localhost:4318"), model="x")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Something that takes OpenTelemetry's posts."""
    taken: list[bytes] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Take)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", taken
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_with_keys_logs_and_traces_each_request(
    tmp_path: Path, collector: tuple[str, list[bytes]]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    url, taken = collector
    flags = ["--api-keys", str(keys), "--log-format", "json", "--otel-endpoint", url]
    serve = ["-m", "runtime.cli.main", "serve", "--port", "0", "--json", "--num-blocks", "32"]
    with subprocess.Popen(
        [sys.executable, *serve, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            base = json.loads(server.stdout.readline())["url"]
            server.send_signal(signal.SIGHUP)  # it still starts, and heeds this later
            with httpx.Client(base_url=base, timeout=60) as http:
                wait_until_up(http)
                body = {"prompt": "1, 2, 3,", "max_tokens": 2, "temperature": 0}
                headers = {"x-request-id": "abc"}
                assert http.post("/v1/completions", json=body, headers=headers).status_code == 401
                headers["x-api-key"] = "sk-acme-1234"
                assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
                keys.write_text(KEYS.replace("1234", "5678"))
                server.send_signal(signal.SIGHUP)
                wait_until_answered(http, headers, 401)
        finally:
            server.send_signal(signal.SIGTERM)
            _, errors = server.communicate(timeout=30)
    assert server.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    told = [line for line in lines if line["logger"] == "radixcache.requests"]
    assert errors.count("the API keys were read again, of 1 tenants") == 2
    assert [(line["id"], line["status"]) for line in told[:2]] == [("abc", 401), ("abc", 200)]
    assert (told[1]["tenant"], told[1]["output"]) == ("acme", 2)
    assert "sk-acme" not in errors
    spans = b"".join(taken)
    assert b"text_completion smollm2-135m-instruct" in spans
    assert b"radixcache.cached_tokens" in spans


def test_a_file_of_keys_with_a_mistake_changes_nothing_and_the_log_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def follow(newer: Tenants) -> None:
        pytest.fail("nothing is to change")

    def read() -> Tenants:
        raise InvalidSetting("the API keys in keys.toml are not TOML: at line 1")

    app = Starlette()
    app.state.engine, app.state.follow_keys = None, follow
    server = Server(uvicorn.Config(app), app, read_keys=read, drain_s=0)
    asyncio.run(server.read_keys_anew())
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "stay as they were: the API keys in keys.toml" in record.getMessage()


def wait_until_answered(http: httpx.Client, headers: dict[str, str], status: int) -> None:
    for _ in range(100):
        if http.get("/v1/models", headers=headers).status_code == status:
            return
        time.sleep(0.05)
    pytest.fail("the keys were not read again")


def wait_until_up(http: httpx.Client) -> None:
    for _ in range(100):
        try:
            http.get("/health")
            return
        except httpx.ConnectError:
            time.sleep(0.1)
