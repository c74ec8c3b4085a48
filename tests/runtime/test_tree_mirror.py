"""Mirrors of the tree: a snapshot and the changes after it are the next snapshot, for everybody."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import CacheConfig, Namespace, OutOfBlocks, PrefixKey, RadixCache
from radixcache.lease import Lease
from radixcache.watch import TreeWatch
from runtime.tree.history import SampleRing, Timeline
from runtime.tree.mirror import COLUMNS, Label, Mirror, Numbers, SeenRow, encode_nodes
from runtime.tree.records import Sample
from runtime.tree.tallies import Tallies

NAMES = ("acme", "globex", "acme.2", "")


def label(namespace: Namespace) -> Label:
    return Label(f"<{namespace.salt}>", namespace.salt.partition(".")[0] or None)


def is_acme(namespace: Namespace) -> bool:
    return namespace.salt.startswith("acme")


class Traffic:
    """A small cache under random requests, and whoever mirrors it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = RadixCache(CacheConfig(num_blocks=14, block_size=2))
        self.watch = TreeWatch(self.cache.tree, self.cache.pins)
        self.leases: list[Lease] = []

    def go_on(self, count: int) -> None:
        for _ in range(count):
            if self.leases and self.random.random() < 0.6:
                lease = self.leases.pop(self.random.randrange(len(self.leases)))
                self.cache.commit(lease, lease.num_tokens)
                self.cache.release(lease)
                continue
            tokens = [self.random.randrange(2) for _ in range(self.random.randrange(1, 10))]
            namespace = Namespace(salt=self.random.choice(NAMES))
            try:
                self.leases.append(self.cache.acquire(PrefixKey.of(tokens, namespace)))
            except OutOfBlocks:
                self.cache.evict(3)

    def look(self, *mirrors: Mirror) -> None:
        while self.watch.num_pending:
            changes = self.watch.take(self.random.randrange(1, 5))
            rows = [(row, float(row.last_access)) for row in changes.rows]
            for mirror in mirrors:
                mirror.apply(rows, changes.removed)


def columns(rows: list[SeenRow], namespaces: list[Label]) -> dict[str, list[object]]:
    """What a reader decodes."""
    decoded: dict[str, list[object]] = msgspec.json.decode(encode_nodes(rows, namespaces))
    return decoded


class Page:
    """A reader that keeps rows as the documentation of the feed says."""

    def __init__(self, mirror: Mirror) -> None:
        self.seq = mirror.seq
        self.rows: dict[object, tuple[object, ...]] = {}
        self.take(columns(list(mirror.rows.values()), mirror.namespaces), [])

    def take(self, nodes: dict[str, list[object]], removed: list[int]) -> None:
        for node_id in removed:
            del self.rows[node_id]  # known, or the feed told of what never was
        for row in zip(*(nodes[name] for name in COLUMNS), strict=True):
            *fields, place = row
            assert isinstance(place, int)
            self.rows[row[0]] = (*fields, str(nodes["namespaces"][place]))
        assert {row[1] for row in self.rows.values()} <= {0, *self.rows}, "a parent is missing"

    def follow(self, mirror: Mirror) -> None:
        changes = mirror.changes()
        if changes is None:
            return
        assert mirror.seq == self.seq + 1
        self.seq = mirror.seq
        self.take(columns(changes[0], mirror.namespaces), changes[1])


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6))
def test_a_snapshot_and_the_changes_after_it_are_a_new_snapshot(seed: int) -> None:
    traffic = Traffic(seed)
    whole = Mirror(label=label)
    own = Mirror(label=label, sees=is_acme, numbers=Numbers())
    traffic.go_on(20)
    traffic.look(whole, own)
    for mirror in (whole, own):
        mirror.changes()
    pages = [Page(whole), Page(own)]
    for _ in range(8):
        traffic.go_on(6)
        traffic.look(whole, own)
        for page, mirror in zip(pages, (whole, own), strict=True):
            page.follow(mirror)
            assert page.rows == Page(mirror).rows
    assert len(whole.rows) == traffic.cache.tree.num_nodes + len(traffic.cache.tree.roots)
    assert whole.num_nodes == traffic.cache.tree.num_nodes
    expected = sum(is_acme(node.namespace) for node in traffic.cache.tree.walk())
    assert len(own.rows) == expected


def test_a_tenant_sees_numbers_that_tell_nothing_of_others() -> None:
    busy, alone = (RadixCache(CacheConfig(num_blocks=64, block_size=1)) for _ in range(2))
    seen = []
    for cache in (busy, alone):
        watch, own = (
            TreeWatch(cache.tree, cache.pins),
            Mirror(label=label, sees=is_acme, numbers=Numbers()),
        )
        for i in range(6):
            for salt in ("globex", "acme") if cache is busy else ("acme",):
                lease = cache.acquire(PrefixKey.of([i, i], Namespace(salt=salt)))
                cache.commit(lease, 2)
                cache.release(lease)
            changes = watch.take(100)
            rows = sorted(changes.rows, key=lambda row: row.node_id)
            own.apply([(row, 0.0) for row in rows], changes.removed)
            own.changes()
        seen.append((own.seq, own.rows, own.namespaces))
    assert seen[0] == seen[1]


def test_a_tenants_number_leads_to_its_node_and_another_tenants_to_none() -> None:
    traffic = Traffic(3)
    traffic.go_on(60)
    own = Mirror(label=label, sees=is_acme, numbers=Numbers())
    traffic.look(own)
    mine = {node.node_id for node in traffic.cache.tree.walk() if is_acme(node.namespace)}
    assert mine
    assert {own.node_id(number) for number in own.rows} == mine
    assert own.node_id(max(own.rows) + 1) is None


def test_numbers_are_not_given_again_after_all_were_forgotten() -> None:
    numbers = Numbers()
    assert [numbers.of(node_id) for node_id in (0, 70, 80, 70)] == [0, 1, 2, 1]
    assert numbers.forget(70) == 1
    assert numbers.node_id(1) is None
    numbers.clear()
    assert [numbers.of(node_id) for node_id in (80, 70)] == [3, 4]


def sample(time: float, **fields: float | None) -> Sample:
    counts = dict.fromkeys(Sample.__struct_fields__, 0) | {"running": ()}
    return msgspec.convert(counts | {"time": time, "ttft_cold": None} | fields, Sample)


def test_a_ring_keeps_the_last_samples_oldest_first() -> None:
    ring = SampleRing(3)
    assert ring.samples() == []
    kept = [sample(float(i), asked=10**12 + i, ttft_warm=i / 8) for i in range(5)]
    for each, one in enumerate(kept):
        ring.add(one)
        assert ring.samples() == kept[max(0, each - 2) : each + 1]
    assert len(ring) == 3


def test_a_timeline_tells_the_more_exactly_the_less_time_has_passed() -> None:
    line = Timeline(size=16)
    assert line.when(5) == 0.0
    for second in range(1, 501):
        line.note(second * 10, float(second))
        assert len(line) <= 16
    assert line.when(5000) == line.when(9999) == 500.0
    assert line.when(4981) == 499.0  # after 4980, and over at the latest with 4990
    assert line.when(1) == 1.0
    times = [line.when(tick) for tick in range(0, 5000, 7)]
    assert times == sorted(times)
    assert all(tick / 10 <= time for tick, time in zip(range(0, 5000, 7), times, strict=True))
    line.note(4000, 600.0)  # what has not moved on is not noted
    assert line.when(5000) == 500.0


@pytest.mark.parametrize("is_warm", [True, False])
def test_times_to_the_first_token_count_for_a_minute(is_warm: bool) -> None:
    tallies = Tallies()
    for now, seconds in ((0.0, 9.0), (30.0, 1.0), (40.0, 3.0), (50.0, 2.0)):
        tallies.note_first_token("acme", seconds, now, is_warm=is_warm)
    for tally in (tallies.all, tallies.of("acme")):
        assert tally.median_s(70.0, is_warm=is_warm) == 2.0
        assert tally.median_s(70.0, is_warm=not is_warm) is None
        assert tally.median_s(200.0, is_warm=is_warm) is None
    assert tallies.of("globex").median_s(70.0, is_warm=is_warm) is None
