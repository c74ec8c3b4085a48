"""Hundreds of streams at once, a third of whose clients leave: nothing fails and nothing stays."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from radixcache.lease import Lease
from runtime.async_engine import RequestStream
from runtime.loading import Runtime
from runtime.sequence import Sequence
from runtime.server.disconnect import EventStream
from runtime.server.generation import NewsStream
from runtime.server.journal import Journal
from tests.support.crowd import LEAVINGS, Ask, Crowd
from tests.support.served import HashExecutor, quick_runtime, serving, wait_until_idle
from tests.support.workloads import sentences

NUM_CLIENTS, WAVE = 256, 350
OF_A_REQUEST = (EventStream, Journal, Lease, NewsStream, RequestStream, Sequence)


@pytest.fixture
def runtime() -> Runtime:
    """Its pool holds a part of what runs at once, so that blocks are evicted and work preempted."""
    return quick_runtime(num_blocks=512, max_running=NUM_CLIENTS, max_waiting=NUM_CLIENTS)


def asks(count: int, *, seed: int) -> Iterator[Ask]:
    """Few-shot prompts, conversations of two turns, and the same in Anthropic's words."""
    examples = sentences(12, seed=3)
    for i in range(count):
        text = sentences(1 + i % 4, seed=1000 * seed + i)
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4 + i % 13}
        if i % 3 == 0:
            body = {"prompt": f"{examples}\n{text}", "max_tokens": 4 + i % 13, "ignore_eos": True}
            yield Ask(path="/v1/completions", body=body)
        elif i % 3 == 1:
            yield Ask(path="/v1/chat/completions", body=chat, follow_up="Why?")
        else:
            yield Ask(path="/v1/messages", body=chat | {"model": "smollm2-135m-instruct"})


def alive() -> Counter[type]:
    """Objects that belong to one request and are still there."""
    gc.collect()
    kinds = map(type, gc.get_objects())  # not isinstance, which asks some of torch's and warns
    return Counter(kind for kind in kinds if kind in OF_A_REQUEST)


def test_a_crowd_that_comes_and_goes_gets_its_answers_and_leaves_nothing_behind(
    runtime: Runtime,
) -> None:
    executor = runtime.executor
    assert isinstance(executor, HashExecutor)
    executor.step_s = 0.01  # so that some leave while their request waits or runs
    before = alive()
    outcomes: Counter[str] = Counter()
    with serving(runtime) as url:
        port = int(url.rpartition(":")[2])
        for wave in range(3):
            crowd = Crowd(port, num_clients=NUM_CLIENTS, patience_s=0.5, seed=wave)
            asyncio.run(crowd.run(asks(WAVE, seed=wave)))
            outcomes += crowd.outcomes
            wait_until_idle(runtime)
            assert alive() == before
    stats = runtime.engine.stats()
    assert set(outcomes) <= {"whole", *(f"left: {where}" for where in LEAVINGS)}
    assert sum(outcomes.values()) >= 3 * WAVE
    assert sum(outcomes[f"left: {where}"] for where in LEAVINGS) > 0.2 * 3 * WAVE
    assert stats.finished["abort"] > 0
    assert stats.cache.evicted_blocks > 0
    assert stats.cached_tokens > 0


def test_a_client_that_left_is_not_written_to_again_and_again(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(runtime) as url:
        crowd = Crowd(int(url.rpartition(":")[2]), num_clients=64, leave_share=0.9)
        asyncio.run(crowd.run(asks(300, seed=9)))
        wait_until_idle(runtime)
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
