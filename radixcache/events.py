"""What happens to the blocks of a cache, in the form in which routers and indexers take it.

Owns: the records, their encoding, and which block has which hash.  Does not know: sockets, threads,
clocks, who reads.
Idea: whoever applies the events in their order holds exactly the blocks that the tree holds, and at
each moment every block's parent too: parents are stored before their children, and removed after.

    recorder = EventRecorder()
    cache = RadixCache(config, observers=[recorder])
    …one step of the engine…
    if recorder.num_pending:
        publish(recorder.batch(time.time()))

Source: vLLM's KV events, map form since June 2026 (msgpack; batches are arrays).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from radixcache.hashing import DIGEST_BYTES, BlockHasher, ChainTable, ExtraKeys, wire_int
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, unpack_tokens
from radixcache.tree import RadixTree


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Blocks that follow one another were published.

    block_hashes       low 64 bits of each block's hash, in order
    parent_block_hash  that of the block before the first, None where a prompt begins
    token_ids          tokens of all the blocks
    block_size         tokens a block
    lora_id            always None; readers expect the field
    medium             where the blocks are, "GPU"
    lora_name          name of the adapter, None for none
    extra_keys         for each block what its hash covers beside its tokens; left out where that
                       is nothing for all of them
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: None
    medium: str | None
    lora_name: str | None
    extra_keys: tuple[ExtraKeys | None, ...] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks were given up, each of them after those that follow it.

    block_hashes  low 64 bits of each block's hash, the last of the prefix first
    medium        where the blocks were
    """

    block_hashes: tuple[int, ...]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block is left.  Each one's removal was told before."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
"""One event; `encode_batch` makes bytes of many."""


def encode_batch(
    events: Sequence[Event], ts: float, *, dp_rank: int | None = None, as_arrays: bool = False
) -> bytes:
    """Encode events as one msgpack message, `[ts, events, dp_rank]`.

    ts         when they happened, in seconds since 1970
    dp_rank    rank of the engine among data-parallel ones, if there are several
    as_arrays  each event as an array, type first, for readers older than the map form

    >>> msgspec.msgpack.decode(encode_batch([AllBlocksCleared()], 1.5))
    [1.5, [{'type': 'AllBlocksCleared'}], None]
    """
    written = [_as_array(event) for event in events] if as_arrays else events
    return msgspec.msgpack.encode((float(ts), written, dp_rank))


def _as_array(event: Event) -> tuple[object, ...]:
    fields = msgspec.structs.astuple(event)
    if isinstance(event, BlockStored) and event.extra_keys is None:
        fields = fields[:-1]
    return (type(event).__name__, *fields)


class EventRecorder:
    """Listens to a `RadixCache` and keeps what to tell others.  A `TreeObserver`.

    hasher     how blocks are named; `BlockHasher()` unless given
    medium     where the blocks are
    as_arrays  how `batch` writes events, see `encode_batch`

    Keeps 32 bytes for each cached block and nothing for others; events are kept until they are
    taken, so take them at each step.

    >>> from radixcache import CacheConfig, PrefixKey, RadixCache
    >>> recorder = EventRecorder()
    >>> cache = RadixCache(CacheConfig(num_blocks=4, block_size=2), observers=[recorder])
    >>> lease = cache.acquire(PrefixKey.of([1, 2, 3, 4]))
    >>> _ = cache.commit(lease, 4), cache.release(lease), cache.evict(1)
    >>> [type(event).__name__ for event in recorder.take()]
    ['BlockStored', 'BlockRemoved']
    """

    __slots__ = ("_events", "_hasher", "_medium", "_table", "as_arrays")

    def __init__(
        self,
        hasher: BlockHasher | None = None,
        *,
        medium: str | None = "GPU",
        as_arrays: bool = False,
    ) -> None:
        self._hasher = hasher or BlockHasher()
        self._medium = medium
        self._table = ChainTable(self._hasher.hashes, DIGEST_BYTES)
        self._events: list[Event] = []
        self.as_arrays = as_arrays

    @property
    def num_pending(self) -> int:
        """Events that nobody has taken yet."""
        return len(self._events)

    def take(self) -> list[Event]:
        """Return the events since the last time, in their order, and forget them."""
        events, self._events = self._events, []
        return events

    def batch(self, ts: float, dp_rank: int | None = None) -> bytes:
        """Take the events as one message, see `encode_batch`; one without events is valid too."""
        return encode_batch(self.take(), ts, dp_rank=dp_rank, as_arrays=self.as_arrays)

    def cleared(self) -> None:
        """Tell that no block counts any more: a removal of each, leaves first, then the clear.

        For when the engine's K/V is lost or given up.  What the cache still holds then is not told
        of again, nor is what is published behind it; blocks are told of anew as they are published
        anew.
        """
        for hashes in self._table.clear():
            self._remove(hashes)
        self._events.append(AllBlocksCleared())

    def check(self, tree: RadixTree) -> None:
        """Raise InvariantViolation unless every hash kept is right, and of a block in the tree."""
        self._table.check(tree)

    def stored(self, node: Node, num_blocks: int) -> None:
        """Note that the last blocks of an edge were published; about 2 µs a block of 16 tokens."""
        grown = self._table.stored(node, num_blocks)
        if grown is None:
            return
        block_size = node.num_tokens // len(node.block_ids)
        event = BlockStored(
            block_hashes=tuple(map(wire_int, grown.hashes)),
            parent_block_hash=wire_int(grown.parent) if grown.parent else None,
            token_ids=tuple(unpack_tokens(node.edge[-num_blocks * block_size * TOKEN_BYTES :])),
            block_size=block_size,
            lora_id=None,
            medium=self._medium,
            lora_name=node.namespace.adapter or None,
            extra_keys=self._extra_keys(node, num_blocks, is_first=not grown.parent),
        )
        self._events.append(event)

    def removed(self, node: Node, num_blocks: int) -> None:
        """Note that the last blocks of a leaf are given up."""
        self._remove(self._table.removed(node, num_blocks))

    def split(self, upper: Node, lower: Node) -> None:
        """Note that an edge was cut; no event, as no block came or went."""
        self._table.split(upper, lower)

    def _remove(self, hashes: Sequence[bytes]) -> None:
        if hashes:
            gone = tuple(map(wire_int, hashes))
            self._events.append(BlockRemoved(block_hashes=gone, medium=self._medium))

    def _extra_keys(
        self, node: Node, num_blocks: int, *, is_first: bool
    ) -> tuple[ExtraKeys | None, ...] | None:
        first, later = self._hasher.extra_keys(node.namespace)
        keys = [later or None] * num_blocks
        if is_first:
            keys[0] = first or None
        return tuple(keys) if any(keys) else None
