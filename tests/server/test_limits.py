"""Limits: whoever asks for too much, or lets the server wait, is told so or cut off."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest, ServerBusy
from runtime.loading import Runtime
from runtime.server import limits
from runtime.server.config import ServerConfig
from runtime.server.limits import WaitingRoom, check_parts, has_more, is_deeper
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import JSON, HashExecutor, quick_runtime, serving, wait_until_idle

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LONG_STREAM = json.dumps(HELLO | {"max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SOON = ServerConfig(
    header_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=1, write_timeout_s=0.3, drain_s=5
)


@pytest.fixture
def url(runtime: Runtime) -> Iterator[str]:
    with serving(runtime, settings=SOON, send_buffer=4096) as url:
        yield url


def connected(url: str, sent: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    """A connection that has sent something; reading from it gives up after ten seconds."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(10)
    client.connect((host, int(port)))
    client.sendall(sent)
    return client


def read_all(client: socket.socket) -> bytes:
    """What arrives until the server closes; fails where it does not close."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    client.close()
    return b"".join(parts)


def read_until(client: socket.socket, end: bytes) -> None:
    """Read an answer to its end."""
    answer = b""
    while end not in answer:
        part = client.recv(65536)
        assert part, answer
        answer += part


def drip(client: socket.socket, piece: bytes) -> int:
    """Send a piece 500 times, slowly; return how many went before the server had enough."""
    with client:
        for sent in range(500):
            try:
                client.sendall(piece)
            except OSError:
                return sent
            time.sleep(0.02)
    return 500


def posted(path: str, body: bytes, *, length: int | None = None, more: bytes = b"") -> bytes:
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {size}\r\n"
    return head.encode() + more + b"\r\n" + body


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for what is sure to come; fail after half a minute."""
    for _ in range(3000):
        if happened():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


def serves(url: str) -> bool:
    return httpx.post(url + CHAT, json=HELLO, timeout=30).status_code == 200


# ------------------------------------------------------------------------------ connections


@pytest.mark.parametrize("sent", [b"", b"GET /heal", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_client_that_never_ends_its_headers_is_cut_off(url: str, sent: bytes) -> None:
    assert read_all(connected(url, sent)) == b""
    assert serves(url)


def test_dripping_headers_does_not_lengthen_their_time(url: str) -> None:
    client = connected(url, b"GET /health HTTP/1.1\r\n")
    assert drip(client, b"X-A: b\r\n") < 500
    assert serves(url)


def test_the_headers_of_a_second_request_have_their_time_too(url: str) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = read_all(connected(url, whole + b"GET /hea"))
    assert answer.count(b"HTTP/1.1 200") == 1
    client = connected(url, whole)
    read_until(client, b'"ok"}')
    client.sendall(b"GET /hea")
    assert read_all(client) == b""


def test_an_idle_connection_is_closed(url: str) -> None:
    answer = read_all(connected(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert answer.endswith(b'{"status":"ok"}')


def test_an_answer_that_takes_long_is_not_cut_off(runtime: Runtime, url: str) -> None:
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.02
    body = HELLO | {
        "max_tokens": 60,
        "ignore_eos": True,
    }  # over a second, without a byte either way
    answer = httpx.post(url + CHAT, json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 60


def test_headers_that_are_too_large_are_refused(runtime: Runtime) -> None:
    with serving(runtime, settings=ServerConfig(max_header_bytes=2048)) as url:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 9000
        assert b"400 Bad Request" in read_all(connected(url, head))
        for size, status in ((1000, 200), (2048, 431)):  # these come whole, and so at once
            assert httpx.get(url + "/health", headers={"X-A": "a" * size}).status_code == status
            assert httpx.get(f"{url}/health?{'a' * size}").status_code == status


def test_connections_beyond_the_limit_are_answered_503_or_closed(runtime: Runtime) -> None:
    settings = ServerConfig(max_connections=3)
    with serving(runtime, settings=settings) as url, ExitStack() as stack:
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(3):
            client = stack.enter_context(connected(url, whole))
            assert b"200 OK" in client.recv(65536)
        assert b"503 Service Unavailable" in stack.enter_context(connected(url, whole)).recv(65536)
        idle = [stack.enter_context(connected(url)) for _ in range(6)]
        assert read_all(idle[-1]) == b""
    with serving(runtime, settings=settings) as url:
        assert serves(url)


# ------------------------------------------------------------------------------ bodies


def test_a_body_that_never_ends_is_answered_408_and_closed(runtime: Runtime, url: str) -> None:
    answer = read_all(connected(url, posted(CHAT, b'{"messages": [', length=1000)))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()
    assert b'"code":"body_too_slow"' in answer
    assert serves(url)
    wait_until_idle(runtime)


def test_a_body_dripped_after_its_answer_is_not_read_for_ever(url: str) -> None:
    client = connected(url, posted("/nowhere", b"{", length=10_000))
    read_until(client, b"Not Found")
    assert drip(client, b" ") < 500


def test_a_body_over_the_limit_is_refused(runtime: Runtime) -> None:
    with serving(runtime, settings=ServerConfig(max_body_bytes=1000)) as url:
        body = HELLO | {"user": "x" * 1000}
        answer = httpx.post(url + CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert serves(url)


def nested(depth: int) -> dict[str, Any]:
    schema: Any = {"type": "object"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b'{"messages":' + b"[" * 70])
def test_deep_nesting_is_refused_before_anybody_walks_it(url: str, text: bytes) -> None:
    answer = httpx.post(url + CHAT, content=text, headers=JSON, timeout=30)
    assert answer.status_code == 400
    assert "deeper than 64" in answer.json()["error"]["message"]
    assert serves(url)


trees = st.recursive(
    st.integers() | st.text('[]{}"\\ab') | st.none(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[{'), inner, max_size=3)
    ),
    max_leaves=30,
)


def depth_of(tree: Any) -> int:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return 1 + max(map(depth_of, tree), default=0) if isinstance(tree, list) else 0


@given(trees, st.integers(0, 6))
def test_depth_is_what_a_walk_would_find(tree: Any, limit: int) -> None:
    assert is_deeper(json.dumps(tree).encode(), limit) == (depth_of(tree) > limit)


@given(trees, st.integers(0, 6), st.integers(1, 7))
def test_depth_does_not_depend_on_how_a_text_is_cut(tree: Any, limit: int, piece: int) -> None:
    text = json.dumps(tree).encode()
    with mock.patch.object(limits, "_PIECE", piece):
        assert is_deeper(text, limit) == (depth_of(tree) > limit)


def parts_of(tree: Any) -> int:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return 1 + sum(map(parts_of, tree)) if isinstance(tree, list) else 0


@given(trees, st.integers(0, 9), st.integers(1, 7))
def test_arrays_and_objects_are_counted_as_a_walk_would(tree: Any, most: int, piece: int) -> None:
    text = json.dumps(tree).encode()
    with mock.patch.object(limits, "_PIECE", piece):
        assert has_more(text, most) == (parts_of(tree) > most)


@given(st.binary(max_size=60), st.integers(0, 4))
def test_depth_of_anything_can_be_asked_for(text: bytes, limit: int) -> None:
    assert is_deeper(text, limit) in (True, False)


class Parts(msgspec.Struct):
    messages: list[int]
    tools: list[int] | None = None


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_parts_are_counted(name: str) -> None:
    config = ServerConfig(max_messages=3, max_tools=3)
    check_parts(Parts(messages=[1, 2, 3], tools=[1, 2, 3]), config)
    with pytest.raises(InvalidRequest, match=f"{name} has 4 entries.*at most 3") as caught:
        check_parts(Parts(**({"messages": []} | {name: [1] * 4})), config)
    assert caught.value.param == name


def test_more_messages_than_the_limit_are_refused(runtime: Runtime) -> None:
    with serving(runtime, settings=ServerConfig(max_messages=2)) as url:
        answer = httpx.post(url + CHAT, json={"messages": HELLO["messages"] * 3})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_hundred_thousand_stops_are_refused(url: str) -> None:
    answer = httpx.post(url + CHAT, json=HELLO | {"stop": ["x"] * 100_000}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")


# ------------------------------------------------------------------------------ slow readers


def test_a_client_that_does_not_read_ends_its_request(runtime: Runtime, url: str) -> None:
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.004  # so that its buffers are full long before its answer ends
    client = connected(url, posted(CHAT, LONG_STREAM), receive_buffer=4096)
    wait_until(lambda: bool(runtime.engine.stats().finished))
    assert runtime.engine.stats().finished == {"abort": 1}
    answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in answer
    assert serves(url)
    wait_until_idle(runtime)


def test_a_client_for_which_too_much_waits_is_cut_off_though_it_reads(runtime: Runtime) -> None:
    settings = ServerConfig(max_backlog=50)
    with serving(runtime, settings=settings, send_buffer=4096) as url:
        client = connected(url, posted(CHAT, LONG_STREAM), receive_buffer=4096)
        wait_until(lambda: bool(runtime.engine.stats().finished))
        assert b"[DONE]" not in read_all(client)
        assert serves(url)
        wait_until_idle(runtime)


def test_a_client_that_reads_slowly_gets_all_of_it(runtime: Runtime, url: str) -> None:
    body = HELLO | {"max_tokens": 300, "ignore_eos": True, "stream": True}
    sent = posted(CHAT, json.dumps(body).encode(), more=b"Connection: close\r\n")
    client = connected(url, sent, receive_buffer=4096)
    parts = []
    while part := client.recv(2048):
        parts.append(part)
        time.sleep(0.002)
    client.close()
    assert b"[DONE]" in b"".join(parts)
    wait_until_idle(runtime)


def test_streams_asked_for_together_and_never_read_are_all_ended(
    runtime: Runtime, url: str
) -> None:
    sent = posted(CHAT, LONG_STREAM)
    clients = [connected(url, sent * 3, receive_buffer=4096) for _ in range(12)]
    wait_until(lambda: sum(runtime.engine.stats().finished.values()) >= 12)
    for client in clients:
        read_all(client)
    wait_until_idle(runtime)
    assert serves(url)


# ------------------------------------------------------------------------------ the queue


def test_a_tenant_cannot_fill_the_queue_of_all() -> None:
    room = WaitingRoom()
    room.enter("a", 2, limit=3)
    with pytest.raises(ServerBusy, match="2 requests of this tenant"):
        room.enter("a", 2, limit=3)
    room.enter("b", 2, limit=3)
    room.enter("c", 100, limit=None)
    room.leave("a", 2)
    room.enter("a", 3, limit=3)
    assert [room.num_waiting(name) for name in "abcd"] == [3, 2, 100, 0]


def two_tenants() -> Tenants:
    return Tenants(
        {
            "small": Tenant(keys=("sk-small-123",), max_waiting=2),
            "large": Tenant(keys=("sk-large-123",)),
        },
        secret=b"0123456789abcdef",
    )


SMALL, LARGE = ({"x-api-key": f"sk-{name}-123"} for name in ("small", "large"))
TWO = {"prompt": ["a", "b"], "max_tokens": 2}


def test_a_tenants_own_limit_is_429_for_it_and_nothing_for_others() -> None:
    runtime = quick_runtime(max_running=1)
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.005
    with (
        serving(runtime, tenants=two_tenants()) as url,
        httpx.Client(base_url=url, timeout=30) as http,
        ThreadPoolExecutor(2) as threads,
    ):
        long = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=long, headers=LARGE) as answer:
            lines = answer.iter_lines()
            next(lines)  # it runs, and nothing runs beside it
            waits = [threads.submit(http.post, COMPLETIONS, json=TWO, headers=SMALL)]
            wait_until(lambda: runtime.engine.stats().waiting == 2)
            refused = http.post(COMPLETIONS, json=TWO, headers=SMALL)
            waits.append(threads.submit(http.post, COMPLETIONS, json=TWO, headers=LARGE))
            wait_until(lambda: runtime.engine.stats().waiting == 4)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_busy"
        assert [wait.result().status_code for wait in waits] == [200, 200]


def test_what_was_counted_as_waiting_is_counted_out_again(runtime: Runtime) -> None:
    with (
        serving(runtime, tenants=two_tenants()) as url,
        httpx.Client(base_url=url, timeout=30, headers=SMALL) as http,
    ):
        for body, status in ((TWO, 200), (TWO | {"prompt": [[10**9], [1]]}, 400)):
            for _ in range(4):
                assert http.post(COMPLETIONS, json=body).status_code == status
        more = http.post(COMPLETIONS, json=TWO | {"prompt": ["a", "b", "c"]})
        assert (more.status_code, more.json()["error"]["param"]) == (400, "prompt")
        assert http.post(COMPLETIONS, json=TWO).status_code == 200
