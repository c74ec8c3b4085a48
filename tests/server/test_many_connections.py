"""More connections than the system has files for: the server closes some, and goes on."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import httpx
import pytest

from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.server.connection import connection_room, uvicorn_settings
from tests.support.served import quick_runtime

NUM_FILES = 256
SERVE = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_FILES} // 2, {NUM_FILES}))
from runtime.cli.serve import Server
from runtime.server.app import create_app
from runtime.server.config import ServerConfig
from runtime.server.connection import uvicorn_settings
from tests.support.served import quick_runtime
config = ServerConfig(drain_s=0.1)
app = create_app(quick_runtime(), config)
listener = socket.create_server(("127.0.0.1", 0))
settings = uvicorn_settings(app, config)
print(listener.getsockname()[1], flush=True)
Server(settings, app, read_keys=lambda: None, drain_s=0.1).run([listener])
"""


@pytest.mark.parametrize("max_connections", [1, 50, 1024, 100_000])
@pytest.mark.parametrize("max_files", [100, 256, 1024, 4096, 1 << 20])
def test_connections_and_those_taken_in_together_fit_into_the_files(
    max_connections: int, max_files: int
) -> None:
    room = connection_room(max_connections, max_files=max_files)
    assert 0 < room.num_open <= 2 * max_connections
    assert room.num_open + 6 * room.burst < room.num_files <= max_files


def test_the_limit_of_open_files_is_raised_as_far_as_connections_need() -> None:
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 512
    if hard != resource.RLIM_INFINITY and hard <= 2 * low:
        pytest.skip("this machine allows too few files to tell")
    app = create_app(quick_runtime(), ServerConfig())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        uvicorn_settings(app, ServerConfig(max_connections=8))
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised > low
        uvicorn_settings(app, ServerConfig(max_connections=1))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)  # never lowered
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_idle_connections_than_files_leave_the_server_answering() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        address = "127.0.0.1", int(server.stdout.readline())
        health = f"http://127.0.0.1:{address[1]}/health"
        assert httpx.get(health, timeout=20).status_code == 200  # it has started
        with ExitStack() as stack:
            idle = [
                stack.enter_context(socket.create_connection(address, timeout=20))
                for _ in range(2 * NUM_FILES)
            ]
            for client in idle[-8:]:
                with suppress(ConnectionResetError):
                    assert client.recv(1) == b""  # closed, as so many are open
            for client in idle:
                client.close()
            assert httpx.get(health, timeout=20).status_code == 200
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=30)
    assert "out of system resource" not in errors
    assert "connections at most" in errors
