"""Settings of the server, their defaults and limits.

Owns: every number of the HTTP side that an operator can set.  Does not know: the engine's settings.
"""

from __future__ import annotations

import math

import msgspec

from runtime.errors import InvalidSetting
from runtime.sessions.records import MAX_LIMIT_S, SessionLimits


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the HTTP side is told.

    max_body_bytes    largest body of a request
    max_header_bytes  largest request line with all headers
    max_connections   connections open at once; more are answered 503
    max_messages      messages of a conversation
    max_tools         tools that a request may offer; never more than 128
    max_json_depth    arrays and objects that may lie in each other
    max_backlog       pieces of a stream that may wait for a client that reads slower than they are
                      made; its request ends then, and its connection is cut
    header_timeout_s  seconds in which a connection's next request line and headers must be whole
    body_timeout_s    seconds in which a body must be whole
    idle_timeout_s    seconds that a connection may stay open between two requests, in whole ones
    write_timeout_s   seconds that a client may let its unread answer fill its buffer; its request
                      ends then, and its connection is cut
    drain_s           seconds that requests in flight may go on after the server is told to stop
    slow_miss_s       seconds to the first token from which on it is logged why a request missed; 0:
                      never
    open_metrics      whether /metrics is shown to whoever asks, where there are API keys
    max_tenant_labels tenants that metrics name; all others are "other"
    curve_samples     blocks watched to tell what a larger cache would hit; 0: nothing is watched
    max_sessions      sessions open at once
    max_tenant_sessions
                      sessions of one tenant open at once
    held_share        share of the pool that sessions may hold, from 0 to 1
    session_idle_s    seconds after its last use at which a session ends
    show_text         whether an administrator reads the text of all tenants on the tree's page
    recheck_every     one in so many finished requests is computed again while there is nothing else
                      to do, and compared bit by bit; 0: none

    Raises InvalidSetting that names the field.
    """

    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 64 << 10
    max_connections: int = 1024
    max_messages: int = 4096
    max_tools: int = 128
    max_json_depth: int = 64
    max_backlog: int = 16384
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    drain_s: float = 10.0
    slow_miss_s: float = 0.0
    open_metrics: bool = False
    max_tenant_labels: int = 64
    curve_samples: int = 8192
    max_sessions: int = 1024
    max_tenant_sessions: int = 256
    held_share: float = 0.5
    session_idle_s: float = 600.0
    show_text: bool = False
    recheck_every: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.startswith("max_") and value < 1:
                raise InvalidSetting(f"{name} is {value}: at least 1")
            if name.endswith("_timeout_s") and not (value > 0 and math.isfinite(value)):
                raise InvalidSetting(f"{name} is {value}: a number of seconds above 0")
        if not 0 <= self.drain_s < 1e6:
            raise InvalidSetting(f"drain_s is {self.drain_s}: from 0 to a million seconds")
        if not 0 <= self.slow_miss_s < 1e6:
            raise InvalidSetting(f"slow_miss_s is {self.slow_miss_s}: from 0 to a million seconds")
        if self.recheck_every < 0:
            raise InvalidSetting(f"recheck_every is {self.recheck_every}: 1 or more, 0 for none")
        if self.curve_samples < 0:
            raise InvalidSetting(f"curve_samples is {self.curve_samples}: at least 0")
        if not 0 <= self.held_share <= 1:
            raise InvalidSetting(f"held_share is {self.held_share}: from 0 to 1")
        if not 0 < self.session_idle_s <= MAX_LIMIT_S:
            raise InvalidSetting(f"session_idle_s is {self.session_idle_s}: a number above 0")

    @property
    def session_limits(self) -> SessionLimits:
        """What sessions may take."""
        return SessionLimits(
            max_sessions=self.max_sessions,
            max_sessions_each=self.max_tenant_sessions,
            max_held_share=self.held_share,
            idle_s=self.session_idle_s,
        )
