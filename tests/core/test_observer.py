"""The contract of observers: each block is told of once as it comes, and once as it goes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from radixcache import CacheConfig, CacheError, RadixCache
from radixcache.node import Node
from radixcache.observer import TreeObserver
from radixcache.publishing import Publisher
from radixcache.room import Room
from tests.core.conftest import new_cache
from tests.core.serving import acquire, insert
from tests.core.test_state_machine import BOUNDED, LONG, STRESS, CacheMachine
from tests.support.indexer import Ledger
from tests.support.planted import PlantedBug
from tests.support.strategies import configs


class ObservedMachine(CacheMachine):
    """Random histories of a cache that is listened to; the other eyes are shut."""

    eyes = frozenset()

    @initialize(config=configs())
    def start(self, config: CacheConfig) -> None:
        super().start(config)
        self.ledger = Ledger(config.block_size)
        self.cache = RadixCache(config, observers=[self.ledger, *self.observers(config)])

    def observers(self, config: CacheConfig) -> list[TreeObserver]:
        """Who listens beside the ledger."""
        return []

    @invariant()
    def everything_holds(self) -> None:
        self.ledger.compare(self.cache)


def run_histories(machine: type[ObservedMachine]) -> None:
    """Play the bounded histories, without reducing a failure."""
    run_state_machine_as_test(
        machine, settings=settings(BOUNDED, phases=[Phase.generate], print_blob=False)
    )


FEWER = settings(BOUNDED, max_examples=60)
"""The same histories are played with the recorders of events too."""


class TestAnyHistoryIsToldBlockByBlock(ObservedMachine.TestCase):
    settings = LONG if STRESS else FEWER


class Calls:
    """Notes the calls, each block by its id."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def stored(self, node: Node, num_blocks: int) -> None:
        self.calls.append(("stored", *node.block_ids[-num_blocks:]))

    def removed(self, node: Node, num_blocks: int) -> None:
        self.calls.append(("removed", *node.block_ids[-num_blocks:]))

    def split(self, upper: Node, lower: Node) -> None:
        self.calls.append(("split", tuple(upper.block_ids), tuple(lower.block_ids)))


@pytest.fixture
def calls() -> Calls:
    return Calls()


def listened_to(calls: Calls, num_blocks: int = 16) -> RadixCache:
    return RadixCache(CacheConfig(num_blocks=num_blocks, block_size=1), observers=[calls])


def test_a_new_prompt_is_told_of_once_and_its_second_time_not_at_all(calls):
    cache = listened_to(calls)
    first = insert(cache, range(4))
    insert(cache, range(4))
    assert calls.calls[0] == ("stored", *first.block_ids)
    assert {call[0] for call in calls.calls[1:]} <= {"split"}


def test_a_growing_sequence_tells_of_what_is_new_only(calls):
    cache = listened_to(calls)
    lease = acquire(cache, range(4))
    cache.commit(lease, 1)
    cache.commit(lease, 1)
    cache.commit(lease, 4)
    blocks = lease.block_table
    assert calls.calls == [("stored", blocks[0]), ("stored", *blocks[1:])]


def test_a_prompt_that_leaves_an_edge_splits_it_before_its_own_blocks_are_told_of(calls):
    cache = listened_to(calls)
    old = insert(cache, [1, 2, 3]).block_ids
    new = insert(cache, [1, 2, 4, 5]).block_ids
    assert calls.calls[1:] == [("split", old[:2], old[2:]), ("stored", *new[2:])]


def test_eviction_tells_of_leaves_before_their_parents_and_of_a_tail_alone(calls):
    cache = listened_to(calls)
    old = insert(cache, [1, 2, 3]).block_ids
    new = insert(cache, [1, 4, 5]).block_ids
    del calls.calls[:]
    cache.evict(3)
    assert calls.calls == [("removed", *old[1:]), ("removed", new[2])]
    cache.evict(9)
    assert calls.calls[2:] == [("removed", new[1]), ("removed", new[0])]


def test_every_observer_is_told():
    both = Calls(), Calls()
    cache = RadixCache(CacheConfig(num_blocks=4, block_size=1), observers=both)
    insert(cache, [1, 2])
    assert both[0].calls == both[1].calls != []


def test_without_observers_nothing_is_different():
    assert insert(new_cache(), range(4)) == insert(listened_to(Calls()), range(4))


BUGS = {
    "a removal is not told": (Room, "give_up", "observer.removed(leaf, num_blocks)", "pass"),
    "what is new is told twice": (
        Publisher,
        "_publish",
        "for observer in self._room.observers:",
        "for observer in self._room.observers * 2:",
    ),
    "a removal is told of more than goes": (
        Room,
        "give_up",
        "observer.removed(leaf, num_blocks)",
        "observer.removed(leaf, len(leaf.block_ids))",
    ),
    "a longer edge is told of whole": (
        Publisher,
        "_publish",
        "observer.stored(leaf, len(block_ids))",
        "observer.stored(leaf, len(leaf.edge) // 4)",
    ),
    "a split is told the wrong way round": (
        Publisher,
        "upper",
        "observer.split(upper, node)",
        "observer.split(node, upper)",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_ledger_catches_a_cache_in_which(name, monkeypatch):
    owner, method, old, new = BUGS[name]
    PlantedBug(name, (owner, method), edit=(old, new), seen_by="ledger").plant(monkeypatch)
    with pytest.raises((AssertionError, CacheError, LookupError, ValueError)):
        run_histories(ObservedMachine)
