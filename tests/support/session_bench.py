"""Sessions over an engine without a model, both checked after each step, and a clock to turn.

Owns: the harness.  Does not know: what is tested with it.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.sessions.book import SessionBook
from runtime.sessions.records import SessionLimits, SessionState, Turn
from tests.support.engine_bench import EngineBench

PREFIX = list(range(10, 22))


class SessionBench:
    """A book, the engine beneath it, and the time `now` that both go by."""

    def __init__(self, *, num_blocks: int = 32, max_len: int = 40, **limits: Any) -> None:
        self.now = 0.0
        self.engine = EngineBench(
            num_blocks=num_blocks, block_size=2, max_len=max_len, clock=lambda: self.now
        )
        ids = count()
        self.book = SessionBook(
            self.engine.engine, SessionLimits(**limits), new_id=lambda: f"s{next(ids)}"
        )
        self._names = count()

    def create(self, tokens: list[int] = PREFIX, **fields: Any) -> str:
        """Open a session; return its id."""
        return self.book.create(pack_tokens(tokens), **fields).session_id

    def tokens(self, session_id: str) -> list[int]:
        """The branch of a session."""
        return unpack_tokens(self.book.state(session_id).tokens)

    def append(self, session_id: str, tokens: list[int]) -> SessionState:
        """Put tokens behind a branch."""
        state = self.book.state(session_id)
        return self.book.replace(
            session_id, state.tokens + pack_tokens(tokens), revision=state.revision
        )

    def begin(self, session_id: str, num_tokens: int, *, owner: str = "") -> Turn:
        """Begin a turn, and queue its request."""
        turn = self.book.begin(session_id, f"r{next(self._names)}", owner=owner)
        state = turn.session
        self.engine.submit(
            turn.name,
            unpack_tokens(state.tokens),
            namespace=state.namespace,
            max_tokens=num_tokens,
        )
        return turn

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.engine.has_work:
            self.engine.step()
            self.book.check()

    def generate(self, session_id: str, num_tokens: int = 4) -> int:
        """Generate on a session; return how much of it was cached."""
        turn = self.begin(session_id, num_tokens)
        self.run()
        output = self.engine.output(turn.name)
        assert output == self.engine.expected(turn.name).tokens
        self.book.finish(turn, pack_tokens(output))
        self.book.check()
        return self.engine.news[turn.name][-1].usage.cached_tokens

    def ask(self, tokens: list[int]) -> str | None:
        """Serve one token to somebody without a session; return why that ended."""
        name = f"ask{next(self._names)}"
        self.engine.submit(name, tokens, max_tokens=1)
        self.run()
        return self.engine.reason(name)

    def press(self) -> None:
        """Let a stranger's requests want every block that may be given up."""
        stats = self.engine.cache.stats()
        for _ in range(stats.num_free + stats.num_evictable):
            assert self.ask([90, *self._fresh()]) == "length"

    def _fresh(self) -> list[int]:
        number = next(self._names)
        return [50 + number % 7, 60 + number % 11, 71 + number % 13]

    def check_idle(self) -> None:
        """Nothing is held or running once all sessions are closed."""
        self.book.check()
        self.book.close_all()
        self.book.check()
        self.engine.check_idle()
