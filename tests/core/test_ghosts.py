"""The memory of evicted blocks: what was cached once, and when it went."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from radixcache import (
    CacheConfig,
    CacheError,
    InvalidConfig,
    InvariantViolation,
    Namespace,
    PrefixKey,
    RadixCache,
    ghosts,
    pack_tokens,
)
from radixcache.ghosts import Evicted, GhostMemory
from radixcache.node import Node
from radixcache.observer import TreeObserver
from tests.core.serving import acquire, insert
from tests.core.test_observer import ObservedMachine, run_histories
from tests.core.test_state_machine import BOUNDED, LONG, STRESS
from tests.support.indexer import Ledger, Prefix
from tests.support.planted import PlantedBug

PLAIN = Namespace()
NOTHING = Evicted(0, None)
MAX_BLOCKS = 6


class PlainGhosts(Ledger):
    """The same memory as a list of whole prefixes, the oldest first."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.evicted: list[tuple[Prefix, int]] = []
        self.num_evicted = 0

    def stored(self, node: Node, num_blocks: int) -> None:
        super().stored(node, num_blocks)
        self.evicted = [entry for entry in self.evicted if entry[0] not in self.cached]

    def removed(self, node: Node, num_blocks: int) -> None:
        gone = [prefix for prefix, _ in reversed(self.edge(node)[-num_blocks:])]
        super().removed(node, num_blocks)
        self.evicted += [(prefix, self.num_evicted) for prefix in gone]
        self.evicted = self.evicted[-MAX_BLOCKS:]
        self.num_evicted += num_blocks

    def lookup(self, namespace: Namespace, tokens: tuple[int, ...], num_cached: int) -> Evicted:
        times, found = dict(self.evicted), []
        end = num_cached + self.block_size
        while end <= len(tokens) and (namespace, tokens[:end]) in times:
            found.append(times[namespace, tokens[:end]])
            end += self.block_size
        return Evicted(len(found), found[0] if found else None)


class HauntedMachine(ObservedMachine):
    """Random histories; what is remembered of each prompt is asked for all the time."""

    def observers(self, config: CacheConfig) -> list[TreeObserver]:
        self.plain = PlainGhosts(config.block_size)
        self.ghosts = GhostMemory(max_blocks=MAX_BLOCKS, block_size=config.block_size)
        return [self.plain, self.ghosts]

    @invariant()
    def everything_holds(self) -> None:
        self.ghosts.check(self.cache.tree)
        assert len(self.ghosts) == len(self.plain.evicted)
        for namespace, tokens in [*self.past, *(prefix for prefix, _ in self.plain.evicted)]:
            matched = self.cache.match(PrefixKey.of(list(tokens), namespace)).num_tokens
            size = self.plain.block_size
            expected = self.plain.lookup(namespace, tokens, matched - matched % size)
            found = self.ghosts.lookup(namespace, pack_tokens(tokens), num_cached=matched)
            assert found == expected


class TestWhatIsRememberedIsWhatWasEvictedLast(HauntedMachine.TestCase):
    settings = LONG if STRESS else settings(BOUNDED, max_examples=60)


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> GhostMemory:
    return GhostMemory(max_blocks=8, block_size=2, clock=clock)


@pytest.fixture
def cache(memory: GhostMemory):
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=2), observers=[memory])
    yield cache
    cache.check()
    memory.check(cache.tree)


def recalled(memory: GhostMemory, ids: list[int], num_cached: int = 0, **space: str) -> Evicted:
    return memory.lookup(Namespace(**space), pack_tokens(ids), num_cached=num_cached)


def test_what_was_never_there_is_not_remembered(cache, memory):
    insert(cache, [1, 2])
    assert recalled(memory, [3, 4]) == NOTHING
    assert recalled(memory, [1, 2, 3, 4], num_cached=2) == NOTHING


def test_evicted_blocks_are_remembered_with_the_time_of_the_first(cache, memory, clock):
    insert(cache, [1, 2, 3, 4, 5, 6])
    clock.now = 10.0
    cache.evict(1)
    clock.now = 20.0
    cache.evict(1)
    assert recalled(memory, [1, 2, 3, 4, 5, 6, 7, 8], num_cached=2) == Evicted(2, 20.0)
    assert recalled(memory, [1, 2, 3, 4, 9, 9], num_cached=2) == Evicted(1, 20.0)


def test_a_block_begun_counts_as_not_cached(cache, memory):
    insert(cache, [1, 2, 3, 4])
    cache.evict(1)
    assert recalled(memory, [1, 2, 3, 4], num_cached=3) == Evicted(1, 0.0)


def test_blocks_belong_to_their_prefix_and_to_their_namespace(cache, memory):
    insert(cache, [1, 2, 3, 4])
    cache.evict(8)
    assert recalled(memory, [1, 2, 3, 4]).num_blocks == 2
    assert recalled(memory, [3, 4]) == NOTHING
    assert recalled(memory, [1, 2, 3, 4], salt="s") == NOTHING


def test_what_is_cached_again_is_no_ghost(cache, memory, clock):
    insert(cache, [1, 2])
    cache.evict(1)
    assert len(memory) == 1
    insert(cache, [1, 2])
    assert len(memory) == 0
    clock.now = 5.0
    cache.evict(1)
    assert recalled(memory, [1, 2]) == Evicted(1, 5.0)


def test_the_oldest_are_forgotten_first(cache, memory):
    for first in range(10):
        insert(cache, [first, 0])
        cache.evict(1)
    assert len(memory) == 8
    remembered = [recalled(memory, [first, 0]).num_blocks for first in range(10)]
    assert remembered == [0, 0] + [1] * 8


def test_of_a_long_prompt_the_end_is_forgotten_first():
    memory = GhostMemory(max_blocks=2, block_size=1)
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), observers=[memory])
    insert(cache, [1, 2, 3, 4])
    cache.evict(4)
    assert recalled(memory, [1, 2, 3, 4]) == Evicted(2, 0)


def test_without_a_clock_time_is_blocks_evicted_before():
    memory = GhostMemory(max_blocks=8, block_size=1)
    cache = RadixCache(CacheConfig(num_blocks=8, block_size=1), observers=[memory])
    insert(cache, [1, 2, 3])
    insert(cache, [4])
    cache.evict(4)
    assert recalled(memory, [1, 2, 3]).first_at == 0
    assert recalled(memory, [4]).first_at == 3


def test_eviction_to_make_room_is_remembered_too(cache, memory):
    insert(cache, [1, 2, 3, 4])
    cache.release(acquire(cache, range(10, 26)))
    assert recalled(memory, [1, 2, 3, 4]).num_blocks == 2


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_a_memory_of_nothing_is_refused(sizes):
    with pytest.raises(InvalidConfig):
        GhostMemory(max_blocks=sizes[0], block_size=sizes[1])


def test_check_finds_a_memory_that_outgrew_its_bound(cache, memory):
    insert(cache, [1, 2, 3, 4])
    cache.evict(2)
    memory._max_blocks = 1
    with pytest.raises(InvariantViolation, match="remembered"):
        memory.check(cache.tree)
    memory._max_blocks = 2


BUGS = {
    "what is cached again stays a ghost": (
        GhostMemory,
        "stored",
        "self._ghosts.pop(ghost, None)",
        "pass",
    ),
    "the newest is forgotten first": (GhostMemory, "removed", "last=False", "last=True"),
    "nothing is forgotten": (
        GhostMemory,
        "removed",
        "while len(self._ghosts) > self._max_blocks:",
        "while False:",
    ),
    "time stands still": (GhostMemory, "removed", "self._num_evicted += num_blocks", "pass"),
    "ghosts behind a gap are counted": (
        GhostMemory,
        "lookup",
        "times.index(None) if None in times else len(times)",
        "len(times) - times.count(None)",
    ),
    "the cached part is counted too": (GhostMemory, "lookup", "hashes[first:]", "hashes"),
    "a block's hash forgets what is before it": (
        ghosts,
        "_hashes",
        "hash((current, run[end - block_bytes : end]))",
        "hash(run[end - block_bytes : end])",
    ),
    "a hash forgets the namespace": (ghosts, "_hashes", "hash(namespace) if", "0 if"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_the_memory_is_caught(name, monkeypatch):
    owner, method, old, new = BUGS[name]
    PlantedBug(name, (owner, method), edit=(old, new), seen_by="plain").plant(monkeypatch)
    with pytest.raises((AssertionError, CacheError, LookupError, ValueError)):
        run_histories(HauntedMachine)
