"""From news to an answer in OpenAI's form, whole or as the events of a stream.

Owns: envelopes, usage, and how a failure ends an answer.  Does not know: bodies, how a choice is
told.
Idea: the envelope of a chunk is encoded once a request; a token costs the encoding of its choice.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.responses import Response

from runtime.request import Usage
from runtime.server.answers import Answer, Choice, ErrorAnswer, sum_usage
from runtime.server.errors import FAILED, error_body, failure_of, json_response
from runtime.server.generation import News
from runtime.server.openai import StreamOptions

_encode = msgspec.json.encode


class Choices(Protocol):
    """The choices of one request, on their way from news to the client."""

    def opening(self) -> Sequence[Choice]:
        """What a stream begins with."""

    def pieces(self, news: News) -> Sequence[Choice]:
        """Return what a piece of news tells the client of a stream."""

    def add(self, news: News) -> None:
        """Take a piece of news for the whole answer."""

    def whole(self) -> Sequence[Choice]:
        """Return the whole choices."""


async def whole_answer(
    news: AsyncGenerator[News, None], envelope: Answer[Choice], choices: Choices, branches: int
) -> Response:
    """Gather the news into one answer, and close them.  Raises what a failed branch stands for."""
    usages: dict[int, Usage] = {}
    async with aclosing(news):
        async for piece in news:
            if piece.output.finish_reason in FAILED:
                raise failure_of(piece.output)
            usages[piece.place] = piece.output.usage
            choices.add(piece)
    usage = sum_usage(usages, branches)
    return json_response(msgspec.structs.replace(envelope, choices=choices.whole(), usage=usage))


async def answer_events(
    news: AsyncGenerator[News, None],
    envelope: Answer[Choice],
    choices: Choices,
    options: StreamOptions,
    branches: int,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, as JSON: opening, pieces, usage or what went wrong, done.

    Raises nothing but OSError, of a client that is gone or too slow to be told of anything.
    """
    usages: dict[int, Usage] = {}
    chunks = _ChunkWriter(envelope, options, usages, branches)
    for choice in choices.opening():
        yield chunks.write(choice)
    try:
        async with aclosing(news):
            async for piece in news:
                if piece.output.finish_reason in FAILED:
                    raise failure_of(piece.output)
                usages[piece.place] = piece.output.usage
                for choice in choices.pieces(piece):
                    yield chunks.write(choice)
        if options.include_usage or chunks.has_report:
            yield chunks.write_usage()
    except OSError:
        raise
    except Exception as error:
        yield _encode(ErrorAnswer(error_body(error, envelope.id)[1]))
    yield b"[DONE]"


class _ChunkWriter:
    """Writes the chunks of a stream: an envelope encoded once, around a choice and the usage."""

    def __init__(
        self,
        envelope: Answer[Choice],
        options: StreamOptions,
        usages: Mapping[int, Usage],
        branches: int,
    ) -> None:
        self._options = options
        self._usages = usages
        self._branches = branches
        ids = envelope.prompt_token_ids
        self._prompt = b"" if ids is msgspec.UNSET else b',"prompt_token_ids":' + _encode(ids)
        report = envelope.radixcache
        self._report = b"" if report is msgspec.UNSET else b',"radixcache":' + _encode(report)
        bare = msgspec.structs.replace(
            envelope, prompt_token_ids=msgspec.UNSET, radixcache=msgspec.UNSET
        )
        # No text within JSON holds a bare quote, so this is the key of the envelope.
        self._head, rest = _encode(bare).split(b'"choices":[]')
        self._head += b'"choices":['
        self._tail = b"]" + rest[:-1]

    def write(self, choice: Choice) -> bytes:
        """Return a chunk with one choice; the first one tells the prompt's ids."""
        prompt, self._prompt = self._prompt, b""
        return b"".join((self._head, _encode(choice), self._tail, self._usage(), prompt, b"}"))

    def write_usage(self) -> bytes:
        """Return the chunk that ends a stream: no choice, but what all of it took, and why."""
        usage = _encode(sum_usage(self._usages, self._branches))
        return b"".join((self._head, self._tail, b',"usage":', usage, self._report, b"}"))

    @property
    def has_report(self) -> bool:
        """True where the last chunk tells why the prompt missed."""
        return bool(self._report)

    def _usage(self) -> bytes:
        if self._options.continuous_usage_stats:
            return b',"usage":' + _encode(sum_usage(self._usages, self._branches))
        return b',"usage":null' if self._options.include_usage else b""
