"""What sessions hold of the cache and how much that may be, and what they let go first.

Owns: each session's hold, when it ends, the share of the pool that all may hold together, and what
nobody comes back to.  Does not know: turns, owners, or when a session itself ends.
Idea: a hold is replaced, never changed: the new one is taken before the old one is given back, so
that nothing is evicted in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from radixcache.cache import RadixCache
from radixcache.deadlines import Hold
from radixcache.lease import PrefixKey
from radixcache.namespace import Namespace
from radixcache.node import Node
from radixcache.tokens import TOKEN_BYTES, common_prefix_len, num_tokens
from runtime.sessions.conversation import Conversation
from runtime.sessions.records import Turn


class Session:
    """What is known of one session; the book and its holds alone change it."""

    __slots__ = (
        "conversation",
        "ends_with_hold",
        "expires_at",
        "family",
        "held_until",
        "hold",
        "last_used",
        "namespace",
        "owner",
        "parent",
        "revision",
        "session_id",
        "shared_len",
        "tokens",
        "turn",
    )

    def __init__(
        self, session_id: str, *, owner: str, namespace: Namespace, parent: str | None
    ) -> None:
        self.session_id = session_id
        self.owner = owner
        self.namespace = namespace
        self.parent = parent
        self.family = session_id  # of the session that it, or what it was forked from, began as
        self.shared_len: int | None = None  # tokens that others had cached, from its first turn on
        self.tokens = b""
        self.conversation: Conversation | None = None
        self.revision = 0
        self.hold: Hold | None = None  # may have ended of itself
        self.held_until = 0.0  # seconds of the cache's clock
        self.ends_with_hold = False  # else it ends once it has been idle
        self.expires_at = 0.0
        self.last_used = 0  # logical time
        self.turn: Turn | None = None

    @property
    def held(self) -> Hold | None:
        """Its hold, unless that has ended."""
        return self.hold if self.hold is not None and not self.hold.has_ended else None


class SessionHolds:
    """The holds of a book's sessions.

    max_share  of the pool's blocks that all may hold together, and of a namespace's hard quota that
               its own may
    sessions   gives those that are open
    """

    def __init__(
        self,
        cache: RadixCache,
        clock: Callable[[], float],
        *,
        max_share: float,
        sessions: Callable[[], Iterable[Session]],
    ) -> None:
        self._max_share = max_share
        self._cache = cache
        self._clock = clock
        self._sessions = sessions

    def num_blocks(self, namespace: Namespace | None = None) -> int:
        """Blocks held now, shared ones counted once; O(sessions + nodes held).

        namespace  of the sessions that count; None: all
        """
        seen: set[Node] = set()
        for session in self._sessions():
            if namespace is not None and session.namespace != namespace:
                continue
            node: Node | None = session.held.node if session.held else None
            while node is not None and node not in seen:
                seen.add(node)
                node = node.parent
        return sum(len(node.block_ids) for node in seen)

    def keep(self, session: Session, seconds: float) -> None:
        """Hold what is cached by now for so long, and no shorter than it was to be held.

        Where that would be too much in all, what was held before is held on.
        """
        self.follow_epoch(session)
        now = self._clock()
        session.held_until = max(session.held_until, now + seconds)
        duration_s = session.held_until - now
        before = session.held
        self._take(session, len(session.tokens), duration_s)
        if before and not session.held:
            self._take(session, before.num_tokens * TOKEN_BYTES, duration_s)
        if before:
            self._cache.end_hold(before)

    def let_go(self, session: Session) -> None:
        """End a session's hold, if it has one."""
        if session.hold is not None:
            self._cache.end_hold(session.hold)
            session.hold = None

    def give_way(self, namespace: Namespace) -> bool:
        """End the hold of the session used longest ago, as a request finds no room.

        namespace  of the request: its own sessions go first, as a quota may be what is full
        returns    False where no session holds anything
        """
        if self.give_way_of_own(namespace):
            return True
        holding = [session for session in self._sessions() if session.held]
        if holding:
            self.let_go(min(holding, key=lambda s: (bool(s.turn), s.last_used)))
        return bool(holding)

    def give_way_of_own(self, namespace: Namespace) -> bool:
        """End the hold used longest ago of a namespace whose quota is full; False for none."""
        self._cache.expire()
        holding = [s for s in self._sessions() if s.held and s.namespace == namespace]
        if holding:
            self.let_go(min(holding, key=lambda s: (bool(s.turn), s.last_used)))
        return bool(holding)

    def note_found(self, session: Session, tokens: bytes) -> None:
        """Note what others have computed of the tokens that a session is about to have.

        Whatever is cached beyond what its own tokens have in common with them is theirs.
        """
        found = self._cache.match_len(PrefixKey(session.namespace, tokens))
        own = common_prefix_len(session.tokens, 0, tokens, num_tokens(tokens))
        if session.shared_len is not None and found > own:
            session.shared_len = found

    def abandon(self, session: Session, generated: bytes = b"") -> None:
        """Tell the cache that nobody comes back to what only this session has gone through.

        generated  what came behind its tokens of a turn that it does not take over; of a session
                   that is open nothing else is abandoned
        """
        if session.shared_len is None:
            return
        tokens, shared = session.tokens + generated, [session.shared_len]
        shared += [
            common_prefix_len(tokens, 0, other.tokens, num_tokens(other.tokens))
            for other in self._sessions()
            if other.family == session.family
        ]
        self._cache.abandon(PrefixKey(session.namespace, tokens), start=max(shared))

    def follow_epoch(self, session: Session) -> None:
        """Take a session to the present epoch of its namespace: only its tokens come along."""
        newest = self._cache.epochs.newest(session.namespace)
        if newest is not None and newest > session.namespace.epoch:
            self.let_go(session)
            session.namespace = msgspec.structs.replace(session.namespace, epoch=newest)

    def faults(self) -> list[str]:
        """Return what is wrong: too much held, or a hold that is not the cache's."""
        found = []
        count, most = self.num_blocks(), self._max_blocks(None)
        if count > most:
            found.append(f"{count} blocks are held, of {most} allowed")
        for session in self._sessions():
            hold, name = session.held, session.session_id
            if hold and self._cache.deadlines.holds.get(hold.hold_id) is not hold:
                found.append(f"{name} has a hold that is not the cache's")
            if hold and hold.num_tokens * TOKEN_BYTES > len(session.tokens):
                found.append(f"{name} holds more than it has")
        return found

    def _take(self, session: Session, size: int, duration_s: float) -> None:
        """Hold the cached part of the first `size` bytes, unless that would be too much in all."""
        session.hold = None
        if duration_s <= 0:
            return
        key = PrefixKey(session.namespace, session.tokens[:size])
        session.hold = self._cache.retain(key, duration_s)
        if not session.hold.num_tokens or not self._has_room(session.namespace):
            self._cache.end_hold(session.hold)
            session.hold = None

    def _has_room(self, namespace: Namespace) -> bool:
        # To count each session's blocks for itself is quick, and says enough while they are few.
        each = sum(session.held.num_tokens for session in self._sessions() if session.held)
        each //= self._cache.config.block_size
        return all(
            each <= self._max_blocks(who) or self.num_blocks(who) <= self._max_blocks(who)
            for who in (None, namespace)
        )

    def _max_blocks(self, namespace: Namespace | None) -> int:
        most = self._cache.config.num_blocks
        account = self._cache.accounts.by_namespace.get(namespace) if namespace else None
        if account and account.quota and account.quota.hard_limit is not None:
            most = min(most, account.quota.hard_limit)
        return int(self._max_share * most)
