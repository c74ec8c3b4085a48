"""KV events: whoever applies them holds exactly the blocks that the tree holds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from radixcache import (
    DEFAULT_NAMESPACE,
    CacheConfig,
    CacheError,
    InvariantViolation,
    Namespace,
    RadixCache,
    pack_tokens,
)
from radixcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventRecorder,
    encode_batch,
)
from radixcache.hashing import BlockHasher, ChainTable, wire_int
from radixcache.observer import TreeObserver
from tests.core.serving import acquire, insert
from tests.core.test_hashing import GOLDEN_BLOCKS
from tests.core.test_observer import ObservedMachine, run_histories
from tests.core.test_state_machine import BOUNDED, LONG, STRESS
from tests.support.indexer import FIELDS, Indexer, expected_blocks
from tests.support.planted import PlantedBug


class RecordedMachine(ObservedMachine):
    """Random histories, told twice, in map and in array form, to an index each."""

    def observers(self, config: CacheConfig) -> list[TreeObserver]:
        self.told = [(EventRecorder(as_arrays=as_arrays), Indexer()) for as_arrays in (False, True)]
        return [recorder for recorder, _ in self.told]

    @invariant()
    def everything_holds(self) -> None:
        self.ledger.compare(self.cache)
        expected = expected_blocks(self.ledger.announced, self.cache.config.block_size)
        for recorder, index in self.told:
            index.apply(recorder.batch(0.0))
            assert index.blocks == expected
            assert recorder.num_pending == 0
            recorder.check(self.cache.tree)


class ClearedMachine(RecordedMachine):
    """The same, and now and then everything is told to be lost."""

    @rule()
    def clear(self) -> None:
        self.ledger.cleared()
        for recorder, _ in self.told:
            recorder.cleared()


class TestAnIndexOfTheEventsHoldsExactlyTheTree(RecordedMachine.TestCase):
    settings = LONG if STRESS else BOUNDED


class TestAnIndexHoldsWhatIsPublishedAnewAfterAClear(ClearedMachine.TestCase):
    settings = LONG if STRESS else settings(BOUNDED, max_examples=80)


@pytest.fixture
def recorder() -> EventRecorder:
    return EventRecorder()


@pytest.fixture
def cache(recorder):
    """A cache of blocks of two tokens, recorded; what the recorder kept is checked at the end."""
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=2), observers=[recorder])
    yield cache
    cache.check()
    recorder.check(cache.tree)


def hashes_of(ids: list[int], namespace: Namespace = DEFAULT_NAMESPACE) -> tuple[int, ...]:
    digests = BlockHasher().hashes(namespace, pack_tokens(ids), block_size=2)
    return tuple(map(wire_int, digests))


def test_two_blocks_are_one_event_and_go_as_one(cache, recorder):
    insert(cache, [1, 2, 3, 4])
    hashes = hashes_of([1, 2, 3, 4])
    stored = BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=(1, 2, 3, 4),
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    assert recorder.take() == [stored]
    cache.evict(2)
    assert recorder.take() == [BlockRemoved(block_hashes=hashes[::-1], medium="GPU")]


def test_the_hashes_of_the_events_are_those_of_vllm(recorder):
    cache = RadixCache(CacheConfig(num_blocks=16, block_size=16), observers=[recorder])
    insert(cache, range(40))
    (event,) = recorder.take()
    assert event.block_hashes == tuple(int(digest[-16:], 16) for digest in GOLDEN_BLOCKS)


def test_inserting_a_cached_prefix_again_tells_nothing(cache, recorder):
    insert(cache, [1, 2, 3, 4])
    recorder.take()
    for ids in ([1, 2, 3, 4], [1, 2], [1, 2, 3, 4, 5]):
        insert(cache, ids)
        assert recorder.num_pending == 0


def test_a_prompt_that_diverges_tells_its_tail_only(cache, recorder):
    insert(cache, [1, 2, 3, 4, 5, 6])
    recorder.take()
    insert(cache, [1, 2, 3, 4, 7, 8, 9, 9])
    (event,) = recorder.take()
    hashes = hashes_of([1, 2, 3, 4, 7, 8, 9, 9])
    assert event.parent_block_hash == hashes[1]
    assert event.block_hashes == hashes[2:]
    assert event.token_ids == (7, 8, 9, 9)


def test_a_growing_sequence_tells_each_block_behind_the_one_before(cache, recorder):
    lease = acquire(cache, [1, 2, 3, 4, 5, 6])
    hashes = hashes_of([1, 2, 3, 4, 5, 6])
    for num_tokens, told in ((2, hashes[:1]), (3, ()), (6, hashes[1:])):
        cache.commit(lease, num_tokens)
        events = recorder.take()
        assert [hash_ for event in events for hash_ in event.block_hashes] == list(told)
    assert events[0].parent_block_hash == hashes[0]
    cache.release(lease)


def test_of_two_equal_prompts_of_one_step_only_the_first_is_told(cache, recorder):
    leases = [acquire(cache, [1, 2, 3, 4]) for _ in range(2)]
    for lease in leases:
        cache.commit(lease, 4)
    assert len(recorder.take()) == 1


def test_eviction_tells_the_leaf_first(cache, recorder):
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5, 6])
    recorder.take()
    cache.evict(16)
    removed = [hash_ for event in recorder.take() for hash_ in event.block_hashes]
    first, *_ = hashes_of([1, 2])
    assert sorted(removed[:2]) == sorted((hashes_of([1, 2, 3, 4])[1], hashes_of([1, 2, 5, 6])[1]))
    assert removed[2] == first


def test_each_namespace_has_hashes_of_its_own_and_says_why(cache, recorder):
    spaces = [
        Namespace(),
        Namespace(adapter="sql"),
        Namespace(salt="s"),
        Namespace(epoch=1),
        Namespace(model="m"),
        Namespace(adapter="sql", salt="s"),
    ]
    for space in spaces:
        insert(cache, [1, 2, 3, 4], space)
    events = recorder.take()
    assert len({hash_ for event in events for hash_ in event.block_hashes}) == 2 * len(spaces)
    assert [event.lora_name for event in events] == [None, "sql", None, None, None, "sql"]
    lora = ("lora", "sql")
    assert [event.extra_keys for event in events] == [
        None,
        ((lora,), (lora,)),
        ((("cache_salt", "s"),), None),
        ((("epoch", 1),), None),
        ((("model", "m"),), None),
        ((lora, ("cache_salt", "s")), (lora,)),
    ]


def test_everything_lost_is_removed_leaves_first_and_then_cleared(cache, recorder):
    insert(cache, [1, 2, 3, 4])
    insert(cache, [1, 2, 5, 6])
    insert(cache, [1, 2], Namespace(salt="s"))
    index = Indexer()
    index.apply(recorder.batch(0.0))
    assert len(index.blocks) == 4
    recorder.cleared()
    events = index.apply(recorder.batch(1.0))  # it refuses parents before children
    assert index.blocks == {}
    assert [event["type"] for event in events][-1] == "AllBlocksCleared"


def test_after_a_clear_what_is_still_cached_goes_without_a_word(cache, recorder):
    insert(cache, [1, 2, 3, 4])
    recorder.cleared()
    recorder.take()
    insert(cache, [1, 2, 5, 6])  # behind a block that nobody knows any more
    assert recorder.take() == []
    cache.evict(16)
    assert recorder.take() == []
    insert(cache, [1, 2, 5, 6])
    assert [event.token_ids for event in recorder.take()] == [(1, 2, 5, 6)]


def test_a_batch_is_time_events_and_rank(cache, recorder):
    insert(cache, [1, 2])
    (digest,) = hashes_of([1, 2])
    assert msgspec.msgpack.decode(recorder.batch(7, 3)) == [
        7.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [digest],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        ],
        3,
    ]
    assert msgspec.msgpack.decode(recorder.batch(8.5)) == [8.5, [], None]


def test_a_batch_holds_arrays_for_older_readers(cache, recorder):
    recorder.as_arrays = True
    insert(cache, [1, 2])
    insert(cache, [1, 2], Namespace(salt="s"))
    cache.evict(1)
    recorder.cleared()
    (plain,), (salted,) = hashes_of([1, 2]), hashes_of([1, 2], Namespace(salt="s"))
    ts, events, rank = msgspec.msgpack.decode(recorder.batch(0.5))
    assert (ts, rank) == (0.5, None)
    assert events == [
        ["BlockStored", [plain], None, [1, 2], 2, None, "GPU", None],
        ["BlockStored", [salted], None, [1, 2], 2, None, "GPU", None, [[["cache_salt", "s"]]]],
        ["BlockRemoved", [plain], "GPU"],
        ["BlockRemoved", [salted], "GPU"],
        ["AllBlocksCleared"],
    ]


def test_every_field_that_readers_count_on_is_there_even_if_null():
    recorder = EventRecorder(medium=None)
    cache = RadixCache(CacheConfig(num_blocks=2, block_size=1), observers=[recorder])
    insert(cache, [1])
    cache.evict(1)
    recorder.cleared()
    for event in msgspec.msgpack.decode(recorder.batch(0.0))[1]:
        assert set(event) == {"type", *FIELDS[event["type"]]}


def test_events_that_were_taken_can_be_encoded_elsewhere(cache, recorder):
    insert(cache, [1, 2])
    events = recorder.take()
    insert(cache, [1, 2], Namespace(salt="s"))
    assert msgspec.msgpack.decode(encode_batch(events, 1.0, dp_rank=0))[2] == 0
    assert recorder.num_pending == 1


def test_nothing_stays_of_what_was_evicted(cache, recorder):
    for first in range(200):
        insert(cache, [first, 1, 2, 3], Namespace(salt=str(first % 3)))
        recorder.take()
        recorder.check(cache.tree)  # it complains of each hash that is not of a cached block
    cache.evict(16)
    recorder.take()
    recorder.cleared()
    assert recorder.take() == [AllBlocksCleared()]


def test_a_disabled_cache_tells_nothing(recorder):
    config = CacheConfig(num_blocks=4, block_size=1, enable_prefix_cache=False)
    insert(RadixCache(config, observers=[recorder]), [1, 2, 3])
    assert recorder.take() == []


BUGS = {
    "a split leaves all hashes with the lower part": (ChainTable, "split", "del run[:cut]", "pass"),
    "a split is not noted": (ChainTable, "split", "run is not None", "run is upper"),
    "a split gives the upper part the lower one's hashes": (
        ChainTable,
        "split",
        "(upper, run[:cut])",
        "(upper, run[cut:])",
    ),
    "a child's hash is taken from the begin of its parent's edge": (
        ChainTable,
        "_last",
        "run[-self._width :]",
        "run[: self._width]",
    ),
    "a longer edge goes on from the hash above it": (
        ChainTable,
        "stored",
        "if is_longer else",
        "if run is node else",
    ),
    "a longer edge is hashed from its begin": (
        ChainTable,
        "stored",
        "-num_blocks * block_size * TOKEN_BYTES :",
        ": num_blocks * block_size * TOKEN_BYTES",
    ),
    "a trim forgets the first blocks of the edge": (
        ChainTable,
        "removed",
        "run[keep:])",
        "run[: num_blocks * self._width])",
    ),
    "removed hashes stay in the table": (ChainTable, "removed", "if not run:", "if run is node:"),
    "removed blocks are told parents first": (
        ChainTable,
        "_leaf_first",
        "range(len(run) - width, -1, -width)",
        "range(0, len(run), width)",
    ),
    "the salt is left out": (BlockHasher, "extra_keys", "if namespace.salt:", "if not namespace:"),
    "the adapter is left out": (
        BlockHasher,
        "extra_keys",
        "if namespace.adapter:",
        "if not namespace:",
    ),
    "the salt marks every block": (
        BlockHasher,
        "hashes",
        "keys = later if parent else first",
        "keys = later = first",
    ),
    "no parent is told": (
        EventRecorder,
        "stored",
        "if grown.parent else None",
        "if grown is node else None",
    ),
    "the whole edge's tokens are told": (
        EventRecorder,
        "stored",
        "node.edge[-num_blocks * block_size * TOKEN_BYTES :]",
        "node.edge",
    ),
    "a removal is not told": (
        EventRecorder,
        "removed",
        "self._remove(self._table.removed(node, num_blocks))",
        "self._table.removed(node, 1)",
    ),
}
CLEARING_BUGS = {
    "a clear tells the oldest first": (
        ChainTable,
        "clear",
        "key=lambda entry: -entry[0].start",
        "key=lambda entry: entry[0].start",
    ),
    "a clear leaves the table as it was": (ChainTable, "clear", "self._runs = {}", "pass"),
    "what is published behind a block that nobody knows is told": (
        ChainTable,
        "_last",
        "return None if run is None",
        "return bytes(32) if run is None",
    ),
}


@pytest.mark.parametrize("name", [*BUGS, *CLEARING_BUGS])
def test_a_planted_bug_of_the_recorder_is_caught(name, monkeypatch):
    owner, method, old, new = (BUGS | CLEARING_BUGS)[name]
    PlantedBug(name, (owner, method), edit=(old, new), seen_by="index").plant(monkeypatch)
    machine = ClearedMachine if name in CLEARING_BUGS else RecordedMachine
    with pytest.raises((AssertionError, CacheError, LookupError, ValueError)):
        run_histories(machine)


def test_the_check_of_a_recorder_finds_what_it_missed(cache, recorder):
    insert(cache, [1, 2])
    cache.room.observers = ()
    cache.evict(1)
    with pytest.raises(InvariantViolation, match="off the tree"):
        recorder.check(cache.tree)
    recorder.cleared()
