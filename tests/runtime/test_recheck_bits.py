"""A flipped bit in real K/V is found by a recheck; on the engine's thread it waits for nobody."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

import pytest
import torch

from radixcache import Namespace, PrefixKey
from radixcache.tokens import pack_tokens
from runtime.async_engine import AsyncEngine
from runtime.executor.executor import ModelExecutor
from runtime.models.llama import LlamaModel
from runtime.recheck import Recheck
from runtime.request import Request, SamplingParams
from tests.support.invisibility import CPU, Alone, WatchedEngine
from tests.support.tiny_models import random_weights, tiny_config

PROMPT = [(7 * i * i + 3 * i) % 61 for i in range(90)]
DRAWN = SamplingParams(max_tokens=20, temperature=0.9, seed=3, n=2, frequency_penalty=0.5)


@functools.cache
def alone(dtype: torch.dtype) -> Alone:
    config = tiny_config(num_layers=3)
    return Alone(LlamaModel(config, random_weights(config).items(), dtype=dtype, device=CPU), dtype)


def rechecked(dtype: torch.dtype, block_size: int = 16) -> tuple[WatchedEngine, Recheck]:
    """An engine over a tiny model with one request behind it, and its recheck."""
    watched = WatchedEngine(alone(dtype), num_blocks=640 // block_size, block_size=block_size)
    model = watched.alone.model
    recheck = Recheck(watched.engine, ModelExecutor(model, watched.executor.store), every=1)
    watched.submit("a", PROMPT, DRAWN)
    watched.run()
    return watched, recheck


def rest(recheck: Recheck) -> None:
    while recheck.has_work:
        recheck.advance()


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_healthy_engine_is_found_so_with_all_it_drew(dtype, block_size):
    watched, recheck = rechecked(dtype, block_size)
    rest(recheck)
    assert recheck.stats.same == 2
    assert recheck.stats.tokens == 2 * (110 // block_size * block_size)
    watched.engine.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layer", "part", "place", "slot"), [(0, 0, 0, 0), (2, 1, 4, 15)])
def test_one_flipped_bit_is_found_and_nobody_reads_it_any_more(
    dtype, layer, part, place, slot, caplog
):
    watched, recheck = rechecked(dtype)
    block = watched.cache.match(PrefixKey.of(PROMPT)).block_ids[place]
    words = watched.executor.store.pool.view(torch.int32 if dtype == torch.float32 else torch.int16)
    words[layer, part, block, slot, 0, 5] ^= 1
    rest(recheck)
    assert recheck.stats.kv == 1
    assert f"layer {layer}, block {block} " in caplog.text
    watched.submit("b", PROMPT, DRAWN)
    watched.run()  # compares every bit
    assert watched.engine.stats().cached_tokens == 0


def run_on_a_thread(
    act: Callable[[AsyncEngine, Recheck], object], *, every: int = 1
) -> tuple[WatchedEngine, Recheck]:
    """Do something with an engine on its own thread, and stop it."""
    watched = WatchedEngine(alone(torch.float32), num_blocks=64, block_size=16)
    model, store = watched.alone.model, watched.executor.store
    recheck = Recheck(watched.engine, ModelExecutor(model, store), every=every)
    engine = AsyncEngine(watched.engine, recheck=recheck)
    engine.start()

    async def act_and_stop() -> None:
        try:
            await act(engine, recheck)  # type: ignore[misc]
        finally:
            await asyncio.to_thread(engine.stop, drain_s=5.0)

    asyncio.run(act_and_stop())
    watched.engine.check()
    assert engine.failure is None
    stats = watched.cache.stats()
    assert (stats.num_leases, stats.num_private, stats.num_pinned) == (0, 0, 0)
    return watched, recheck


async def ask(engine: AsyncEngine, name: str, tokens: list[int], **names: str) -> list[int]:
    """Return what a request gives."""
    request = Request(
        request_id=name,
        prompt=pack_tokens(tokens),
        sampling=SamplingParams(max_tokens=6),
        namespace=Namespace(**names),
    )
    said: list[int] = []
    async for news in await engine.submit(request):
        said += news.token_ids
    return said


def test_the_engines_thread_checks_while_it_has_nothing_to_do():
    async def act(engine: AsyncEngine, recheck: Recheck) -> None:
        for turn in range(3):
            await ask(engine, f"r{turn}", PROMPT)
        while recheck.has_work:
            await asyncio.sleep(0.01)

    _, recheck = run_on_a_thread(act)
    assert recheck.stats.same == 3


def test_no_check_is_made_while_there_is_work():
    seen: list[bool] = []

    async def act(engine: AsyncEngine, recheck: Recheck) -> None:
        advance, owner = recheck.advance, engine._engine

        def watched_advance() -> None:
            seen.append(owner.has_work)
            advance()

        recheck.advance = watched_advance  # type: ignore[method-assign]
        for turn in range(4):
            asked = (ask(engine, f"r{turn} {i}", PROMPT[10 * i :]) for i in range(3))
            await asyncio.gather(*asked)
        while recheck.has_work:
            await asyncio.sleep(0.01)

    _, recheck = run_on_a_thread(act)
    assert recheck.stats.same == 12
    assert len(seen) >= 12
    assert not any(seen)


def test_a_stop_waits_for_no_check():
    class Endless(Recheck):
        has_work = True  # type: ignore[assignment]

        def advance(self) -> None:
            """There is always more."""

    async def act(engine: AsyncEngine, recheck: Recheck) -> None:
        engine._recheck = Endless(engine._engine, recheck._executor, every=1)
        await ask(engine, "a", PROMPT)

    run_on_a_thread(act)


def test_a_mismatch_on_the_engines_thread_leaves_the_next_request_right():
    async def act(engine: AsyncEngine, recheck: Recheck) -> None:
        async def spoil() -> None:
            def flip(owner):
                (block, *_) = owner.cache.match(PrefixKey.of(PROMPT)).block_ids
                owner._executor.store.pool[0, 1, block].mul_(2)

            await engine.call(flip)

        right = await ask(engine, "a", PROMPT)
        while recheck.has_work:
            await asyncio.sleep(0.01)
        await ask(engine, "other", PROMPT, salt="s")
        await spoil()
        wrong = await ask(engine, "b", PROMPT)
        while recheck.has_work:
            await asyncio.sleep(0.01)
        assert recheck.stats.kv == 1
        assert await ask(engine, "c", PROMPT) == right
        assert wrong != right

    watched, _ = run_on_a_thread(act)
    assert watched.cache.match_len(PrefixKey.of(PROMPT, Namespace(salt="s"))) == 80
