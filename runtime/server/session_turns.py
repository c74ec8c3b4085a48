"""A turn of a session over HTTP: from its first news to the session as it is afterwards.

Owns: that every turn ends, however its client behaves, and what the session takes over.  Does not
know: bodies, answers.
Idea: the session has changed before the client is told the last piece, so whoever was told that a
turn ended can begin the next.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from radixcache.tokens import pack_tokens
from runtime.errors import SessionNotFound
from runtime.server.context import Served
from runtime.server.errors import FAILED
from runtime.server.generation import Ask, News, NewsStream, generate
from runtime.sessions.book import SessionBook
from runtime.sessions.records import Turn
from runtime.sessions.text import replied


async def take_turn(
    served: Served, book: SessionBook, turn: Turn, ask_for: Callable[[Turn], Ask]
) -> TurnNews:
    """Ask the engine for a turn's requests, and return the news; close them when done.

    Raises what `ask_for` and `generate` raise; the turn is cancelled then.
    """
    try:
        ask = ask_for(turn)
        return TurnNews(served, book, turn, await generate(served, ask), len(ask.prompts))
    except BaseException:
        served.engine.post(lambda engine: book.cancel(turn))
        raise


class TurnNews(AsyncGenerator[News, None]):
    """The news of a turn; the turn ends with the last one, or when they are closed.

    Forgotten without being closed, they close themselves, as an answer that nobody waits for may
    never begin.
    """

    def __init__(
        self, served: Served, book: SessionBook, turn: Turn, news: NewsStream, num_requests: int
    ) -> None:
        self._served = served
        self._book = book
        self._turn = turn
        self._news = news
        self._num_open = num_requests
        self._text = ""
        self._ids: tuple[int, ...] = ()
        self._has_ended = False

    async def __anext__(self) -> News:
        """Return the next piece.

        Raises SessionNotFound where the session was closed meanwhile.
        """
        piece = await anext(self._news)
        output = piece.output
        self._text += output.text
        self._ids += output.token_ids
        if output.finish_reason == "abort" and not self._served.engine.is_stopping:
            self.close()
            raise SessionNotFound("the session was closed while it was in use", param="session")
        if output.finish_reason in FAILED:
            self.close()
        elif output.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                await self._finish()
        return piece

    async def asend(self, value: None) -> News:
        """Return the next piece; nothing can be sent."""
        return await anext(self)

    async def athrow(self, *error: Any) -> News:
        """Close, and raise the error."""
        self.close()
        raise error[0]

    async def aclose(self) -> None:
        """Abort what has not ended; the session is as it was then."""
        self.close()

    def close(self) -> None:
        """Abort what has not ended; the session is as it was then."""
        self._news.close()
        if not self._has_ended:
            self._has_ended = True
            book, turn, ids = self._book, self._turn, pack_tokens(self._ids)
            self._served.engine.post(lambda engine: book.cancel(turn, ids))

    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True):
            self.close()

    async def _finish(self) -> None:
        book, turn, ids = self._book, self._turn, self._ids
        conversation = replied(self._served.runtime, turn.session, self._text, ids)
        self._has_ended = True
        await self._served.engine.call(
            lambda engine: book.finish(turn, pack_tokens(ids), conversation=conversation)
        )


class TurnEvents(AsyncGenerator[bytes, None]):
    """The events of a turn's stream.

    Closing them closes the news, even where none was read: a generator that never began runs no
    `finally`.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], news: TurnNews) -> None:
        self._events = events
        self._news = news

    async def __anext__(self) -> bytes:
        """Return the next event."""
        return await anext(self._events)

    async def asend(self, value: None) -> bytes:
        """Return the next event; nothing can be sent."""
        return await anext(self)

    async def athrow(self, *error: Any) -> bytes:
        """Close, and raise the error."""
        await self.aclose()
        raise error[0]

    async def aclose(self) -> None:
        """Close events and news."""
        await self._events.aclose()
        self._news.close()
