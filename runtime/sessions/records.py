"""What is told about sessions: limits, states, turns.

Owns: the fields and which values are allowed.  Does not know: how any of them changes.
"""

from __future__ import annotations

import msgspec

from radixcache.namespace import Namespace
from radixcache.tokens import num_tokens
from runtime.errors import InvalidRequest, InvalidSetting
from runtime.sessions.conversation import Conversation

MAX_LIMIT_S = 1e9
"""Longest of the limits' durations, in seconds."""


class SessionLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much sessions may take.

    max_sessions       open at a time
    max_sessions_each  open at a time of one owner
    max_held_share     share of the pool's blocks that sessions may hold, from 0 to 1, and of a
                       namespace's hard quota; a branch beyond it works as well, but may be evicted
                       between its turns
    idle_s             seconds after its last use at which a session ends
    max_hold_s         longest explicit hold, in seconds

    Raises InvalidSetting that names the field.
    """

    max_sessions: int = 1024
    max_sessions_each: int = 256
    max_held_share: float = 0.5
    idle_s: float = 600.0
    max_hold_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_sessions_each"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} is {getattr(self, name)}: at least 1")
        if not 0 <= self.max_held_share <= 1:
            raise InvalidSetting(f"max_held_share is {self.max_held_share}: from 0 to 1")
        for name in ("idle_s", "max_hold_s"):
            if not 0 < getattr(self, name) <= MAX_LIMIT_S:
                raise InvalidSetting(
                    f"{name} is {getattr(self, name)}: above 0, at most {MAX_LIMIT_S:g} seconds"
                )

    def check_hold(self, seconds: float) -> None:
        """Raise InvalidRequest for a time that no hold has."""
        most = self.max_hold_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise InvalidRequest(f"seconds must be a number, not {seconds!r}", param="seconds")
        if not 0 <= seconds <= most:
            raise InvalidRequest(f"seconds must be from 0 to {most:g}", param="seconds")


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A session at one moment.

    parent         id of the session that it was forked from, or None; that one may be closed
    tokens         packed ids
    conversation   the messages that the tokens are, or None where they are no conversation
    revision       changes whenever the tokens do
    cached_tokens  tokens that the cache has now
    held_tokens    tokens that stay there while the session holds them, in whole blocks
    held_for_s     seconds until that ends, 0 where nothing is held
    expires_in_s   seconds until the session ends unless it is used; a turn keeps it alive
    is_busy        whether it generates or scores at the moment
    """

    session_id: str
    parent: str | None
    namespace: Namespace
    tokens: bytes
    conversation: Conversation | None
    revision: int
    cached_tokens: int
    held_tokens: int
    held_for_s: float
    expires_in_s: float
    is_busy: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the branch."""
        return num_tokens(self.tokens)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The right to generate or score on a session, from `begin` to `finish` or `cancel`.

    session   as it was when the turn began
    name      by which whoever carries it out knows it
    requests  ids of its requests, to be aborted if the session is closed meanwhile
    """

    session: SessionState
    number: int
    name: str
    requests: tuple[str, ...] = ()
