"""Watching the tree: what was told, put together, is the tree; only what was touched is told."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from radixcache import CacheConfig, CacheError, InvalidConfig, Namespace, RadixCache
from radixcache.pins import Pins
from radixcache.publishing import Publisher
from radixcache.watch import Changes, NodeRow, TreeWatch
from tests.core.serving import acquire, insert
from tests.core.test_state_machine import LONG, STRESS
from tests.core.test_state_machine_keeping import KeepingMachine
from tests.support.histories import BOUNDED
from tests.support.planted import PlantedBug
from tests.support.strategies import configs


def add(rows: dict[int, NodeRow], changes: Changes) -> None:
    """Put changes where they belong; what is removed must have been told of."""
    for row in changes.rows:
        rows[row.node_id] = row
    for node_id in changes.removed:
        del rows[node_id]


def drain(watch: TreeWatch, rows: dict[int, NodeRow], limit: int = 1000) -> int:
    """Take all there is; return how many nodes that were."""
    count = 0
    while watch.num_pending:
        changes = watch.take(limit)
        count += len(changes.rows) + len(changes.removed)
        add(rows, changes)
    return count


def as_it_is(cache: RadixCache) -> dict[int, NodeRow]:
    """The rows of all nodes, made anew."""
    return {node.node_id: NodeRow.of(node) for node in cache.tree.walk()}


class WatchedMachine(KeepingMachine):
    """Random histories under a watch that is read a little at a time; the other eyes are shut."""

    eyes = frozenset()
    watch: TreeWatch | None = None

    @initialize(config=configs(), limit=st.integers(1, 4))
    def start(self, config: CacheConfig, limit: int) -> None:
        super().start(config)
        self.limit = limit
        self.begin_watch()

    @rule()
    def begin_watch(self) -> None:
        """Let somebody else watch from here on: what is there comes of a walk."""
        if self.watch is not None:
            self.watch.close()
        self.watch = TreeWatch(self.cache.tree, self.cache.pins)
        self.rows: dict[int, NodeRow] = {}

    @invariant()
    def everything_holds(self) -> None:
        if self.watch is None:
            return
        add(self.rows, self.watch.take(self.limit))
        if not self.watch.num_pending:
            assert self.rows == as_it_is(self.cache)

    def teardown(self) -> None:
        if self.watch is not None:
            drain(self.watch, self.rows)
            assert self.rows == as_it_is(self.cache)


FEWER = settings(BOUNDED, max_examples=120)


class TestAnyHistoryIsToldWhole(WatchedMachine.TestCase):
    settings = LONG if STRESS else FEWER


BUGS = {
    "the upper half of a cut edge is not told of": (Publisher, "upper", ".note(upper)", ".note()"),
    "the lower half is not told of": (Pins, "reranked", "self.note(node)", "pass"),
    "a pin is not told of": (Pins, "lock", "touched.add(current)", "pass"),
    "the end of a pin is not told of": (Pins, "unlock", "touched.add(current)", "pass"),
    "an evicted leaf is not told of": (Pins, "removed", "note(leaf, parent)", "note(parent)"),
    "who becomes a leaf is not told of": (Pins, "removed", "self.note(leaf, parent)", "pass"),
    "a longer edge is not told of": (Pins, "extended", "self.note(leaf)", "pass"),
    "a shorter edge is not told of": (Pins, "trimmed", "self.note(leaf)", "pass"),
    "the walk does not go down": (
        TreeWatch,
        "take",
        "self._unseen.extend(node.children.values())",
        "pass",
    ),
    "a root that is gone counts as there": (
        TreeWatch,
        "_is_there",
        "self._tree.roots.get(node.namespace) is node",
        "node.start == 0",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_histories_catch_a_watch_in_which(name, monkeypatch):
    owner, method, old, new = BUGS[name]
    PlantedBug(name, (owner, method), edit=(old, new), seen_by="watch").plant(monkeypatch)
    quick = settings(FEWER, phases=[Phase.generate], print_blob=False)
    # Which node a slice tells of first is a set's order: the same history may fail a step later.
    with pytest.raises((AssertionError, CacheError, LookupError, Flaky)):
        run_state_machine_as_test(WatchedMachine, settings=quick)


def watched(num_blocks: int = 64, block_size: int = 1) -> tuple[RadixCache, TreeWatch]:
    cache = RadixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    return cache, TreeWatch(cache.tree, cache.pins)


def test_a_node_keeps_its_id_where_its_edge_is_cut():
    cache, watch = watched()
    rows: dict[int, NodeRow] = {}
    insert(cache, [1, 2, 3, 4])
    drain(watch, rows)
    (leaf,) = (row for row in rows.values() if row.parent)
    insert(cache, [1, 2, 9])
    drain(watch, rows)
    lower = rows[leaf.node_id]
    upper = rows[lower.parent]
    assert (lower.num_tokens, upper.num_tokens, upper.parent) == (2, 2, leaf.parent)
    assert sorted(row.num_tokens for row in rows.values()) == [0, 1, 2, 2]


def test_a_row_tells_who_may_go_and_who_may_not():
    cache, watch = watched()
    rows: dict[int, NodeRow] = {}
    insert(cache, [1, 2, 3])
    lease = acquire(cache, [1, 2, 9, 9])
    cache.commit(lease, 4)
    drain(watch, rows)
    states = {(row.num_tokens, row.num_hits): row.state for row in rows.values() if row.parent}
    assert states == {(2, 1): "p", (1, 0): "e", (2, 0): "p"}
    cache.release(lease)
    assert drain(watch, rows) == 3  # the leaf, its parent and the root
    assert sorted(row.state for row in rows.values()) == ["e", "e", "i", "i"]


def test_what_came_and_went_between_two_looks_is_not_told_of():
    cache, watch = watched()
    insert(cache, [1, 2, 3])
    cache.evict(3)
    assert (watch.num_pending > 0, watch.take(9)) == (True, Changes([], []))


def test_a_namespace_that_is_empty_again_takes_its_root_along():
    cache, watch = watched()
    rows: dict[int, NodeRow] = {}
    insert(cache, [1, 2], Namespace(salt="a"))
    drain(watch, rows)
    assert len(rows) == 2
    cache.drop(Namespace(salt="a"))
    drain(watch, rows)
    assert rows == {} == as_it_is(cache)


def test_a_request_in_a_large_tree_touches_only_its_own_path():
    cache, watch = watched(num_blocks=6000)
    for i in range(2500):
        insert(cache, [7, i])
    rows: dict[int, NodeRow] = {}
    drain(watch, rows)
    assert len(rows) == 2502
    insert(cache, [7, 1200, 1, 2])
    assert watch.num_pending <= 4  # root, shared node, the leaf that grew, and its new child
    drain(watch, rows)
    assert rows == as_it_is(cache)


def test_a_slice_tells_of_no_more_nodes_than_it_may():
    cache = RadixCache(CacheConfig(num_blocks=64, block_size=1))
    for i in range(20):
        insert(cache, [i, i])
    watch = TreeWatch(cache.tree, cache.pins)
    sizes = []
    rows: dict[int, NodeRow] = {}
    while watch.num_pending:
        changes = watch.take(6)
        sizes.append(len(changes.rows))
        add(rows, changes)
        insert(cache, [3, 3])  # the tree goes on changing between two slices, a few times
        if len(sizes) > 10:
            break
    assert max(sizes) == 6
    drain(watch, rows)
    assert rows == as_it_is(cache)


def test_nothing_is_noted_while_nobody_watches():
    cache, watch = watched()
    watch.close()
    insert(cache, [1, 2, 3])
    assert cache.pins.touched is None
    assert watch.num_pending == 0


def test_a_tree_is_watched_once_at_a_time():
    cache, watch = watched()
    with pytest.raises(InvalidConfig, match="close the other"):
        TreeWatch(cache.tree, cache.pins)
    watch.close()
    TreeWatch(cache.tree, cache.pins).close()


def test_a_node_is_found_by_its_id_until_it_is_gone():
    cache, watch = watched()
    insert(cache, [1, 2, 3])
    (row,) = (row for row in watch.take(9).rows if row.parent)
    node = watch.node(row.node_id)
    assert node is not None
    assert node.end == 3
    cache.evict(3)
    assert watch.node(row.node_id) is None
    assert watch.node(99) is None
