"""The feed of the tree on an event loop: slow readers, readers that leave, and what it asks for."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from radixcache import Namespace, PrefixKey
from runtime.async_engine import AsyncEngine
from runtime.errors import EngineFailure, ServerBusy
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.request import Request, SamplingParams, pack_prompt
from runtime.server import tree_feed, tree_readers
from runtime.server.config import ServerConfig
from runtime.server.context import Served
from runtime.server.middleware import ANYONE
from runtime.server.tree_feed import LINGER_S, MAX_READERS, TreeFeed
from runtime.server.tree_readers import MAX_BYTES, MAX_EVENTS, Reader
from runtime.tree.reading import SLICE, Slice, TreeReader
from tests.support.served import assert_nothing_held, quick_runtime
from tests.support.tree_reader import Watcher, event_of

TICK_S = 0.01


class Bench:
    """A feed that looks a hundred times a second, on a clock that is moved by hand."""

    def __init__(self, runtime: Runtime) -> None:
        self.now = 0.0
        self.runtime = runtime
        self.engine = AsyncEngine(runtime.engine)
        self.served = Served(
            runtime=runtime,
            engine=self.engine,
            metrics=ServerMetrics(lambda: self.engine.latest_stats),
            config=ServerConfig(),
            clock=lambda: self.now,
            created=0,
        )
        self.feed = TreeFeed(self.served, tick_s=TICK_S)
        self._count = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine's thread and the feed's task."""
        self.engine.start()
        try:
            async with self.feed.running():
                yield
        finally:
            await asyncio.to_thread(self.engine.stop, drain_s=1.0)
            self.feed.close()

    async def ask(self, *tokens: int, namespace: str = "") -> None:
        """Serve a request of 16 times each token, and one more."""
        self._count += 1
        prompt = [token for token in tokens for _ in range(16)] + [1]
        request = Request(
            request_id=f"r{self._count}",
            prompt=pack_prompt(prompt),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            namespace=Namespace(salt=namespace),
        )
        async for _ in await self.engine.submit(request):
            pass

    async def watcher(self) -> tuple[Watcher, Callable[[], Awaitable[None]]]:
        """Open a feed; return who keeps its events, and what takes the next of them."""
        events, watcher = await self.feed.open(ANYONE), Watcher()

        async def take() -> None:
            watcher.take(event_of((await asyncio.wait_for(anext(events), 30)).decode()))

        await take()
        return watcher, take


def play(use: Callable[[Bench], Awaitable[None]], runtime: Runtime | None = None) -> None:
    """Use a bench on an event loop; nothing may be held after it."""
    bench = Bench(runtime or quick_runtime())

    async def played() -> None:
        async with bench.running():
            await use(bench)

    asyncio.run(played())
    assert_nothing_held(bench.runtime)
    assert bench.runtime.engine.cache.pins.touched is None


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is bound to come."""
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(TICK_S)
    raise AssertionError("it never came")


def test_a_reader_that_is_too_slow_gets_a_new_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_readers, "MAX_EVENTS", 5)

    async def use(bench: Bench) -> None:
        slow, take = await bench.watcher()
        for i in range(30):
            await bench.ask(100, 200 + i)
            await asyncio.sleep(2 * TICK_S)
        await take()
        assert slow.num_snapshots == 2
        await until_same(slow, take, bench)

    play(use)


async def until_same(
    watcher: Watcher, take: Callable[[], Awaitable[None]], bench: Bench
) -> Watcher:
    """Read on until a watcher knows what a new one does; return the new one."""
    new, _ = await bench.watcher()
    for _ in range(100):
        if watcher.rows == new.rows:
            return new
        await take()
    raise AssertionError("the two never agreed")


def test_what_waits_for_a_reader_is_bounded() -> None:
    async def use() -> None:
        reader = Reader()
        reader.put(b"before the first snapshot")
        assert len(reader) == 0
        reader.begin()
        for _ in range(MAX_EVENTS):
            reader.put(b"x")
        assert (len(reader), reader.is_behind) == (MAX_EVENTS, False)
        reader.put(b"x")
        assert (len(reader), reader.is_behind) == (0, True)
        assert await reader.next() is None
        reader.begin()
        reader.put(b"x" * MAX_BYTES + b"x")  # one alone may be as large as it is
        assert (len(reader), reader.is_behind) == (1, False)
        reader.put(b"x")
        assert (len(reader), reader.is_behind) == (0, True)

    asyncio.run(use())


def test_the_tree_notes_nothing_before_somebody_watches_and_after_all_have_left() -> None:
    async def use(bench: Bench) -> None:
        pins = bench.runtime.engine.cache.pins
        await bench.ask(1, 2)
        await asyncio.sleep(5 * TICK_S)
        assert not bench.feed.is_watching
        assert pins.touched is None
        async with aclosing(await bench.feed.open(ANYONE)) as events:
            await anext(events)
            bench.now += 2 * LINGER_S
            await asyncio.sleep(5 * TICK_S)
            assert bench.feed.is_watching
        bench.now += LINGER_S / 2
        await asyncio.sleep(5 * TICK_S)
        assert bench.feed.is_watching, "a page that reloads has the tree walked anew"
        bench.now += LINGER_S
        await until(lambda: not bench.feed.is_watching)
        await until(lambda: pins.touched is None)
        watcher, _ = await bench.watcher()
        assert watcher.edges() == [0, 32]

    play(use)


def test_a_look_tells_of_what_was_touched_and_not_of_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    take = TreeReader.take

    def counted(self: TreeReader, limit: int = SLICE) -> Slice:
        part = take(self, limit)
        sizes.append(len(part.changes.rows) + len(part.changes.removed))
        return part

    monkeypatch.setattr(TreeReader, "take", counted)

    async def use(bench: Bench) -> None:
        cache = bench.runtime.engine.cache
        for i in range(150):
            await bench.ask(7, 1000 + i)
        watcher, take = await bench.watcher()
        assert len(watcher.rows) == cache.tree.num_nodes + 1 > 100
        sizes.clear()
        seq = watcher.seq
        await bench.ask(7, 1149, 5)
        while watcher.seq == seq:
            await take()
        await until(lambda: not bench.runtime.engine.has_work)  # its last block is there, too
        num_looks = len(sizes)
        await until(lambda: len(sizes) > num_looks + 1)
        assert 0 < sum(sizes) <= 8
        sizes.clear()
        await asyncio.sleep(10 * TICK_S)
        assert sum(sizes) == 0, "a tree at rest is told of again"

    play(use, quick_runtime(num_blocks=256))


def test_the_first_walk_is_cut_in_slices_between_which_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = TreeReader.take
    sizes: list[int] = []

    def small(self: TreeReader, limit: int = SLICE) -> Slice:
        part = take(self, 7)
        sizes.append(len(part.changes.rows))
        return part

    monkeypatch.setattr(TreeReader, "take", small)

    async def use(bench: Bench) -> None:
        for i in range(60):
            await bench.ask(7, 1000 + i)
        (watcher, take), *_ = await asyncio.gather(
            bench.watcher(), *(bench.ask(9, 3000 + i) for i in range(20))
        )
        assert max(sizes) <= 7
        await until_same(watcher, take, bench)

    play(use, quick_runtime(num_blocks=256))


def test_slices_grow_where_each_step_touches_more_than_one_tells_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_feed, "SLICE", 2)
    take = TreeReader.take
    limits: list[int] = []

    async def use(bench: Bench) -> None:
        cache = bench.runtime.engine.cache
        watcher, read = await bench.watcher()

        def busy(self: TreeReader, limit: int) -> Slice:
            limits.append(limit)
            for i in range(6):
                lease = cache.acquire(PrefixKey.of([len(limits), i] * 8))
                cache.commit(lease, 16)
                cache.release(lease)
            return take(self, limit)

        monkeypatch.setattr(TreeReader, "take", busy)
        while not watcher.rows:
            await read()
        monkeypatch.setattr(TreeReader, "take", take)
        assert 8 <= max(limits) <= 32
        await until_same(watcher, read, bench)

    play(use)


def test_a_reader_that_leaves_during_the_first_walk_loses_no_row_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = TreeReader.take
    monkeypatch.setattr(TreeReader, "take", lambda self, limit=SLICE: take(self, 3))

    async def use(bench: Bench) -> None:
        for i in range(40):
            await bench.ask(7, 1000 + i)
        for steps in range(1, 8):
            leaving = asyncio.ensure_future(bench.feed.open(ANYONE))
            for _ in range(steps):
                await asyncio.sleep(0)
            leaving.cancel()
        watcher, _ = await bench.watcher()
        assert len(watcher.rows) == bench.runtime.engine.cache.tree.num_nodes + 1

    play(use, quick_runtime(num_blocks=128))


def test_one_reader_too_many_is_told_to_wait() -> None:
    async def use(bench: Bench) -> None:
        opening = [bench.feed.open(ANYONE) for _ in range(MAX_READERS)]
        feeds = await asyncio.gather(*opening)  # at once, and none has been read from
        with pytest.raises(ServerBusy, match="close one"):
            await bench.feed.open(ANYONE)
        await anext(feeds[0])
        await feeds.pop(0).aclose()
        feeds.append(await bench.feed.open(ANYONE))
        with pytest.raises(ServerBusy, match="close one"):
            await bench.feed.open(ANYONE)
        del feeds[-1]  # its caller left before the first event
        gc.collect()
        await bench.feed.open(ANYONE)

    play(use)


def test_feeds_end_with_the_engine() -> None:
    async def use(bench: Bench) -> None:
        events = await bench.feed.open(ANYONE)
        assert b"event: snapshot" in await anext(events)
        await asyncio.to_thread(bench.engine.stop, drain_s=1.0)
        rest = [event async for event in events]
        assert all(b"event: sample" in event for event in rest)
        with pytest.raises(ServerBusy, match="shutting down"):
            await bench.feed.open(ANYONE)

    play(use)


def test_feeds_end_when_the_engine_breaks_down() -> None:
    class Broken(BaseException):
        """What no engine survives."""

    def panic(_: object) -> None:
        raise Broken

    async def use(bench: Bench) -> None:
        events = await bench.feed.open(ANYONE)
        await anext(events)
        with pytest.raises(Exception, match="broke down"):
            await bench.engine.call(panic)
        async for event in events:
            assert b"event: sample" in event
        with pytest.raises(EngineFailure, match="broke down"):
            await bench.feed.open(ANYONE)

    play(use)


def test_times_of_use_are_those_of_the_clock_on_the_wall() -> None:
    wall = [1_700_000_000.0]

    async def use(bench: Bench) -> None:
        feed = bench.feed = TreeFeed(bench.served, tick_s=TICK_S, now=lambda: wall[0])
        async with feed.running():
            for token in (1, 2):
                await bench.ask(token)
                seen = len(feed.history(ANYONE))
                await until(lambda seen=seen: len(feed.history(ANYONE)) > seen + 1)
                wall[0] += 100
            watcher, _ = await bench.watcher()
        used = sorted(row["used"] for row in watcher.rows.values() if row["parent"])
        assert used == [1_700_000_000.0, 1_700_000_100.0]

    play(use)


def test_a_server_at_rest_is_not_busy_with_a_feed_that_nobody_reads() -> None:
    async def use(bench: Bench) -> None:
        calls = 0
        call = bench.engine.call

        async def counted(function: Callable[..., object]) -> object:
            nonlocal calls
            calls += 1
            return await call(function)

        bench.engine.call = counted  # type: ignore[assignment, method-assign]
        began = time.monotonic()
        await until(lambda: calls > 0)
        await asyncio.sleep(20 * TICK_S)
        ticks = (time.monotonic() - began) / TICK_S
        assert 0 < calls <= ticks / 2 + 2  # a sample at every second tick

    play(use)
