"""Reading the engine for the tree's feed: values off the one thread that owns the cache.

Owns: what is read, on the engine's thread.  Does not know: event loops, who reads, what may be
seen.
Idea: every call is O(what it returns), the nodes of a slice or the sequences that are shown, or of
what an engine has few of: leases, namespaces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

import msgspec

from radixcache.cache import RadixCache
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.watch import Changes, NodeRow, TreeWatch
from runtime.engine import Engine
from runtime.engine_stats import EngineStats
from runtime.scheduler.public import PUBLIC
from runtime.sequence import Sequence
from runtime.sessions.holds import Session
from runtime.tree.records import Pin, Running
from runtime.tree.tallies import EvictionTally

SLICE = 500
"""Nodes that one call tells of, so that no step waits for more: under a millisecond."""

MAX_RUNNING = 64
"""Sequences, and pins of a node, that are told one by one."""

MAX_RANK = 10_000
"""Leaves that are looked through to tell a tenant's place among its own."""

TenantOf = Callable[[Namespace], str | None]


class Slice(msgspec.Struct, frozen=True):
    """A part of what changed; `tick` is logical time.

    is_last      whether nothing is left
    num_touched  nodes that have changed and are left
    """

    changes: Changes
    is_last: bool
    num_touched: int
    tick: int


class Owned(msgspec.Struct):
    """Blocks of one tenant's namespaces, and what it may own at most; None without limit."""

    private: int = 0
    pinned: int = 0
    evictable: int = 0
    evicted: int = 0
    limit: int | None = None


class Reading(msgspec.Struct, frozen=True):
    """The engine at one moment.

    running   sequences, at most `MAX_RUNNING` of each tenant's
    counts    sequences that run by tenant, those of all under None
    owned     by tenant; empty where there are none
    """

    stats: EngineStats
    tick: int
    running: list[Running]
    counts: Counter[str | None]
    owned: dict[str, Owned]


class NodeReading(msgspec.Struct, frozen=True):
    """One node at one moment, its tokens packed; times are logical."""

    row: NodeRow
    tokens: bytes
    path_tokens: int
    block_ids: list[int]
    created: int
    pins: list[Pin]
    rank: int | None
    num_children: int
    tick: int


class TreeReader:
    """Reads one engine; of its thread.

    tenant_of   whose a namespace is
    tenants     their names, which this thread alone may add to; empty where nobody is told apart
    sessions    gives those that are open
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tenant_of: TenantOf,
        tenants: Collection[str] = (),
        sessions: Callable[[], Iterable[Session]] = tuple,
    ) -> None:
        self._engine = engine
        self._cache: RadixCache = engine.cache
        self._tenant_of = tenant_of
        self._tenants = tenants
        self._sessions = sessions
        self._watch: TreeWatch | None = None
        self._evictions = EvictionTally(tenant_of)
        if self._tenants:
            room = engine.cache.room
            room.observers = (*room.observers, self._evictions)

    def begin(self) -> None:
        """Watch the tree from now on; nothing where it is watched."""
        if self._watch is None:
            self._watch = TreeWatch(self._cache.tree, self._cache.pins)

    def end(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def take(self, limit: int = SLICE) -> Slice:
        """Return what changed of at most `limit` nodes; nothing while nobody watches."""
        watch, tick = self._watch, self._cache.logical_time
        if watch is None:
            return Slice(Changes([], []), True, 0, tick)
        changes = watch.take(limit)
        return Slice(changes, not watch.num_pending, watch.num_touched, tick)

    def read(self, *, with_running: bool) -> Reading:
        """Return the engine's numbers; O(sequences that run + namespaces where tenants are)."""
        counts: Counter[str | None] = Counter()
        shown: list[Running] = []
        for sequence in self._engine.scheduler.running:
            tenant = self._tenant_of(sequence.request.namespace)
            counts.update({None, tenant})
            if with_running and min(counts[None], counts[tenant]) <= MAX_RUNNING:
                shown.append(_running(sequence, tenant))
        stats = self._engine.stats()
        return Reading(stats, self._cache.logical_time, shown, counts, self._owned())

    def node(self, node_id: int, *, tenant: str | None) -> NodeReading | None:
        """Return a node that was told of; None where it is gone.

        tenant  among whose leaves its place in the order of eviction counts; None: among all

        O(leases · depth), and at most `MAX_RANK` leaves for a tenant.
        """
        node = None if self._watch is None else self._watch.node(node_id)
        if node is None:
            return None
        return NodeReading(
            row=NodeRow.of(node),
            tokens=bytes(node.edge),
            path_tokens=node.end,
            block_ids=node.block_ids.tolist(),
            created=node.created,
            pins=list(self._pins(node)),
            rank=self._rank(node, tenant),
            num_children=len(node.children),
            tick=self._cache.logical_time,
        )

    def _owned(self) -> dict[str, Owned]:
        owned = {name: Owned(evicted=self._evictions.blocks[name]) for name in self._tenants}
        for account in self._cache.accounts if owned else ():
            tenant = self._tenant_of(account.namespace)
            if tenant is None:
                continue
            mine = owned[tenant]
            mine.pinned += account.num_pinned
            mine.evictable += account.num_evictable
            mine.private += account.num_owned - account.num_pinned - account.num_evictable
            if account.quota is not None and account.quota.hard_limit is not None:
                mine.limit = (mine.limit or 0) + account.quota.hard_limit
        return owned

    def _pins(self, node: Node) -> Iterator[Pin]:
        scheduler = self._engine.scheduler
        names = {
            sequence.lease.lease_id: name_of(sequence)
            for sequence in (*scheduler.running, *scheduler.closing)
            if sequence.lease is not None
        }
        for lease in self._cache.leases.values():
            if _stands_on(lease.node, node):
                name = names.get(lease.lease_id)
                yield Pin("lease", str(lease.lease_id)) if name is None else Pin("request", name)
        held = {
            session.held.hold_id: session.session_id for session in self._sessions() if session.held
        }
        for hold in self._cache.deadlines.holds.values():
            if not _stands_on(hold.node, node):
                continue
            if hold.hold_id in held:
                # Enough to know it by, too little to use it: an id opens its session.
                yield Pin("session", f"{held[hold.hold_id][:10]}…")
            else:
                yield Pin("public" if hold.namespace == PUBLIC else "hold", str(hold.hold_id))

    def _rank(self, node: Node, tenant: str | None) -> int | None:
        if node.entry is None:
            return None
        if tenant is None:
            return self._cache.accounts.rank_of(node)
        for rank, leaf in enumerate(self._own_leaves(tenant)):
            if leaf is node:
                return rank
        return None

    def _own_leaves(self, tenant: str) -> Iterator[Node]:
        for leaf in islice(self._cache.accounts.leaves(), MAX_RANK):
            if self._tenant_of(leaf.namespace) == tenant:
                yield leaf


def name_of(sequence: Sequence) -> str:
    """Return the name of a branch: its request's id, and its number where it is a later one."""
    name = sequence.request.request_id
    return f"{name}/{sequence.index}" if sequence.index else name


def _stands_on(at: Node | None, node: Node) -> bool:
    """Return True for a place in the tree at or below a node."""
    while at is not None and at is not node and at.start >= node.end:
        at = at.parent
    return at is node


def _running(sequence: Sequence, tenant: str | None) -> Running:
    return Running(
        id=name_of(sequence),
        prompt=sequence.num_prompt_tokens,
        cached=sequence.num_cached or 0,
        computed=sequence.num_computed,
        output=len(sequence.output),
        blocks=0 if sequence.lease is None else len(sequence.lease.block_table),
        tenant=tenant,
    )
