"""Random histories of sessions against a model that only knows tokens, owners and times.

Whatever is evicted, held, expired, aborted or forked: a branch is exactly what was appended and
what an empty cache would have generated, and nothing stays held that nobody holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from radixcache.tokens import pack_tokens, unpack_tokens
from runtime.errors import PromptTooLong, ServerBusy, SessionBusy, SessionNotFound
from runtime.sessions.records import Turn
from tests.support.session_bench import SessionBench

TOKENS = st.lists(st.integers(0, 1), max_size=5)
OWNERS = st.sampled_from(["a", "b"])
IDLE_S, MAX_LEN = 10.0, 24


@dataclass
class Model:
    """What a session must be."""

    owner: str
    tokens: list[int]
    expires_at: float
    turn: Turn | None = None


class SessionHistories(RuleBasedStateMachine):
    """Tiny numbers: two token values, blocks of two, a pool of 16 of them."""

    sessions: Any = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.bench = SessionBench(
            num_blocks=16,
            max_len=MAX_LEN,
            max_sessions=6,
            max_sessions_each=4,
            max_held_share=0.5,
            idle_s=IDLE_S,
        )
        self.book = self.bench.book
        self.model: dict[str, Model] = {}

    def expire(self) -> None:
        now = self.bench.now
        self.model = {
            name: session
            for name, session in self.model.items()
            if session.turn or session.expires_at > now
        }

    def use(self, name: str) -> None:
        session = self.model[name]
        idle = self.bench.now + IDLE_S
        assert self.book.state(name, owner=session.owner).expires_in_s >= IDLE_S
        session.expires_at = max(idle, session.expires_at)

    def known(self, name: str) -> Model | None:
        """The session, or None after a check that the book knows none either."""
        self.expire()
        session = self.model.get(name)
        if session is None:
            for owner in ("a", "b"):
                with pytest.raises(SessionNotFound):
                    self.book.state(name, owner=owner)
        return session

    @rule(target=sessions, owner=OWNERS, tokens=TOKENS)
    def create(self, owner: str, tokens: list[int]) -> str:
        self.expire()
        owned = sum(session.owner == owner for session in self.model.values())
        if len(self.model) == 6 or owned == 4:
            with pytest.raises(ServerBusy):
                self.book.create(pack_tokens(tokens), owner=owner)
            return "nobody"
        name = self.book.create(pack_tokens(tokens), owner=owner).session_id
        self.model[name] = Model(owner, tokens, self.bench.now + IDLE_S)
        return name

    @rule(name=sessions, tokens=TOKENS)
    def append(self, name: str, tokens: list[int]) -> None:
        session = self.known(name)
        if session is None:
            return
        state = self.book.state(name, owner=session.owner)
        longer = session.tokens + tokens
        error = None
        if session.turn:
            error = SessionBusy
        elif len(longer) >= MAX_LEN:
            error = PromptTooLong
        fields: Any = {"revision": state.revision, "owner": session.owner}
        if error:
            with pytest.raises(error):
                self.book.replace(name, pack_tokens(longer), **fields)
            return
        self.book.replace(name, pack_tokens(longer), **fields)
        session.tokens = longer
        self.use(name)

    @rule(target=sessions, name=sessions)
    def fork(self, name: str) -> str:
        session = self.known(name)
        if session is None:
            return "nobody"
        owned = sum(other.owner == session.owner for other in self.model.values())
        if len(self.model) == 6 or owned == 4:
            with pytest.raises(ServerBusy):
                self.book.fork(name, owner=session.owner)
            return "nobody"
        twin = self.book.fork(name, owner=session.owner).session_id
        self.model[twin] = Model(session.owner, session.tokens, self.bench.now + IDLE_S)
        self.use(name)
        return twin

    @rule(name=sessions, num_tokens=st.integers(0, 4))
    def begin(self, name: str, num_tokens: int) -> None:
        session = self.known(name)
        if session is None or not session.tokens or len(session.tokens) >= MAX_LEN:
            return
        if session.turn:
            with pytest.raises(SessionBusy):
                self.book.begin(name, "x", owner=session.owner)
            return
        turn = self.bench.begin(name, num_tokens, owner=session.owner)
        assert unpack_tokens(turn.session.tokens) == session.tokens
        session.turn = turn

    @rule(name=sessions, fails=st.booleans())
    def end_turn(self, name: str, fails: bool) -> None:
        session = self.known(name)
        if session is None or session.turn is None:
            return
        turn, session.turn = session.turn, None
        if fails:
            self.bench.engine.abort(turn.name)
            self.book.cancel(turn)
        else:
            self.bench.run()
            output = self.bench.engine.output(turn.name)
            assert output == self.bench.engine.expected(turn.name).tokens
            self.book.finish(turn, pack_tokens(output))
            session.tokens = session.tokens + output
        self.use(name)

    @rule()
    def step(self) -> None:
        if self.bench.engine.engine.has_work:
            self.bench.engine.step()

    @rule(name=sessions, seconds=st.sampled_from([0.0, 3.0, 30.0]))
    def hold(self, name: str, seconds: float) -> None:
        session = self.known(name)
        if session is not None:
            self.book.hold(name, seconds, owner=session.owner)
            session.expires_at = self.bench.now + max(IDLE_S, seconds)

    @rule(name=consumes(sessions))
    def close(self, name: str) -> None:
        session = self.known(name)
        if session is None:
            return
        with pytest.raises(SessionNotFound):
            self.book.close(name, owner="ab".replace(session.owner, ""))
        turn = self.book.close(name, owner=session.owner)
        assert turn == session.turn
        del self.model[name]
        if turn is not None:
            self.bench.engine.abort(turn.name)
            self.book.finish(turn, pack_tokens([1]))

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule(tokens=st.lists(st.integers(2, 3), min_size=1, max_size=MAX_LEN - 1))
    def press(self, tokens: list[int]) -> None:
        """A stranger is served, whatever sessions hold."""
        assert self.bench.ask(tokens) == "length"

    @invariant()
    def branches_are_what_they_must_be(self) -> None:
        self.book.check()
        self.expire()
        self.book.expire()
        assert len(self.book) == len(self.model)
        for name, session in self.model.items():
            state = self.book.state(name, owner=session.owner)
            assert unpack_tokens(state.tokens) == session.tokens
            assert state.held_tokens <= state.cached_tokens <= state.num_tokens
            assert state.is_busy == (session.turn is not None)

    def teardown(self) -> None:
        self.bench.run()
        self.bench.check_idle()


class TestSessionHistories(SessionHistories.TestCase):
    settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
