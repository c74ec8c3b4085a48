"""The engine on a thread of its own, for callers on an event loop.

Owns: the one thread that touches engine and cache, and passing values to and from it.  Does not
know: HTTP.
Idea: nobody else ever holds a lock or a lease.  Callers put calls into an inbox, and get news back
on their own event loop; a caller that goes away is one more call: abort.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar, cast

from runtime.engine import Engine
from runtime.engine_stats import EngineStats
from runtime.errors import EngineFailure, ServerBusy
from runtime.recheck import Recheck, RecheckStats
from runtime.request import Request, RequestOutput, Usage

T = TypeVar("T")

_log = logging.getLogger("radixcache")


class RequestStream:
    """The news of one request, or of several asked for together; iterate over it, and close it.

    Closing before the last news aborts what has not ended: its blocks are free within one step.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[RequestStream], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.unfinished = set(request_ids)
        self._abort = abort

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self.unfinished:
            raise StopAsyncIteration
        output = await self.news.get()
        if output.is_last:
            self.unfinished.discard(output.request_id)
        return output

    async def aclose(self) -> None:
        """Abort what has not ended."""
        self.close()

    def close(self) -> None:
        """Abort what has not ended; also for whoever can't await, such as a destructor."""
        if self.unfinished:
            self._abort(self)
            self.unfinished = set()


class Outlet(Protocol):
    """Takes to others what happened; called by the engine's thread, which it must not hold up."""

    def turned(self) -> None:
        """Calls were carried out, and perhaps a step was computed; must not raise."""

    def ended(self) -> None:
        """The thread ends: what the cache holds is of no use any more; must not raise."""


class AsyncEngine:
    """Runs an engine on its own thread.

    recheck  what its thread does while the engine has nothing to do; None: it waits
    outlets  told after each turn of the thread, and at its end

    `start` before use, `stop` when done.  All other methods belong to event loops.
    """

    def __init__(
        self, engine: Engine, *, recheck: Recheck | None = None, outlets: Sequence[Outlet] = ()
    ) -> None:
        self._engine = engine
        self._recheck = recheck
        self._outlets = tuple(outlets)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # touched by the engine's thread alone
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._closed = False  # set before the inbox is emptied for the last time
        self._failure: str | None = None
        self._latest = engine.stats()

    @property
    def latest_stats(self) -> EngineStats:
        """The counters after the last step; readable from any thread."""
        return self._latest

    @property
    def recheck_stats(self) -> RecheckStats:
        """What was checked again so far; readable from any thread."""
        return self._recheck.stats if self._recheck else RecheckStats()

    @property
    def failure(self) -> str | None:
        """What broke the engine for good, or None while it serves."""
        return self._failure

    @property
    def is_stopping(self) -> bool:
        """True from the moment that no more requests are taken."""
        return self._stopping or self._closed

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, drain_s: float) -> None:
        """Take no more requests, let those in flight end for at most `drain_s` seconds, then stop.

        What is left then, or when `hurry` is called, ends with finish reason "abort".  Blocks the
        caller.
        """
        if not self._thread.is_alive():
            return
        deadline = threading.Timer(drain_s, lambda: self._inbox.put(self._abort_all))
        deadline.daemon = True
        deadline.start()
        self._inbox.put(self._begin_stop)
        self._thread.join()
        deadline.cancel()

    def hurry(self) -> None:
        """End what `stop` still waits for; from any thread, and from within a signal."""
        self._inbox.put(self._abort_all)

    async def submit(self, *requests: Request) -> RequestStream:
        """Queue requests, all or none, and return their news; close the stream when done with it.

        Raises what `Engine.submit` raises, ServerBusy while stopping, EngineFailure when broken.
        """
        names = [request.request_id for request in requests]
        stream = RequestStream(names, self._post_abort)

        def enter(engine: Engine) -> None:
            """Submit all of the requests, or take back those that were."""
            if self._stopping:
                raise ServerBusy("the server is shutting down", retry_after_s=5.0)
            for place, request in enumerate(requests):
                try:
                    engine.submit(request)
                except Exception:
                    for earlier in names[:place]:
                        self._abort(earlier, stream)
                    raise
                self._streams[request.request_id] = stream

        try:
            await self.call(enter)
        except asyncio.CancelledError:
            self._post_abort(stream)
            raise
        return stream

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread and return what it returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            """Call the function; the loop of whoever awaits it takes the result."""
            result: T | None = None
            error: Exception | None = None
            try:
                if self._failure is not None:
                    raise EngineFailure(self._failure)
                result = function(self._engine)
            except Exception as caught:
                error = caught
            except BaseException as panic:  # breaks the engine, but its caller is told, too
                broken = EngineFailure(f"the engine broke down: {panic}")
                _post(loop, lambda: _settle(future, None, broken))
                raise
            _post(loop, lambda: _settle(future, result, error))

        self._inbox.put(run)
        if self._closed or not self._thread.ident:
            future.cancel()
            raise EngineFailure(self._failure or "the engine is not running")
        return await future

    def post(self, function: Callable[[Engine], object]) -> None:
        """Run a function on the engine's thread, after all that was asked for before.

        For whoever can't wait, such as a destructor.  It must not raise.
        """

        def run() -> None:
            """Call the function, unless the engine is broken."""
            if self._failure is None:
                function(self._engine)

        self._inbox.put(run)

    async def abort(self, *request_ids: str) -> None:
        """End requests now; whoever reads their news gets the last of them, reason "abort"."""

        def end(engine: Engine) -> None:
            """End each, and send what its reader gets last."""
            for request_id in request_ids:
                self._deliver(engine.abort(request_id))

        await self.call(end)

    def _post_abort(self, stream: RequestStream) -> None:
        names = tuple(stream.unfinished)

        def abort() -> None:
            """End what of the stream has not ended since."""
            for name in names:
                self._abort(name, stream)

        self._inbox.put(abort)

    def _abort(self, request_id: str, stream: RequestStream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if self._failure is None:  # a broken engine is asked for nothing more
                self._engine.abort(request_id)

    def _begin_stop(self) -> None:
        self._stopping = True

    def _abort_all(self) -> None:
        if self._failure is not None:
            return  # everybody is told of that, and a broken engine is asked for nothing more
        for request_id in list(self._streams):
            self._deliver(self._engine.abort(request_id))

    def _run(self) -> None:
        """The thread: carry out what came in, run a step, pass on its news."""
        try:
            while not (self._stopping and not self._engine.has_work):
                rest = self._recheck if self._recheck and self._recheck.has_work else None
                self._take_calls(wait=not self._engine.has_work and rest is None)
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                elif rest and not self._stopping:
                    rest.advance()
                self._latest = self._engine.stats()
                for outlet in self._outlets:
                    outlet.turned()
        except BaseException as error:  # our bug, or a library's panic: tell everyone, and end
            self._failure = f"the engine broke down: {type(error).__name__}: {error}"
            _log.exception("the engine broke down")
        self._closed = True
        self._take_calls(wait=False)
        self._deliver([_broken(name, self._failure) for name in list(self._streams)])
        for outlet in self._outlets:
            outlet.ended()

    def _take_calls(self, *, wait: bool) -> None:
        """Run the calls in the inbox; where there is nothing else to do, wait for one."""
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass news on; one wake-up of each event loop, not one a request."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.is_last:
                del self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, news in by_loop.items():
            _post(loop, partial(_put_all, news))


def _put_all(news: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in news:
        stream.news.put_nowait(output)


def _settle(future: asyncio.Future[T], result: T | None, error: Exception | None) -> None:
    """Give a future what came of a call, where somebody still waits for it."""
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(cast(T, result))


def _post(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # A loop that is closed has nobody left who waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _broken(request_id: str, failure: str | None) -> RequestOutput:
    """The last news of a request whose engine is gone."""
    usage = Usage(prompt_tokens=0, cached_tokens=0, computed_tokens=0, completion_tokens=0)
    return RequestOutput(
        request_id=request_id,
        text="",
        token_ids=(),
        usage=usage,
        finish_reason="error",
        error=failure or "the engine stopped",
        is_last=True,
    )
