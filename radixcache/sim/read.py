"""Reading traces: Mooncake's block hashes, our own request log, and OpenAI-style logs.

Owns: which form a file has, what its lines must hold, and errors that name the line.  Does not
know: tokenizers (a function makes token ids of text), caches.
Idea: whatever the form, a request becomes names of blocks at once, so that a trace of any length
keeps four bytes a block.

    block hashes   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}
                   and, in our own log, "block_size", "output_hash_ids", "tenant"
    chats          {"messages": [...]} or {"prompt": "…"}, alone or as the "body" or "request" of a
                   line, with "timestamp" and "response" where there are any
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from radixcache.errors import InvalidTrace
from radixcache.sim.logged import log_lines, reply_text
from radixcache.sim.texts import pieces, rendered
from radixcache.sim.trace import BlockNames, Trace, TraceRequest

HASHED_TOKENS = 512
"""Tokens that a hash stands for in a line that does not tell."""

MAX_HASHED_TOKENS = 1 << 16
"""Tokens of a hash at most: a number beyond is damage, and would be cut into as many blocks."""

MAX_LENGTH = 1 << 31
"""Tokens of a prompt or an answer at most; the same."""

Encode = Callable[[str], Sequence[int]]
"""Makes token ids of a text."""

Progress = Callable[[int], None]
"""Is told how many lines were read."""

PROGRESS_EVERY = 512
"""Lines between two reports."""


class HashLine(msgspec.Struct, kw_only=True):
    """A line of block hashes.

    timestamp        milliseconds
    input_length     tokens of the prompt; the last hash may stand for fewer than `block_size`
    output_length    tokens of the answer
    hash_ids         a number for each block of the prompt; equal ones mean equal prefixes
    output_hash_ids  of the blocks that the answer completes
    block_size       tokens a hash
    tenant           whose request it is
    """

    timestamp: float
    input_length: int
    output_length: int = 0
    hash_ids: list[int]
    output_hash_ids: list[int] = []
    block_size: int = HASHED_TOKENS
    tenant: str = ""


class ChatLine(msgspec.Struct, kw_only=True):
    """A line of an OpenAI-style log; unknown fields are passed over."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    tools: list[Any] | None = None
    timestamp: float | str | None = None
    created: float | str | None = None
    response: Any = None
    tenant: str = ""
    body: dict[str, Any] | None = None
    request: dict[str, Any] | None = None


def read_trace(
    path: Path,
    *,
    block_size: int = HASHED_TOKENS,
    encode: Encode = pieces,
    most: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace, gzip-compressed or not; the form is that of its first line.

    block_size  tokens a block of the cache to come; of a trace of hashes, a multiple or a divisor
                of what one hash stands for
    encode      makes token ids of an OpenAI-style log's text
    most        requests to read; None: all

    Raises InvalidTrace that names the line, or OSError.
    """
    if block_size < 1:
        raise InvalidTrace(f"a block has at least one token, not {block_size}")
    reading: _Hashes | _Chats | None = None
    for number, line in log_lines(path):
        if most is not None and reading is not None and len(reading.requests) >= most:
            break
        try:
            if reading is None:
                is_hashes = b'"hash_ids"' in line
                reading = _Hashes(block_size) if is_hashes else _Chats(block_size, encode)
            reading.add(line)
        except (InvalidTrace, msgspec.DecodeError, ValueError) as error:
            raise InvalidTrace(f"{path.name}, line {number}: {error}") from None
        if progress and number % PROGRESS_EVERY == 0:
            progress(number)
    if reading is None:
        raise InvalidTrace(f"{path.name} holds no request: one JSON object a line is expected")
    return reading.trace(path.name.removesuffix(".gz").removesuffix(".jsonl"))


class _Hashes:
    """Requests as block hashes, in blocks of another size if need be."""

    def __init__(self, block_size: int) -> None:
        self.requests: list[TraceRequest] = []
        self._block_size = block_size
        self._hashed = 0  # tokens a hash, by the first line
        self._names = BlockNames()
        self._decoder = msgspec.json.Decoder(HashLine)

    def add(self, line: bytes) -> None:
        """Take a line's request.  Raises InvalidTrace, DecodeError or ValueError."""
        record = self._decoder.decode(line)
        self._check(record)
        arrival_s = record.timestamp / 1000
        prompt = self._contents(record.hash_ids, record.input_length)
        longer = record.hash_ids + record.output_hash_ids
        answer = self._contents(longer, len(longer) * self._hashed)[len(prompt) :]
        if not record.output_hash_ids:
            answer = []
        path = self._names.path([*prompt, *answer], tenant=record.tenant)
        self.requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt=path[: len(prompt)],
                answer=path[len(prompt) :],
                prompt_tokens=record.input_length,
                output_tokens=record.output_length,
                tenant=record.tenant,
            )
        )

    def _check(self, record: HashLine) -> None:
        if min(record.input_length, record.output_length) < 0:
            raise InvalidTrace("lengths must not be negative")
        if max(record.input_length, record.output_length) > MAX_LENGTH:
            raise InvalidTrace(f"lengths must not exceed {MAX_LENGTH:,} tokens")
        if not 1 <= record.block_size <= MAX_HASHED_TOKENS:
            raise InvalidTrace(
                f"block_size is {record.block_size}: expected 1 to {MAX_HASHED_TOKENS}"
            )
        small, large = sorted((record.block_size, self._block_size))
        if large % small:
            raise InvalidTrace(
                f"a hash stands for {record.block_size} tokens, which is neither a multiple nor a "
                f"divisor of blocks of {self._block_size}: choose another block size"
            )
        if self._hashed and record.block_size != self._hashed:
            raise InvalidTrace(f"block_size {record.block_size} after lines of {self._hashed}")
        self._hashed = record.block_size
        expected = -(-record.input_length // self._hashed)
        if len(record.hash_ids) not in (expected, record.input_length // self._hashed):
            raise InvalidTrace(
                f"{record.input_length} tokens are {expected} blocks of {self._hashed}, but there "
                f"are {len(record.hash_ids)} hash_ids"
            )

    def _contents(self, hash_ids: list[int], num_tokens: int) -> Sequence[Hashable]:
        """What stands in each block; a last one that is not full counts as a block."""
        if self._block_size >= self._hashed:
            many = self._block_size // self._hashed
            if many == 1:
                return hash_ids
            return [tuple(hash_ids[at : at + many]) for at in range(0, len(hash_ids), many)]
        many = self._hashed // self._block_size
        parts = [(hash_id, part) for hash_id in hash_ids for part in range(many)]
        return parts[: -(-num_tokens // self._block_size)]

    def trace(self, title: str) -> Trace:
        """Return all that was taken, by arrival."""
        return Trace(
            title=title,
            block_size=self._block_size,
            requests=by_arrival(self.requests),
            num_distinct=len(self._names),
        )


class _Chats:
    """Requests as text: rendered as one conversation, made token ids, cut into whole blocks."""

    def __init__(self, block_size: int, encode: Encode) -> None:
        self.requests: list[TraceRequest] = []
        self._block_size = block_size
        self._encode = encode
        self._names = BlockNames()
        self._decoder = msgspec.json.Decoder(ChatLine)
        self._began: float | None = None
        self._times = 0

    def add(self, line: bytes) -> None:
        """Take a line's request.  Raises InvalidTrace, DecodeError or ValueError."""
        record = self._decoder.decode(line)
        inner = record.body or record.request
        asked = record if inner is None else msgspec.convert(inner, ChatLine)
        if (asked.messages is None) == (asked.prompt is None):
            raise InvalidTrace("a request has either `messages` or `prompt`")
        text = asked.prompt
        if text is None:
            text = rendered(asked.messages or [], asked.tools)
        prompt = array("i", self._encode(text))
        answer = array("i", self._encode(reply_text(record.response)))
        size = self._block_size * prompt.itemsize
        whole = (prompt + answer).tobytes()
        contents = [whole[at : at + size] for at in range(0, len(whole) - size + 1, size)]
        tenant = record.tenant or asked.tenant
        path = self._names.path(contents, tenant=tenant)
        first = len(prompt) // self._block_size
        self.requests.append(
            TraceRequest(
                arrival_s=self._arrival(record),
                prompt=path[:first],
                answer=path[first:],
                prompt_tokens=len(prompt),
                output_tokens=len(answer),
                tenant=tenant,
            )
        )

    def _arrival(self, record: ChatLine) -> float:
        """Seconds since the first line, one second a line where the log has no times."""
        time = record.timestamp if record.timestamp is not None else record.created
        if time is None:
            return float(len(self.requests))
        self._times += 1
        seconds = _seconds(time)
        if self._began is None:
            self._began = seconds
        seconds -= self._began
        return seconds

    def trace(self, title: str) -> Trace:
        """Return all that was taken, by arrival."""
        return Trace(
            title=title,
            block_size=self._block_size,
            requests=by_arrival(self.requests),
            num_distinct=len(self._names),
            has_times=self._times == len(self.requests),
        )


def _seconds(time: float | str) -> float:
    """Read a time: seconds, milliseconds where it is too large for that, or ISO 8601."""
    if isinstance(time, str):
        return datetime.fromisoformat(time).timestamp()
    return time / 1000 if time > 1e11 else time


def by_arrival(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Return the requests as they came: a log may be written as they end."""
    return sorted(requests, key=lambda request: request.arrival_s)
