"""Chained block hashes: the names by which other programs know our blocks.

Owns: what goes into a hash, its encoding, and the hashes of all blocks of a tree.  Does not know:
events, sockets, who asks.
Idea: a block's hash covers its parent's hash, its own tokens, and the keys that set its namespace
apart.  So equal hashes mean equal prefixes, and a program that has never seen the tree can tell
from a prompt alone which blocks of it are cached.

    hash = SHA-256 of canonical CBOR of [hash of the parent, [tokens …], [[key, value …] …] or null]

Source: vLLM's `sha256_cbor`, with which these hashes agree; CBOR as in RFC 8949, section 4.2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from struct import Struct
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from radixcache.errors import InvariantViolation
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, Packed
from radixcache.tree import RadixTree

DIGEST_BYTES = 32
"""Bytes of one block hash."""

ExtraKeys = tuple[tuple[str | int, ...], ...]
"""What sets a block apart beside its tokens: tagged tuples, such as `(("cache_salt", "s"),)`."""

Cbor = int | bytes | str | tuple["Cbor", ...] | None
"""What `encode_cbor` can encode."""

_UNSIGNED = 0
_BYTES = 2
_TEXT = 3
_ARRAY = 4
_NULL = b"\xf6"
_TWO_BYTES = Struct(">BH").pack
_FOUR_BYTES = Struct(">BI").pack
_EIGHT_BYTES = Struct(">BQ").pack
_FEW_TOKENS = 64  # from here on numpy's fixed cost of about 15 µs is earned back


def encode_cbor(value: Cbor) -> bytes:
    """Encode numbers from 0 to 2⁶⁴ − 1, bytes, text, tuples and None as canonical CBOR.

    >>> encode_cbor((1, 500, "a", None)).hex()
    '84011901f46161f6'
    """
    if value is None:
        return _NULL
    if isinstance(value, int):
        return _head(_UNSIGNED, value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    return _head(_ARRAY, len(value)) + b"".join(map(encode_cbor, value))


def _head(major: int, number: int) -> bytes:
    """The type of an item and its value or length, in as few bytes as will do."""
    kind = major << 5
    if number < 24:
        return bytes((kind | number,))
    if number < 1 << 8:
        return bytes((kind | 24, number))
    if number < 1 << 16:
        return _TWO_BYTES(kind | 25, number)
    if number < 1 << 32:
        return _FOUR_BYTES(kind | 26, number)
    return _EIGHT_BYTES(kind | 27, number)


ROOT_HASH = sha256(encode_cbor("vllm-none-hash")).digest()
"""What stands for the parent in the hash of a first block."""

_BEFORE_PARENT = _head(_ARRAY, 3) + _head(_BYTES, DIGEST_BYTES)


def wire_int(digest: bytes) -> int:
    """Return a block hash as it goes over the wire: its low 64 bits, big-endian, unsigned.

    >>> wire_int(bytes(30) + b"\\x01\\x02")
    258
    """
    return int.from_bytes(digest[-8:], "big")


class BlockHasher:
    """Hashes blocks of one engine.  Two blocks with different prefixes or namespaces never agree.

    model          the model whose blocks bear no mark of it: vLLM's hashes know no models, as each
                   of its engines serves one
    adapter_paths  where an adapter was loaded from, by its name, as vLLM's hashes cover the path;
                   read at each call, so entries may be added, but must not change while blocks of
                   the adapter are cached

    Adapter and salt go into the hash as in vLLM.  Another model than `model`, and an epoch other
    than 0, are keys of our own in the first block, from where the chain carries them on.

    >>> from radixcache import pack_tokens
    >>> hasher, tokens = BlockHasher(), pack_tokens(range(32))
    >>> [digest.hex()[:8] for digest in hasher.hashes(Namespace(), tokens, block_size=16)]
    ['dc918a88', 'c300ec27']
    """

    __slots__ = ("adapter_paths", "model")

    def __init__(self, *, model: str = "", adapter_paths: Mapping[str, str] | None = None) -> None:
        self.model = model
        self.adapter_paths: Mapping[str, str] = {} if adapter_paths is None else adapter_paths

    def extra_keys(self, namespace: Namespace) -> tuple[ExtraKeys, ExtraKeys]:
        """Return what a namespace adds to the hash of its first block, and of any later block."""
        later: ExtraKeys = ()
        if namespace.adapter:
            path = self.adapter_paths.get(namespace.adapter)
            later = (("lora", namespace.adapter, *(() if path is None else (path,))),)
        first = later
        if namespace.salt:
            first += (("cache_salt", namespace.salt),)
        if namespace.model != self.model:
            first += (("model", namespace.model),)
        if namespace.epoch:
            first += (("epoch", namespace.epoch),)
        return first, later

    def hashes(
        self, namespace: Namespace, tokens: Packed, *, block_size: int, parent: bytes = b""
    ) -> list[bytes]:
        """Hash the whole blocks of a run of tokens, each with the one before as its parent.

        tokens   packed ids; what is left over at the end is no block
        parent   hash of the block before the first, empty where the run begins a prompt
        returns  32 bytes a block

        About 1 µs a block of 16 tokens, and 5 µs for a single one.
        """
        first, later = (encode_cbor(keys or None) for keys in self.extra_keys(namespace))
        keys = later if parent else first
        parent = parent or ROOT_HASH
        digests = []
        for block in _encode_blocks(tokens, block_size):
            parent = sha256(b"".join((_BEFORE_PARENT, parent, block, keys))).digest()
            digests.append(parent)
            keys = later
        return digests


def _encode_blocks(tokens: Packed, block_size: int) -> list[bytes]:
    """Each whole block of a run as a CBOR array of token ids."""
    head = _head(_ARRAY, block_size)
    num_blocks = len(tokens) // (block_size * TOKEN_BYTES)
    ids = np.frombuffer(tokens, np.uint32, num_blocks * block_size)
    if len(ids) <= _FEW_TOKENS:
        items = [_head(_UNSIGNED, token) for token in ids.tolist()]
        starts = range(0, len(items), block_size)
        return [head + b"".join(items[start : start + block_size]) for start in starts]
    encoded, lengths = _encode_many(ids)
    ends = lengths.reshape(num_blocks, block_size).sum(axis=1).cumsum().tolist()
    return [head + encoded[s:e] for s, e in zip([0, *ends], ends, strict=False)]


def _encode_many(ids: NDArray[np.uint32]) -> tuple[bytes, NDArray[np.uint8]]:
    """All ids end to end and the bytes of each: five are made, of which those needed are kept.

    below                 24   2⁸            2¹⁶                 2³²
    bytes that are kept   id   24, id        25, id >> 8, id     26, id >> 24, id >> 16, …
    """
    two, three, five = ids >= 24, ids >= 1 << 8, ids >= 1 << 16
    kinds = np.add(two, three, dtype=np.uint8) + five
    made = np.empty((len(ids), 5), np.uint8)
    made[:, 0] = np.where(two, kinds + 23, ids)
    made[:, 1:] = ids.astype(">u4").view(np.uint8).reshape(-1, 4)
    kept = np.empty((len(ids), 5), np.bool_)
    kept[:, 0] = True
    kept[:, 1], kept[:, 2], kept[:, 3], kept[:, 4] = five, five, three, two
    return made[kept].tobytes(), 1 + kinds + five


class Chain(Protocol):
    """How the blocks of a run are hashed, each with the one before as its parent."""

    def __call__(
        self, namespace: Namespace, tokens: Packed, *, block_size: int, parent: bytes
    ) -> Sequence[bytes]:
        """Return a hash a block; `parent` is empty where the run begins a prompt."""


class Grown(NamedTuple):
    """Hashes of published blocks, and of their `parent`, the block before: empty for none."""

    parent: bytes
    hashes: Sequence[bytes]


class ChainTable:
    """The hash of every block in a tree, told of its changes as an observer is.

    chain  how a run of blocks is hashed
    width  bytes of one hash; what is kept is that for each cached block, and an entry a node

    A table that was cleared knows nothing of the blocks that are cached then, nor of any that are
    published behind them: whoever lists hashes by the table never meets one without its parent.
    """

    __slots__ = ("_chain", "_runs", "_width")

    def __init__(self, chain: Chain, width: int) -> None:
        self._chain = chain
        self._width = width
        self._runs: dict[int, tuple[Node, bytearray]] = {}  # node_id → hashes of its edge

    def stored(self, node: Node, num_blocks: int) -> Grown | None:
        """Hash the last blocks of an edge; None where the block before them is not known."""
        run = self._run(node)
        is_longer = num_blocks < len(node.block_ids)
        parent = self._last(run) if is_longer else self._hash_above(node)
        if parent is None:
            return None
        block_size = node.num_tokens // len(node.block_ids)
        tokens = bytes(node.edge[-num_blocks * block_size * TOKEN_BYTES :])
        hashes = self._chain(node.namespace, tokens, block_size=block_size, parent=parent)
        _, run = self._runs.setdefault(node.node_id, (node, bytearray()))
        run += b"".join(hashes)
        return Grown(parent, hashes)

    def removed(self, node: Node, num_blocks: int) -> list[bytes]:
        """Forget the last blocks of an edge; return their hashes, the leaf's end first."""
        run = self._run(node)
        if run is None:
            return []
        keep = len(run) - num_blocks * self._width
        gone = self._leaf_first(run[keep:])
        del run[keep:]
        if not run:
            del self._runs[node.node_id]
        return gone

    def split(self, upper: Node, lower: Node) -> None:
        """Divide the hashes of an edge that was cut."""
        run = self._run(lower)
        if run is not None:
            cut = len(upper.block_ids) * self._width
            self._runs[upper.node_id] = (upper, run[:cut])
            del run[:cut]

    def clear(self) -> list[list[bytes]]:
        """Forget all; return the hashes of each edge, every block before its parent."""
        deepest_first = sorted(self._runs.values(), key=lambda entry: -entry[0].start)
        self._runs = {}
        return [self._leaf_first(run) for _, run in deepest_first]

    def check(self, tree: RadixTree) -> None:
        """Raise InvariantViolation unless each hash kept is that of a block in the tree."""
        seen = 0
        for node in tree.walk():
            run = self._run(node)
            if run is None:
                continue
            seen += 1
            parent = self._hash_above(node)
            if parent is None:
                raise InvariantViolation(f"hashes of {node!r} are known, but its parent's are not")
            block_size = node.num_tokens // len(node.block_ids)
            edge = bytes(node.edge)
            hashes = self._chain(node.namespace, edge, block_size=block_size, parent=parent)
            if run != b"".join(hashes):
                raise InvariantViolation(f"hashes of {node!r} are not those of its blocks")
        if seen != len(self._runs):
            raise InvariantViolation(f"hashes of {len(self._runs) - seen} nodes off the tree")

    def _run(self, node: Node) -> bytearray | None:
        entry = self._runs.get(node.node_id)
        return entry[1] if entry else None

    def _last(self, run: bytearray | None) -> bytes | None:
        return None if run is None else bytes(run[-self._width :])

    def _hash_above(self, node: Node) -> bytes | None:
        """Hash of the block before an edge: b"" at a root, None where it is not known."""
        if node.parent is None or node.parent.parent is None:
            return b""
        return self._last(self._run(node.parent))

    def _leaf_first(self, run: bytearray) -> list[bytes]:
        width = self._width
        return [bytes(run[at : at + width]) for at in range(len(run) - width, -1, -width)]
