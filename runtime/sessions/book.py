"""Sessions: branches of tokens that stay cached between the calls of a chat or an agent.

Owns: which sessions there are, their tokens, whose they are, and when they end.  Does not know:
text, HTTP, threads (the engine's one calls it), or how tokens come to be generated.
Idea: a session is a run of tokens and a hold on what is cached of it.  The cache shares branches
by itself, so a fork copies nothing, and losing a hold costs time but never changes a token.

    tokens   │ held: computed, in whole blocks │ computed by the next turn │
             0 …                    held_tokens …                 num_tokens
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from radixcache.lease import PrefixKey
from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.tokens import num_tokens
from runtime.accepting import check_tokens
from runtime.engine import Engine
from runtime.errors import (
    EngineFailure,
    InvalidSetting,
    PromptTooLong,
    ServerBusy,
    SessionBusy,
    SessionNotFound,
)
from runtime.sessions.conversation import Conversation
from runtime.sessions.holds import Session, SessionHolds
from runtime.sessions.records import SessionLimits, SessionState, Turn


class SessionBook:
    """The sessions of one engine; the engine's thread calls it.

    new_id  gives ids that nobody can guess

    Every call names the owner, and finds nobody else's sessions.  A hold ends by the cache's clock
    and a session by the next call, so that an engine at rest needs no ticking.  Where a request
    finds no room, the engine has holds end before their time.
    Raises InvalidSetting where the engine's cache has no clock.
    """

    def __init__(
        self, engine: Engine, limits: SessionLimits | None = None, *, new_id: Callable[[], str]
    ) -> None:
        cache, clock = engine.cache, engine.cache.deadlines.clock
        if clock is None:
            raise InvalidSetting("sessions need a cache with a clock: RadixCache(…, clock=…)")
        self.limits = limits or SessionLimits()
        self._engine = engine
        self._cache = cache
        self._clock = clock
        self._new_id = new_id
        self._sessions: dict[str, Session] = {}
        self._closed_in_turn: dict[int, Session] = {}  # by the turn that they are in still
        self._num_owned: Counter[str] = Counter()
        self._next_expiry = math.inf  # no session ends before
        self._num_uses = 0
        self._num_turns = 0
        self._holds = SessionHolds(
            cache,
            clock,
            max_share=self.limits.max_held_share,
            sessions=self._sessions.values,
        )
        engine.give_way = self._holds.give_way
        engine.scheduler.admission.give_way = self._holds.give_way_of_own

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> Iterable[Session]:
        """Return the sessions that are open, whoever's; to read."""
        return self._sessions.values()

    @property
    def held_tokens(self) -> int:
        """Tokens held by sessions now, shared ones counted once; O(sessions + nodes held)."""
        self._cache.expire()
        return self._holds.num_blocks() * self._cache.config.block_size

    def create(
        self,
        tokens: bytes = b"",
        *,
        owner: str = "",
        namespace: Namespace = DEFAULT_NAMESPACE,
        conversation: Conversation | None = None,
    ) -> SessionState:
        """Open a session.

        Raises ServerBusy beyond the limits; InvalidRequest or PromptTooLong for the tokens.
        """
        self.expire()
        self._check_tokens(tokens, namespace)
        session = self._open(owner, namespace, parent=None)
        session.tokens, session.conversation = tokens, conversation
        return self._state(session)

    def state(self, session_id: str, *, owner: str = "") -> SessionState:
        """Return a session as it is, which is no use of it.  Raises SessionNotFound."""
        return self._state(self._find(session_id, owner))

    def replace(
        self,
        session_id: str,
        tokens: bytes,
        *,
        revision: int,
        owner: str = "",
        conversation: Conversation | None = None,
    ) -> SessionState:
        """Give a session other tokens, which usually begin with those that it has.

        revision      that the new tokens were made from
        conversation  the messages that they are, if they are

        Raises SessionNotFound; SessionBusy where there is a turn or it was changed meanwhile;
        InvalidRequest or PromptTooLong for the tokens.  The session is as it was then.
        """
        session = self._idle(session_id, owner)
        if session.revision != revision:
            raise SessionBusy("the session was changed meanwhile: read its state and try again")
        self._check_tokens(tokens, session.namespace)
        self._holds.note_found(session, tokens)
        session.tokens, session.conversation = tokens, conversation
        session.revision += 1
        self._use(session)
        return self._state(session)

    def fork(self, session_id: str, *, owner: str = "") -> SessionState:
        """Open a second session with the same tokens, and hold them likewise; copies nothing.

        A turn in progress is not part of it.  Raises SessionNotFound, ServerBusy.
        """
        session = self._find(session_id, owner)
        twin = self._open(owner, session.namespace, parent=session_id)
        twin.tokens, twin.conversation = session.tokens, session.conversation
        twin.family, twin.shared_len = session.family, session.shared_len
        if session.held:
            self._holds.keep(twin, self.limits.idle_s)
        self._touch(twin)  # not before its hold, as the clock goes on meanwhile
        self._use(session)
        return self._state(twin)

    def begin(
        self, session_id: str, name: str, *, requests: tuple[str, ...] = (), owner: str = ""
    ) -> Turn:
        """Reserve a session for generating or scoring; end the turn by `finish` or `cancel`.

        requests  ids under which the engine will know what the turn asks for

        Raises SessionNotFound, SessionBusy where there is a turn already.
        """
        session = self._idle(session_id, owner)
        self._use(session)
        if session.shared_len is None:
            session.shared_len = self._cache.match_len(PrefixKey(session.namespace, session.tokens))
        self._num_turns += 1
        turn = Turn(
            session=self._state(session), number=self._num_turns, name=name, requests=requests
        )
        session.turn = turn
        return turn

    def finish(
        self, turn: Turn, generated: bytes = b"", *, conversation: Conversation | None = None
    ) -> None:
        """End a turn, take over what it generated, and hold what it computed.

        generated     packed ids, none where it scored
        conversation  the messages that the session consists of now, if it does

        Nothing happens where the session was closed meanwhile.
        """
        session = self._end(turn, generated)
        if session is None:
            return
        if generated:
            session.tokens += generated
            session.conversation = conversation
            session.revision += 1
        self._holds.keep(session, self.limits.idle_s)
        self._touch(session)

    def cancel(self, turn: Turn, generated: bytes = b"") -> None:
        """End a turn that gave nothing: the session is as before.  Nothing if it has ended.

        generated  packed ids that came of it all the same; nobody goes on from them
        """
        session = self._end(turn, generated)
        if session is not None:
            self._use(session)
            if generated:
                self._holds.abandon(session, generated)

    def hold(self, session_id: str, seconds: float, *, owner: str = "") -> SessionState:
        """Hold what is cached of a session for so long, such as while a tool runs.

        seconds  from now on, whatever held it before; 0 lets go.  The session ends no earlier

        Raises SessionNotFound, or InvalidRequest for a time that is none or too long.
        """
        session = self._find(session_id, owner)
        self.limits.check_hold(seconds)
        session.held_until, session.ends_with_hold = 0.0, False
        self._holds.keep(session, seconds)
        self._touch(session)
        return self._state(session)

    def retain(
        self,
        tokens: bytes,
        seconds: float,
        *,
        owner: str = "",
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> SessionState | None:
        """Hold what is cached of a prompt, by a session that ends with the hold unless it is used.

        returns  None where nothing is held, and so no session opened: nothing of it is cached, or
                 too much is held already

        Raises InvalidRequest or PromptTooLong for the tokens or the time; ServerBusy beyond limits.
        """
        self.expire()
        self._check_tokens(tokens, namespace)
        self.limits.check_hold(seconds)
        current = self._cache.epochs.current(namespace)
        if not seconds or not self._cache.match_len(PrefixKey(current, tokens)):
            return None
        session = self._open(owner, current, parent=None)
        session.tokens, session.ends_with_hold = tokens, True
        self._holds.keep(session, seconds)
        if not session.held:
            self._drop(session)
            return None
        self._touch(session)
        return self._state(session)

    def close(self, session_id: str, *, owner: str = "") -> Turn | None:
        """End a session and its hold; what it alone computed is the first to go for others' room.

        What it found when it began, and what sessions forked from it or before it go on from, is
        worth as much as before.
        returns  the turn in progress, whose requests are to be aborted
        Raises SessionNotFound.
        """
        session = self._find(session_id, owner)
        self._drop(session)
        if session.turn is None:
            self._holds.abandon(session)
        else:  # the blocks of its requests can't be abandoned before those end
            self._closed_in_turn[session.turn.number] = session
        return session.turn

    def close_all(self) -> None:
        """End every session, such as when the server stops."""
        for session in list(self._sessions.values()):
            self._drop(session)

    def expire(self) -> None:
        """End the sessions whose time is over; every call does.  O(1) where none is due."""
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = math.inf
        for session in list(self._sessions.values()):
            if session.turn is not None:
                continue  # its end comes back to `_touch`
            if session.expires_at <= now:
                self._drop(session)
            else:
                self._next_expiry = min(self._next_expiry, session.expires_at)

    def check(self) -> None:
        """Raise EngineFailure unless counts are right, limits kept and holds the cache's own."""
        self._cache.expire()
        sessions = self._sessions.values()
        wrong = self._holds.faults()
        if len(sessions) > self.limits.max_sessions:
            wrong.append(f"{len(sessions)} sessions are open")
        if Counter(session.owner for session in sessions) != self._num_owned:
            wrong.append("sessions of an owner are counted wrong")
        for name, session in self._sessions.items():
            if session.session_id != name:
                wrong.append(f"{session.session_id} stands under the name {name}")
            if session.turn is None and session.expires_at < self._next_expiry:
                wrong.append(f"{name} ends before it is looked for")
            if session.expires_at < session.held_until:
                wrong.append(f"{name} ends before its hold")
        if wrong:
            raise EngineFailure("; ".join(wrong))

    def _open(self, owner: str, namespace: Namespace, *, parent: str | None) -> Session:
        limits = self.limits
        for count, most, whose in (
            (self._num_owned[owner], limits.max_sessions_each, "of yours "),
            (len(self._sessions), limits.max_sessions, ""),
        ):
            if count >= most:
                raise ServerBusy(
                    f"{most} sessions {whose}are open, and no more may be: close those that are "
                    "done with",
                    retry_after_s=1.0,
                )
        session = Session(self._new_id(), owner=owner, namespace=namespace, parent=parent)
        self._sessions[session.session_id] = session
        self._num_owned[owner] += 1
        self._touch(session)
        return session

    def _find(self, session_id: str, owner: str) -> Session:
        self.expire()
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:  # to others it does not exist
            raise SessionNotFound(
                f"there is no session {session_id!r:.80}: it was closed or has expired; create "
                "another",
                param="session",
            )
        self._holds.follow_epoch(session)
        return session

    def _idle(self, session_id: str, owner: str) -> Session:
        session = self._find(session_id, owner)
        if session.turn is not None:
            raise SessionBusy(
                "the session generates or scores at the moment: wait until it ends, or fork it"
            )
        return session

    def _end(self, turn: Turn, generated: bytes) -> Session | None:
        """Take a turn from its session; None where it is not there any more."""
        closed = self._closed_in_turn.pop(turn.number, None)
        if closed is not None:
            self._holds.abandon(closed, generated)
        session = self._sessions.get(turn.session.session_id)
        if session is None or session.turn is None or session.turn.number != turn.number:
            return None
        session.turn = None
        return session

    def _check_tokens(self, tokens: bytes, namespace: Namespace) -> None:
        check_tokens(tokens, self._engine.vocab_size)
        length, most = num_tokens(tokens), max(0, self._engine.longest_of(namespace) - 1)
        if length > most:
            raise PromptTooLong(
                f"the session would have {length} tokens, and at most {most} leave room "
                "to generate: begin another, with less in it",
                num_tokens=length,
                max_tokens=most,
            )

    def _use(self, session: Session) -> None:
        """Note a use: the session's time begins anew, and so does that of what it holds."""
        self._cache.expire()
        session.ends_with_hold = False
        if session.held:
            self._holds.keep(session, self.limits.idle_s)
        self._touch(session)

    def _touch(self, session: Session) -> None:
        self._num_uses += 1
        session.last_used = self._num_uses
        idle_s = 0.0 if session.ends_with_hold else self.limits.idle_s
        session.expires_at = max(self._clock() + idle_s, session.held_until)
        self._next_expiry = min(self._next_expiry, session.expires_at)

    def _drop(self, session: Session) -> None:
        self._holds.let_go(session)
        del self._sessions[session.session_id]
        self._num_owned[session.owner] -= 1
        self._num_owned += Counter()  # forgets whoever owns none

    def _state(self, session: Session) -> SessionState:
        self._cache.expire()
        now, hold = self._clock(), session.held
        key = PrefixKey(session.namespace, session.tokens)
        return SessionState(
            session_id=session.session_id,
            parent=session.parent,
            namespace=session.namespace,
            tokens=session.tokens,
            conversation=session.conversation,
            revision=session.revision,
            cached_tokens=self._cache.match_len(key),
            held_tokens=hold.num_tokens if hold else 0,
            held_for_s=max(0.0, session.held_until - now) if hold else 0.0,
            expires_in_s=max(0.0, session.expires_at - now),
            is_busy=session.turn is not None,
        )
