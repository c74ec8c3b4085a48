"""The feed of the live tree: one look at the engine for all who watch, and what each may see.

Owns: when the engine is looked at, the mirrors of each audience, and the readers' queues.  Does not
know: HTTP, how the page draws.
Idea: the engine is asked on a clock, in slices, for what changed; readers cost it nothing.  Each
gets a snapshot off its audience's mirror, then the same bytes as all others.  Nobody watching, the
tree notes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec
from starlette.concurrency import run_in_threadpool

from radixcache.namespace import Namespace
from runtime.engine import Engine
from runtime.errors import EngineFailure, ServerBusy
from runtime.metrics import NO_TENANT
from runtime.scheduler.public import PUBLIC
from runtime.server.context import Caller, Served
from runtime.server.tree_readers import Audience, Reader, change_event, framed
from runtime.sessions.holds import Session
from runtime.tree.history import SampleRing, Timeline
from runtime.tree.mirror import Label, Mirror, Numbers, encode_nodes
from runtime.tree.reading import SLICE, NodeReading, Reading, Slice, TreeReader
from runtime.tree.records import Sample
from runtime.tree.samples import tenant_sample, whole_sample

TICK_S = 0.5
"""Seconds between two looks for changes."""

HISTORY_S = 900
"""Seconds of samples that are kept."""

LINGER_S = 10.0
"""Seconds that the tree is still watched after the last reader left: a page that reloads."""

MAX_READERS, MAX_OWN_READERS = 64, 8
"""Feeds open at once: of all, and of one tenant."""

_BURST = 5000
"""Rows that are taken over before the event loop does something else."""

_log = logging.getLogger("radixcache")


class TreeFeed:
    """The live tree of one server, for its event loop.

    sessions  gives those that are open, to the engine's thread
    now       tells the time, seconds since 1970
    tick_s    seconds between two looks for changes; every second one brings a sample
    """

    def __init__(
        self,
        served: Served,
        *,
        sessions: Callable[[], Iterable[Session]] = tuple,
        now: Callable[[], float] = time.time,
        tick_s: float = TICK_S,
    ) -> None:
        self._served = served
        self._now = now
        self._tick_s = tick_s
        self._engine = served.engine
        self._reader = TreeReader(
            served.runtime.engine,
            tenant_of=served.tenant_of,
            tenants=served.salts.values(),
            sessions=sessions,
        )
        self._timeline = Timeline()
        self._histories: dict[str | None, SampleRing] = {None: SampleRing(HISTORY_S)}
        self._max_kept = served.config.max_tenant_labels  # histories of tenants
        self._numbers: dict[str, Numbers] = {}
        self._audiences: dict[str | None, Audience] = {}  # empty while the tree is not watched
        self._looking = asyncio.Lock()
        self._has_ended = False

    @property
    def is_watching(self) -> bool:
        """True while the tree notes what changes."""
        return bool(self._audiences)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Look at the engine on the clock while the context lasts, or until the engine is gone."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def close(self) -> None:
        """Watch no more; after the engine's thread has ended."""
        self._reader.end()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        num_ticks, due = 0, loop.time()
        try:
            while not self._engine.is_stopping:
                if num_ticks % 2 == 0:
                    await self._sample()
                if self.is_watching:
                    await self._tell_changes()
                num_ticks += 1
                now = loop.time()
                due = max(due + self._tick_s, now)  # one that came late puts off all that follow
                await asyncio.sleep(due - now)
        except EngineFailure:
            return  # whoever asks is told so
        except Exception:
            _log.exception("the feed of the tree broke down; the server goes on without")
        finally:
            self._has_ended = True
            for reader in self._readers():
                reader.end()

    async def open(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Return the events of a caller's feed, framed; they end with the engine.

        Raises ServerBusy where too many are open, EngineFailure.
        """
        audience = await self._audience(caller)
        for count, limit in (
            (sum(1 for _ in self._readers()), MAX_READERS),
            (0 if audience.tenant is None else len(audience.readers), MAX_OWN_READERS),
        ):
            if count >= limit:
                raise ServerBusy(f"{limit} feeds are open: close one", retry_after_s=5.0)
        reader = Reader()
        audience.readers.add(reader)  # counted from here on, not from its first event
        return self._events(audience, reader, caller)

    async def node(self, caller: Caller, number: int) -> NodeReading | None:
        """Return a node that a caller sees, under the numbers of its feed; None for any other.

        Raises ServerBusy, EngineFailure.
        """
        audience = await self._audience(caller)
        node_id, tenant = audience.mirror.node_id(number), audience.tenant
        if node_id is None:
            return None
        found = await self._engine.call(lambda _: self._reader.node(node_id, tenant=tenant))
        if found is None:
            return None
        self._timeline.note(found.tick, self._now())
        parent = audience.mirror.number(found.row.parent)
        row = msgspec.structs.replace(found.row, node_id=number, parent=parent)
        return msgspec.structs.replace(found, row=row)

    def when(self, tick: int) -> float:
        """Return about when logical time was `tick`, in seconds since 1970."""
        return self._timeline.when(tick)

    def label(self, namespace: Namespace) -> Label:
        """Return what a namespace is called; its salt, a secret, can't be told from it."""
        tenant = self._served.tenant_of(namespace)
        if namespace == PUBLIC:
            return Label("public prefix", None)
        words = [tenant or NO_TENANT]
        narrowed = namespace.salt.partition(".")[2]
        if narrowed:
            words.append(f"salt {narrowed[:6]}")  # the begin of a hash of what the caller sent
        if namespace.adapter:
            words.append(f"adapter {namespace.adapter}")
        if namespace.epoch:
            words.append(f"epoch {namespace.epoch}")
        return Label(" · ".join(words), tenant)

    def history(self, caller: Caller) -> list[Sample]:
        """Return the samples of the last minutes that a caller may see, oldest first."""
        ring = self._histories.get(_key(caller))
        return ring.samples() if ring else []

    def shows_text(self, caller: Caller, namespace: Namespace | None = None) -> bool:
        """Return whether a caller may read what stands in a namespace; None: in all it sees.

        A tenant reads its own and what is public, an administrator what its own tenant has; with
        `show_text`, or where there are no keys, everything.
        """
        if not self._served.salts or not caller.is_admin or self._served.config.show_text:
            return True
        return namespace is not None and (namespace == PUBLIC or caller.owns(namespace))

    def _readers(self) -> Iterator[Reader]:
        return (reader for audience in self._audiences.values() for reader in audience.readers)

    async def _audience(self, caller: Caller) -> Audience:
        """Return the audience of a caller, new if it has none; the tree is watched from then on."""
        # Not to be cut short where the caller goes away: rows that were taken would be lost.
        return await asyncio.shield(asyncio.ensure_future(self._opened(_key(caller))))

    async def _opened(self, key: str | None) -> Audience:
        async with self._looking:
            if self._engine.failure is not None:
                raise EngineFailure(self._engine.failure)
            if self._has_ended:
                raise ServerBusy(
                    "the feed has ended: the server is shutting down, or its log says why",
                    retry_after_s=5.0,
                )
            if not self._audiences:
                await self._engine.call(lambda _: self._reader.begin())
                mirror = Mirror(label=self.label)
                self._audiences[None] = Audience(None, mirror, now=self._served.clock())
                await self._look()
                mirror.changes()
            if key is not None and key not in self._audiences:
                mirror = await self._own_mirror(key)
                self._audiences[key] = Audience(key, mirror, now=self._served.clock())
            audience = self._audiences[key]
            audience.last_used = self._served.clock()
        return audience

    async def _own_mirror(self, tenant: str) -> Mirror:
        """Return the mirror of what a tenant sees, made of the one that has all."""

        def sees(namespace: Namespace) -> bool:
            return namespace == PUBLIC or self._served.tenant_of(namespace) == tenant

        numbers = self._numbers.setdefault(tenant, Numbers())
        whole = self._audiences[None].mirror
        own = Mirror(label=self.label, sees=sees, numbers=numbers)
        for place, row in enumerate(list(whole.rows.values())):
            own.put(whole.as_told(row), row.used)
            if place % _BURST == 0:
                await asyncio.sleep(0)  # tokens of other streams go first
        own.changes()
        return own

    async def _events(
        self, audience: Audience, reader: Reader, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        try:
            while not (reader.has_ended or self._has_ended):
                if reader.is_behind:
                    yield await self._snapshot(audience, reader, caller)
                event = await reader.next()
                if event is not None:
                    yield event
        finally:
            audience.readers.discard(reader)
            audience.last_used = self._served.clock()

    async def _snapshot(self, audience: Audience, reader: Reader, caller: Caller) -> bytes:
        mirror, config = audience.mirror, self._served.runtime.engine.cache.config
        async with self._looking:  # between two looks, when all parents are there
            reader.begin()
            seq, rows = mirror.seq, list(mirror.rows.values())
            namespaces = list(mirror.namespaces)
        reading = await self._engine.call(lambda _: self._reader.read(with_running=True))
        head = {
            "seq": seq,
            "time": self._now(),
            "block_size": config.block_size,
            "num_blocks": config.num_blocks,
            "sample": self._sample_of(audience.tenant, reading),
            "show_text": self.shows_text(caller),
        }
        nodes = await run_in_threadpool(encode_nodes, rows, namespaces)
        return framed("snapshot", msgspec.json.encode(head)[:-1] + b',"nodes":' + nodes + b"}", seq)

    async def _look(self) -> None:
        """Take over what changed, slice by slice, until nothing is left; under the lock.

        Where a step touches more nodes than a slice tells of, slices grow until they keep up.
        """
        is_last, limit, num_touched = False, SLICE, math.inf
        while not is_last:
            part = await self._engine.call(partial(_slice_of, self._reader, limit))
            if part.num_touched >= num_touched:
                limit *= 2
            num_touched = part.num_touched or math.inf
            self._timeline.note(part.tick, self._now())
            rows = [(row, self._timeline.when(row.last_access)) for row in part.changes.rows]
            for audience in self._audiences.values():
                audience.mirror.apply(rows, part.changes.removed)
            is_last = part.is_last

    async def _tell_changes(self) -> None:
        """Send what changed to all who read, and let go of audiences that nobody reads for."""
        async with self._looking:
            await self._forget_unused()
            if not self._audiences:
                return
            await self._look()
            for audience in self._audiences.values():
                changes = audience.mirror.changes()
                if changes is not None and audience.readers:
                    audience.send(change_event(audience.mirror, *changes, time=self._now()))

    async def _forget_unused(self) -> None:
        until = self._served.clock() - LINGER_S
        unused = {k for k, a in self._audiences.items() if not a.readers and a.last_used < until}
        for key in unused:
            if key is not None:
                del self._audiences[key]
                self._numbers[key].clear()
        if unused and len(self._audiences) == 1 and None in unused:
            self._audiences.clear()
            await self._engine.call(lambda _: self._reader.end())

    async def _sample(self) -> None:
        """Take a sample for each audience and each history, and send it to all who read."""
        is_read = any(audience.readers for audience in self._audiences.values())
        reading = await self._engine.call(lambda _: self._reader.read(with_running=is_read))
        self._timeline.note(reading.tick, self._now())
        for tenant in reading.owned:
            if self._served.tallies.of(tenant).asked and len(self._histories) <= self._max_kept:
                self._histories.setdefault(tenant, SampleRing(HISTORY_S))
        for key in self._histories.keys() | self._audiences.keys():
            audience, ring = self._audiences.get(key), self._histories.get(key)
            sample = self._sample_of(key, reading)
            if ring is not None:
                ring.add(sample)
            if audience is not None and audience.readers:
                audience.send(framed("sample", msgspec.json.encode(sample)))

    def _sample_of(self, tenant: str | None, reading: Reading) -> Sample:
        served, audience = self._served, self._audiences.get(tenant)
        if tenant is None:
            return whole_sample(reading, served.tallies.all, time=self._now(), now=served.clock())
        return tenant_sample(
            reading,
            served.tallies.of(tenant),
            tenant=tenant,
            num_nodes=audience.mirror.num_nodes if audience else 0,
            num_waiting=served.waiting.num_waiting(tenant),
            time=self._now(),
            now=served.clock(),
        )


def _slice_of(reader: TreeReader, limit: int, engine: Engine) -> Slice:
    return reader.take(limit)


def _key(caller: Caller) -> str | None:
    """Return whose tree a caller sees; None for everybody's."""
    return None if caller.is_admin else caller.tenant
