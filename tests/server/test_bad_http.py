"""Bytes that are hardly HTTP, and headers that nobody means well by: no 500, and it goes on."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from runtime.server.connection import MAX_PIECES
from runtime.server.tenants import Tenant, Tenants
from tests.support.served import JSON, quick_runtime, serving, wait_until_idle

KEY = "sk-of-the-test"
MAX_BODY = 1 << 16
BODY = b'{"prompt": "x", "max_tokens": 1}'
PIECES = [
    b"POST /v1/completions HTTP/1.1\r\n",
    b"GET /v1/models HTTP/1.1\r\n",
    b"GET /%ff%00%0a HTTP/1.1\r\n",
    b"BREW /metrics HTTP/9.9\r\n",
    b"Host: x\r\n",
    b"Content-Type: application/json\r\n",
    b"x-api-key: " + KEY.encode() + b"\r\n",
    b"x-api-key: \xff\xfe\r\n",
    b"Authorization: Bearer \x80\r\n",
    b"X-Request-Id: a\x0b\x0cb\r\n",
    b"X-Request-Id: \xe2\x80\xa8\r\n",
    b"traceparent: 00-" + b"f" * 500 + b"\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b" folded\r\n",
    b"NoColon\r\n",
    b": empty\r\n",
    b"\r\n",
    b"zz\r\n",
    b"5\r\nhello\r\n0\r\n\r\n",
    BODY,
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"\x00" * 20,
]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return quick_runtime()


@pytest.fixture(scope="module")
def url(runtime: Runtime) -> Iterator[str]:
    settings = ServerConfig(
        header_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=1, max_body_bytes=MAX_BODY
    )
    tenants = Tenants({"a": Tenant(keys=(KEY,))}, secret=b"0123456789abcdef")
    with serving(runtime, settings=settings, tenants=tenants) as url:
        yield url


def answer_to(url: str, sent: bytes, *, then_ends: bool = False) -> bytes:
    """All that comes back until the server closes, which it does in any case.

    then_ends  whether the client ends its side, which the server takes for going away
    """
    host, port = url.removeprefix("http://").split(":")
    parts = []
    with socket.create_connection((host, int(port)), timeout=20) as client:
        try:
            client.sendall(sent)
            if then_ends:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                parts.append(part)
        except (ConnectionResetError, BrokenPipeError):
            pass
    return b"".join(parts)


@pytest.mark.parametrize("seed", range(8))
def test_shuffled_pieces_of_http_break_nothing(runtime: Runtime, url: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        pieces = rng.choices(PIECES, k=rng.randint(1, 8))
        if rng.random() < 0.5:
            pieces.insert(0, PIECES[rng.randrange(2)])
        answer = answer_to(url, b"".join(pieces), then_ends=True)
        assert not re.search(rb"HTTP/1\.1 5\d\d", answer), pieces
    good = httpx.post(url + "/v1/completions", content=BODY, headers=JSON | {"x-api-key": KEY})
    assert good.status_code == 200
    wait_until_idle(runtime)


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "x-request-id", "traceparent"])
def test_headers_may_hold_any_byte_that_http_lets_through(url: str, name: str) -> None:
    for byte in [9, *range(32, 127), *range(128, 256)]:
        header = name.encode() + b": a" + bytes([byte]) + b"b\r\n"
        key = b"" if "x-api-key" in name else b"x-api-key: " + KEY.encode() + b"\r\n"
        sent = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + key
        answer = answer_to(url, sent + b"\r\n")
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 401")), byte
        (told,) = re.findall(rb"(?im)^x-request-id: (.*)\r$", answer)
        assert re.fullmatch(rb"[!-~]{1,128}", told)


ANONYMOUS = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
ASKED = ANONYMOUS + b"content-type: application/json\r\nx-api-key: " + KEY.encode() + b"\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def statuses(answer: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", answer)


@pytest.mark.parametrize("length", [0, 5, len(NEXT)])
def test_a_request_with_two_lengths_is_refused_and_nothing_behind_it_is_read(
    url: str, length: int
) -> None:
    head = ASKED + f"Content-Length: {length}\r\n".encode() + CHUNKED
    assert statuses(answer_to(url, head + b"0\r\n\r\n" + NEXT)) == [b"400"]


@pytest.mark.parametrize("head", [ASKED, ANONYMOUS])
def test_a_body_in_crumbs_is_refused_before_it_takes_long(
    url: str, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    whole = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    crumbs = b"1\r\n \r\n"
    assert b"500" not in statuses(answer_to(url, head + CHUNKED + crumbs * 300_000 + whole))
    if head == ASKED:
        few = answer_to(url, head + CHUNKED + crumbs * (MAX_PIECES - 1) + whole + NEXT)
        assert statuses(few) == [b"200", b"200"]
        assert statuses(answer_to(url, head + CHUNKED + crumbs * MAX_PIECES + whole))[:1] != [
            b"200"
        ]
    assert not [line for line in caplog.records if line.levelname == "ERROR"]


def test_what_follows_an_answer_is_read_while_it_is_short_and_dropped_beyond(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for size, is_read in ((MAX_BODY, True), (4 * MAX_BODY, False)):
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(ANONYMOUS + f"Content-Length: {size}\r\n\r\n".encode())
            answer = b""
            while b"invalid_api_key" not in answer:  # told before the body is there
                answer += client.recv(65536)
            client.sendall(b" " * size + (b"" if is_read else NEXT))
            if is_read:
                client.sendall(NEXT)
            answer = b""
            with suppress(ConnectionResetError):
                while part := client.recv(65536):
                    answer += part
        assert statuses(answer) == [b"200"] * is_read


def test_a_client_whose_body_was_too_long_is_answered_and_asks_again_at_once(
    runtime: Runtime,
) -> None:
    limits = ServerConfig(max_body_bytes=MAX_BODY, header_timeout_s=60, idle_timeout_s=60)
    with serving(runtime, settings=limits) as url, httpx.Client(base_url=url, timeout=20) as client:
        for _ in range(3):
            long = client.post("/v1/completions", content=b" " * (64 * MAX_BODY), headers=JSON)
            assert long.json()["error"]["code"] == "body_too_large"
            good = client.post("/v1/completions", content=BODY, headers=JSON)
            assert good.status_code == 200


def test_a_bad_chunk_behind_an_answer_closes_the_connection_and_is_no_fault_of_ours(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(ANONYMOUS + CHUNKED)
        answer = b""
        while b"invalid_api_key" not in answer:
            answer += client.recv(65536)
        client.sendall(b"-5\r\nhello\r\n")
        assert client.recv(65536) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
