"""KV events over ZeroMQ: a subscriber holds exactly what the tree holds, and holds up nobody."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from radixcache import CacheConfig, EventRecorder, PrefixKey, RadixCache
from runtime.cli.server_options import add_server_flags, kv_events_of
from runtime.errors import InvalidSetting, PortTaken
from tests.support.indexer import Indexer, Ledger, expected_blocks
from tests.support.served import HashExecutor, quick_runtime, serving, wait_until_idle

zmq = pytest.importorskip("zmq", reason="pyzmq is absent: pip install 'radixcache[events]'")
kv_events = pytest.importorskip("runtime.kv_events", reason="pyzmq is absent")

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_MS = 20_000
END = kv_events.END_OF_REPLAY


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return parser.parse_args(arguments)


@contextmanager
def publishing(**settings: Any) -> Iterator[Any]:
    """A publisher on free ports."""
    publisher = kv_events.KVEventPublisher(
        EventRecorder(as_arrays=settings.pop("as_arrays", False)),
        **{"endpoint": ANY_PORT, "replay_endpoint": ANY_PORT} | settings,
    )
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def connected(kind: int, endpoint: str | None, **options: int) -> Iterator[Any]:
    """A reader's socket; what it waits for must come in time."""
    with zmq.Context() as context, context.socket(kind) as reader:
        reader.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        reader.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            reader.setsockopt(getattr(zmq, name), value)
        if kind == zmq.SUB:
            reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(endpoint)
        yield reader


@contextmanager
def subscribed(publisher: Any) -> Iterator[Any]:
    """A subscriber that the publisher knows of already, as a first message shows."""
    with connected(zmq.SUB, publisher.endpoint) as reader:
        while not reader.poll(50):  # a subscription takes a moment to arrive
            publisher.recorder.cleared()
            publisher.turned()
        yield reader


def replayed(publisher: Any, first: int) -> list[tuple[int, bytes]]:
    """What a publisher answers a reader that missed the messages from a number on."""
    with connected(zmq.DEALER, publisher.replay_endpoint, RCVHWM=0) as reader:
        reader.send_multipart([b"", first.to_bytes(8, "big")])
        messages = []
        while True:
            empty, _, number, message = reader.recv_multipart()
            assert empty == b""
            if number == END:
                assert message == b""
                return messages
            messages.append((int.from_bytes(number, "big"), message))


def drop_some(publisher: Any, num: int) -> None:
    """Hand over so many messages."""
    for _ in range(num):
        publisher.recorder.cleared()
        publisher.turned()


def body(text: str, num: int = 3) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": num, "ignore_eos": True}


@pytest.mark.parametrize("as_arrays", [False, True])
def test_a_subscriber_of_a_busy_server_holds_exactly_the_tree(as_arrays: bool) -> None:
    ledger, index = Ledger(16), Indexer()
    with publishing(as_arrays=as_arrays) as publisher, subscribed(publisher) as reader:
        runtime = quick_runtime(num_blocks=24, observers=[ledger, publisher.recorder])
        with serving(runtime, outlets=[publisher]) as url, httpx.Client(base_url=url) as http:
            for number in range(12):  # more than the pool holds, so some are evicted
                text = f"Request {number % 5}. " * (12 + number)
                assert http.post("/v1/completions", json=body(text)).status_code == 200
            wait_until_idle(runtime)
            assert runtime.engine.stats().cache.evicted_blocks
            expected = expected_blocks(ledger.announced, 16)
            assert expected
            numbers = []
            while index.blocks != expected:
                topic, number, message = reader.recv_multipart()
                assert topic == b""
                numbers.append(int.from_bytes(number, "big"))
                index.apply(message)
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert http.post("/reset_prefix_cache").status_code == 200
            while index.blocks:
                index.apply(reader.recv_multipart()[2])


def test_the_end_of_the_server_takes_every_block_back() -> None:
    index = Indexer()
    with publishing() as publisher, subscribed(publisher) as reader:
        runtime = quick_runtime(observers=[publisher.recorder])
        with serving(runtime, outlets=[publisher]) as url:
            httpx.post(url + "/v1/completions", json=body("Hello there. " * 20))
        while index.num_events < 3 or index.blocks:
            index.apply(reader.recv_multipart()[2])


def test_an_engine_that_breaks_down_takes_every_block_back() -> None:
    index = Indexer()
    with publishing() as publisher, subscribed(publisher) as reader:
        runtime = quick_runtime(observers=[publisher.recorder])
        assert isinstance(runtime.executor, HashExecutor)
        with serving(runtime, outlets=[publisher]) as url:
            httpx.post(url + "/v1/completions", json=body("Hello there. " * 20))
            while not index.blocks:
                index.apply(reader.recv_multipart()[2])
            runtime.executor.fail_next = SystemExit("the device is gone")
            answer = httpx.post(url + "/v1/completions", json=body("Good bye"))
            assert answer.status_code in (500, 503)  # by how soon the server knows
            while index.blocks:
                index.apply(reader.recv_multipart()[2])
            # What the broken engine left behind is nobody's.
            for request in list(runtime.engine._live):
                runtime.engine.abort(request)


def test_who_came_late_asks_for_what_was_missed() -> None:
    with publishing(topic="kv@a", clock=lambda: 7.5) as publisher:
        cache = RadixCache(CacheConfig(num_blocks=8, block_size=2), observers=[publisher.recorder])
        for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]):
            lease = cache.acquire(PrefixKey.of(tokens))
            cache.commit(lease, 4)
            cache.release(lease)
            publisher.turned()
        publisher.turned()  # nothing happened: no message
        index = Indexer()
        while len(missed := replayed(publisher, 0)) < 2:
            pass
        for _, message in missed:
            index.apply(message)
        assert [number for number, _ in missed] == [0, 1]
        assert len(index.blocks) == 3
        assert msgspec.msgpack.decode(missed[0][1])[0] == 7.5
        assert replayed(publisher, 1) == missed[1:]
        assert replayed(publisher, 2) == []


def test_the_last_messages_are_kept_and_no_more() -> None:
    with publishing(buffer=4) as publisher:
        drop_some(publisher, 10)
        while not (kept := replayed(publisher, 0)) or kept[-1][0] < 9:
            pass
        assert [number for number, _ in kept] == [6, 7, 8, 9]


def test_a_subscriber_that_never_reads_holds_up_neither_the_engine_nor_another() -> None:
    with (
        publishing(buffer=4) as publisher,
        connected(zmq.SUB, publisher.endpoint, RCVHWM=1, RCVBUF=1024) as asleep,
    ):
        while not asleep.poll(50):
            drop_some(publisher, 1)
        runtime = quick_runtime(num_blocks=24, observers=[publisher.recorder])
        with serving(runtime, outlets=[publisher]) as url, httpx.Client(base_url=url) as http:
            for number in range(20):
                text = f"Request {number}. " * 40
                assert http.post("/v1/completions", json=body(text)).status_code == 200
            drop_some(publisher, 5000)
            while len(replayed(publisher, 0)) < 4:
                pass


@pytest.mark.parametrize("asked", [[b""], [b"", b"1"], [b"", b"x" * 8, b""], [b"x" * 100]])
def test_a_request_for_replay_that_makes_no_sense_harms_nobody(
    asked: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with publishing() as publisher:
        drop_some(publisher, 1)
        with connected(zmq.DEALER, publisher.replay_endpoint) as reader:
            reader.send_multipart(asked)
            while not replayed(publisher, 0):
                pass
            reader.send_multipart([b"", bytes(8)])
            assert int.from_bytes(reader.recv_multipart()[2], "big") == 0


def test_what_can_not_be_written_ends_the_events_and_not_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with publishing() as publisher:
        publisher._hand_over([object()])
        publisher._thread.join()
        drop_some(publisher, 3)
        assert publisher._handed.empty()
        assert not publisher.recorder.num_pending
    assert "KV events are not sent any more" in caplog.text


def test_an_endpoint_that_is_taken_or_none_is_refused_by_name() -> None:
    with publishing() as publisher:
        with pytest.raises(PortTaken, match="choose another"):
            kv_events_of(parsed("--kv-events-endpoint", publisher.endpoint))
        arguments = ("--kv-events-endpoint", ANY_PORT)
        with pytest.raises(PortTaken, match="choose another"):
            kv_events_of(
                parsed(*arguments, "--kv-events-replay-endpoint", publisher.replay_endpoint)
            )
    for wrong in ("127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:99999"):
        with pytest.raises(InvalidSetting, match=r"KV events can't be sent"):
            kv_events_of(parsed("--kv-events-endpoint", wrong))


def test_flags_make_a_publisher_and_none_make_none() -> None:
    assert kv_events_of(parsed()) is None
    with pytest.raises(InvalidSetting, match="--kv-events-endpoint"):
        kv_events_of(parsed("--kv-events-replay-endpoint", ANY_PORT))
    with pytest.raises(InvalidSetting, match="at least 1"):
        kv_events_of(parsed("--kv-events-endpoint", ANY_PORT, "--kv-events-buffer", "0"))
    publisher = kv_events_of(parsed("--kv-events-endpoint", ANY_PORT, "--kv-events-arrays"))
    assert publisher is not None
    assert publisher.recorder.as_arrays
    assert publisher.endpoint.startswith("tcp://127.0.0.1:")
    assert publisher.replay_endpoint is None
    publisher.close()


def test_the_command_tells_where_it_publishes_and_ends_with_a_clear() -> None:
    flags = ["--kv-events-endpoint", ANY_PORT, "--kv-events-replay-endpoint", ANY_PORT]
    serve = ["-m", "runtime.cli.main", "serve", "--port", "0", "--json", "--num-blocks", "32"]
    index = Indexer()
    with subprocess.Popen([sys.executable, *serve, *flags], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            with connected(zmq.SUB, ready["kv_events"]) as reader:
                retries = httpx.HTTPTransport(retries=5)
                with httpx.Client(transport=retries, timeout=60) as http:
                    asked = body("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,")
                    assert http.post(ready["url"] + "/v1/completions", json=asked).is_success
                with connected(zmq.DEALER, ready["kv_events_replay"]) as late:
                    late.send_multipart([b"", bytes(8)])
                    index.apply(late.recv_multipart()[3])
                assert index.blocks
                server.send_signal(signal.SIGTERM)
                last: list[Any] = []
                while not last or last[-1]["type"] != "AllBlocksCleared":
                    last = reader_events(reader)
        finally:
            server.kill()


def reader_events(reader: Any) -> list[Any]:
    """The events of the next message."""
    _, events, _ = msgspec.msgpack.decode(reader.recv_multipart()[2])
    return list(events)
