"""From prompts to news: what is left behind is aborted, in whatever state it was left."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import httpx
import pytest

from runtime.async_engine import AsyncEngine
from runtime.errors import InvalidRequest
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.request import SamplingParams
from runtime.server.config import ServerConfig
from runtime.server.context import Caller, Served
from runtime.server.generation import Ask, News, generate
from runtime.server.journal import Journal
from tests.support.served import (
    HashExecutor,
    assert_nothing_held,
    quick_runtime,
    serving,
    wait_until_idle,
)

LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture
def runtime() -> Runtime:
    runtime = quick_runtime()
    assert isinstance(runtime.executor, HashExecutor)
    runtime.executor.step_s = 0.005
    return runtime


def run(runtime: Runtime, use: Callable[[Served], Awaitable[None]]) -> Served:
    """Run something on an event loop beside the engine's thread; nothing may be held after it."""
    engine = AsyncEngine(runtime.engine)
    served = Served(
        runtime=runtime,
        engine=engine,
        metrics=ServerMetrics(lambda: engine.latest_stats),
        config=ServerConfig(),
        clock=time.monotonic,
        created=0,
    )
    engine.start()

    async def used() -> None:
        await use(served)

    try:
        asyncio.run(used())
        wait_until_idle(runtime)
    finally:
        engine.stop(drain_s=1)
    assert_nothing_held(runtime)
    assert served.waiting.num_waiting("t") == 0
    return served


def ask(sampling: SamplingParams = LONG, *, count: int = 1, journal: Journal | None = None) -> Ask:
    return Ask(
        name="a",
        prompts=[list(range(100 * i + 1, 100 * i + 50)) for i in range(count)],
        sampling=sampling,
        caller=Caller(tenant="t", max_waiting=8, journal=journal),
    )


async def events(news: AsyncGenerator[News, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(news):
        async for piece in news:
            yield piece.output.text.encode()


def test_news_that_were_never_asked_for_are_aborted_once_forgotten(runtime: Runtime) -> None:
    async def use(served: Served) -> None:
        answer = events(await generate(served, ask(count=3)))
        await answer.aclose()  # it never began, so it closes nothing
        del answer
        gc.collect()

    run(runtime, use)
    assert runtime.engine.stats().finished == {"abort": 3}


def test_news_that_are_closed_halfway_are_aborted_and_noted(runtime: Runtime) -> None:
    journal = Journal("x", began=time.monotonic())

    async def use(served: Served) -> None:
        news = await generate(served, ask(count=2, journal=journal))
        async with aclosing(news):
            async for piece in news:
                if piece.output.usage.completion_tokens == 3:
                    break

    run(runtime, use)
    assert runtime.engine.stats().finished == {"abort": 2}
    assert journal.finish_reasons == ["abort", "abort"]
    assert journal.prompt_tokens == 98
    assert 3 <= journal.output_tokens <= 6


def test_an_error_thrown_into_the_news_closes_them(runtime: Runtime) -> None:
    async def use(served: Served) -> None:
        news = await generate(served, ask())
        assert (await anext(news)).place == 0
        with pytest.raises(ZeroDivisionError):
            await news.athrow(ZeroDivisionError())

    run(runtime, use)
    assert runtime.engine.stats().finished == {"abort": 1}


def test_places_count_prompts_and_branches(runtime: Runtime) -> None:
    seen: dict[int, int] = {}

    async def use(served: Served) -> None:
        three = SamplingParams(max_tokens=2, n=3, temperature=1, seed=1, ignore_eos=True)
        async with aclosing(await generate(served, ask(three, count=2))) as news:
            async for piece in news:
                tokens = len(piece.output.token_ids)
                seen[piece.place] = seen.get(piece.place, 0) + tokens

    served = run(runtime, use)
    assert seen == dict.fromkeys(range(6), 2)
    assert served.metrics.request_output_tokens.total == 12
    assert served.metrics.request_prompt_tokens.total == 98  # once a prompt, not once a branch


def test_a_request_that_is_refused_does_not_count_as_waiting(runtime: Runtime) -> None:
    async def use(served: Served) -> None:
        for _ in range(9):  # one more than may wait
            with pytest.raises(InvalidRequest, match="prompt"):
                await generate(
                    served,
                    Ask(
                        name="a",
                        prompts=[[]],
                        sampling=LONG,
                        caller=Caller(tenant="t", max_waiting=8),
                    ),
                )

    run(runtime, use)


def test_a_deadline_that_passed_is_504_or_an_event(runtime: Runtime) -> None:
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "timeout_s": 0.2}
    with serving(runtime) as url:
        answer = httpx.post(url + "/v1/completions", json=body, timeout=30)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        answer = httpx.post(url + "/v1/completions", json=body | {"stream": True}, timeout=30)
        *pieces, last, done = answer.text.strip().split("\n\n")
        assert len(pieces) > 2
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert done == "data: [DONE]"
        wait_until_idle(runtime)
        metrics = httpx.get(url + "/metrics").text
        assert 'radixcache_requests_finished_total{reason="timeout"} 2.0' in metrics


def test_metrics_are_shown_of_an_engine_that_broke(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug of ours")

    with serving(runtime) as url:
        monkeypatch.setattr(runtime.engine, "step", fail)
        body = {"prompt": "x", "max_tokens": 2}
        assert httpx.post(url + "/v1/completions", json=body, timeout=30).status_code == 500
        monkeypatch.undo()
        assert httpx.get(url + "/health").status_code == 503
        assert "radixcache_steps_total" in httpx.get(url + "/metrics").text
        for request_id in list(runtime.engine._live):
            runtime.engine.abort(request_id)
