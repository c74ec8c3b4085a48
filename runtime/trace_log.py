"""A log of what was asked for that `radixcache simulate` can replay, without a word of it.

Owns: the lines, and the file.  Does not know: HTTP, tenants' keys, caches.
Idea: a block is written as a keyed hash of its whole prefix.  Whoever has the log can tell which
requests share how much, and nothing else: the key is drawn anew for each process and kept nowhere.

    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...],
     "output_hash_ids": [...], "block_size": n, "tenant": "…"}
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b
from typing import IO

import msgspec

from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES, Packed
from runtime.sequence import Sequence

_HASH_BYTES = 8
_logger = logging.getLogger("radixcache.trace")


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request; whole blocks alone, the answer's behind the prompt's."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    output_hash_ids: list[int]
    block_size: int
    tenant: str = ""


class TraceLog:
    """Writes a line for each request as it ends; of one thread, the engine's.

    stream      where lines go
    block_size  tokens a block
    clock       seconds, never backwards
    key         a secret of the process, 16 to 64 bytes
    tenant_of   whose a namespace is; None for nobody's

    About 1 µs a block.  Where the stream can't be written to, it says so once and writes no more.
    Branches of one request count as one, with the answer of the first.
    """

    def __init__(
        self,
        stream: IO[bytes],
        *,
        block_size: int,
        clock: Callable[[], float],
        key: bytes,
        tenant_of: Callable[[Namespace], str | None] = lambda namespace: None,
    ) -> None:
        self._stream: IO[bytes] | None = stream
        self._block_size = block_size
        self._clock = clock
        self._began = clock()
        self._key = key
        self._tenant_of = tenant_of
        self._arrived: dict[str, float] = {}  # by request id, of those that have not ended

    def arrive(self, sequence: Sequence) -> None:
        """Note when a request came."""
        self._arrived[sequence.request.request_id] = self._clock()

    def end(self, sequence: Sequence) -> None:
        """Write the line of a request, unless it was never let in."""
        if sequence.index:
            return
        arrived = self._arrived.pop(sequence.request.request_id, None)
        if arrived is None or sequence.lease is None:
            return
        request = sequence.request
        hashes = self._hashes(request.namespace, sequence.lease.tokens)
        first = sequence.num_prompt_tokens // self._block_size
        line = TraceLine(
            timestamp=round(1000 * (arrived - self._began), 3),
            input_length=sequence.num_prompt_tokens,
            output_length=len(sequence.output),
            hash_ids=hashes[:first],
            output_hash_ids=hashes[first:],
            block_size=self._block_size,
            tenant=self._tenant_of(request.namespace) or "",
        )
        self._write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _write(self, line: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._stream = None
            _logger.error("the trace log ends here: %s", error)

    def _hashes(self, namespace: Namespace, tokens: Packed) -> list[int]:
        """Hash the prefix that ends with each whole block."""
        size = self._block_size * TOKEN_BYTES
        last = msgspec.json.encode(namespace)
        hashes = []
        for end in range(size, len(tokens) + 1, size):
            run = last + bytes(tokens[end - size : end])
            last = blake2b(run, key=self._key, digest_size=_HASH_BYTES).digest()
            hashes.append(int.from_bytes(last, "little") >> 1)  # fits 63 bits, which all JSON takes
        return hashes
