"""Two second opinions of what a cache told: from its calls of observers, and from its wire events.

Owns: a ledger of the calls, an index of the events, and block hashes computed the slow, plain way.
Does not know: node ids, tables of hashes, how anything is kept in step.
Idea: nothing here is shared with what it judges.  The ledger finds whole prefixes by walking up the
tree, the index knows nothing but decoded bytes, and a hash is encoded item by item.

    cache = RadixCache(config, observers=[ledger, recorder])
    index.apply(recorder.batch(0.0))
    assert index.blocks == expected_blocks(ledger.announced, config.block_size)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import msgspec

from radixcache import Namespace, RadixCache, unpack_tokens
from radixcache.node import Node

Prefix = tuple[Namespace, tuple[int, ...]]

FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Fields that a reader may count on, in the order of the array form."""


class WrongEvents(AssertionError):
    """The events, or the calls of observers, contradict each other or the rules of the stream."""


def hold(condition: bool, detail: str) -> None:
    if not condition:
        raise WrongEvents(detail)


class Block(NamedTuple):
    """What an index knows of one block."""

    parent: int | None
    tokens: tuple[int, ...]
    lora_name: str | None


class Indexer:
    """Applies messages as a router would, and refuses what breaks the rules of the stream."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.num_events = 0

    def apply(self, payload: bytes) -> list[dict[str, Any]]:
        """Apply one message; return its events as maps."""
        _, events, _ = msgspec.msgpack.decode(payload)
        maps = [event if isinstance(event, dict) else as_map(event) for event in events]
        for event in maps:
            self.num_events += 1
            hold(set(FIELDS[event["type"]]) <= event.keys(), f"a field is missing: {event}")
            getattr(self, event["type"])(event)
        return maps

    def BlockStored(self, event: dict[str, Any]) -> None:  # noqa: N802  named as on the wire
        hashes, size = event["block_hashes"], event["block_size"]
        tokens, parent = event["token_ids"], event["parent_block_hash"]
        hold(len(hashes) >= 1, "nothing was stored")
        hold(len(tokens) == len(hashes) * size, "tokens and blocks differ in number")
        hold(parent is None or parent in self.blocks, f"the parent {parent} is not stored")
        for i, block in enumerate(hashes):
            hold(block not in self.blocks, f"{block} is stored twice")
            own = tuple(tokens[i * size : (i + 1) * size])
            self.blocks[block] = Block(parent, own, event["lora_name"])
            parent = block

    def BlockRemoved(self, event: dict[str, Any]) -> None:  # noqa: N802
        hold(len(event["block_hashes"]) >= 1, "nothing was removed")
        for block in event["block_hashes"]:
            hold(block in self.blocks, f"{block} is removed, but was not stored")
            del self.blocks[block]
            parents = [known.parent for known in self.blocks.values()]
            hold(block not in parents, f"{block} is removed before a block behind it")

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:  # noqa: N802
        hold(not self.blocks, "a clear without the removal of every block before it")


def as_map(event: list[Any]) -> dict[str, Any]:
    """An event in array form as a map."""
    names = ("type", *FIELDS[event[0]], "extra_keys")
    return dict(zip(names, event, strict=False))


class Ledger:
    """Listens to a cache, and holds it to the contract of observers.

    cached   every cached prefix of whole blocks, with its block
    silent   those of them that nobody was told of since everything was cleared
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cached: dict[Prefix, int] = {}
        self.silent: set[Prefix] = set()

    @property
    def announced(self) -> set[Prefix]:
        """The cached prefixes that readers of the events must know."""
        return self.cached.keys() - self.silent

    def cleared(self) -> None:
        """From here on, nothing that is cached counts, nor what is published behind it."""
        self.silent = set(self.cached)

    def stored(self, node: Node, num_blocks: int) -> None:
        for prefix, block in self.edge(node)[-num_blocks:]:
            before = self._before(prefix)
            hold(prefix not in self.cached, f"{prefix} is stored twice")
            hold(not before[1] or before in self.cached, f"{prefix} is stored before its parent")
            self.cached[prefix] = block
            if before in self.silent:
                self.silent.add(prefix)

    def removed(self, node: Node, num_blocks: int) -> None:
        for prefix, block in reversed(self.edge(node)[-num_blocks:]):
            hold(self.cached.pop(prefix, None) == block, f"{prefix} is removed, but not stored")
            hold(
                all(self._before(other) != prefix for other in self.cached),
                f"{prefix} is removed before what follows it",
            )
            self.silent.discard(prefix)

    def split(self, upper: Node, lower: Node) -> None:
        hold(lower.parent is upper, "the upper part is not the parent of the lower")
        for prefix, block in self.edge(upper) + self.edge(lower):
            hold(self.cached.get(prefix) == block, f"{prefix} has moved by a split")

    def compare(self, cache: RadixCache) -> None:
        """Raise WrongEvents unless the cache holds exactly what it told of."""
        paths: dict[int | None, tuple[int, ...]] = {None: ()}
        cached: dict[Prefix, int] = {}
        for node in cache.view().nodes:
            path = paths[node.parent]
            for i, block in enumerate(node.block_ids):
                end = (i + 1) * self.block_size
                cached[node.namespace, path + tuple(unpack_tokens(node.tokens)[:end])] = block
            paths[node.node_id] = path + tuple(unpack_tokens(node.tokens))
        hold(self.cached == cached, f"told of {self.cached}, but {cached} are cached")

    def _before(self, prefix: Prefix) -> Prefix:
        namespace, tokens = prefix
        return namespace, tokens[: -self.block_size]

    def edge(self, node: Node) -> list[tuple[Prefix, int]]:
        """The whole-block prefixes that end on an edge, with their blocks."""
        above: list[int] = []
        up = node.parent
        while up is not None:
            above[:0] = unpack_tokens(up.edge)
            up = up.parent
        path = tuple(above + unpack_tokens(node.edge))
        ends = range(len(above) + self.block_size, len(path) + 1, self.block_size)
        prefixes = [(node.namespace, path[:end]) for end in ends]
        return list(zip(prefixes, node.block_ids, strict=True))


def expected_blocks(prefixes: Iterable[Prefix], block_size: int) -> dict[int, Block]:
    """What an index must hold where exactly these prefixes are cached."""
    expected = {}
    for namespace, tokens in prefixes:
        before = tokens[:-block_size]
        parent = low_64_bits(plain_hash(namespace, before, block_size)) if before else None
        block = Block(parent, tokens[-block_size:], namespace.adapter or None)
        expected[low_64_bits(plain_hash(namespace, tokens, block_size))] = block
    return expected


@cache
def plain_hash(namespace: Namespace, tokens: tuple[int, ...], block_size: int) -> bytes:
    """Hash of the last block of a whole-block prefix, by the rule as it is written."""
    before = tokens[:-block_size]
    if before:
        parent = plain_hash(namespace, before, block_size)
    else:
        parent = hashlib.sha256(plain_cbor("vllm-none-hash")).digest()
    keys: list[list[object]] = []
    if namespace.adapter:
        keys.append(["lora", namespace.adapter])
    if namespace.salt and not before:
        keys.append(["cache_salt", namespace.salt])
    if namespace.model and not before:
        keys.append(["model", namespace.model])
    if namespace.epoch and not before:
        keys.append(["epoch", namespace.epoch])
    item = [parent, list(tokens[-block_size:]), keys or None]
    return hashlib.sha256(plain_cbor(item)).digest()


def low_64_bits(digest: bytes) -> int:
    return int(digest.hex(), 16) % 2**64


def plain_cbor(item: Any) -> bytes:
    """Canonical CBOR, item by item."""
    if item is None:
        return b"\xf6"
    if isinstance(item, int):
        return cbor_start(0, item)
    if isinstance(item, bytes):
        return cbor_start(2, len(item)) + item
    if isinstance(item, str):
        return cbor_start(3, len(item.encode())) + item.encode()
    return cbor_start(4, len(item)) + b"".join(plain_cbor(each) for each in item)


def cbor_start(kind: int, number: int) -> bytes:
    if number < 24:
        return bytes([kind * 32 + number])
    width = next(width for width in (1, 2, 4, 8) if number < 256**width)
    return bytes([kind * 32 + {1: 24, 2: 25, 4: 26, 8: 27}[width]]) + number.to_bytes(width, "big")
