"""Settings of the server, their defaults and limits.

Owns: every number of the HTTP side that an operator can set.  Does not know: the engine's settings.
"""

from __future__ import annotations

import msgspec

from runtime.errors import InvalidSetting


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the HTTP side is told.

    max_body_bytes  largest body of a request, in bytes
    drain_s         how long requests in flight may go on after the server is told to stop, seconds

    Raises InvalidSetting that names the field.
    """

    max_body_bytes: int = 8 << 20
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise InvalidSetting(f"max_body_bytes is {self.max_body_bytes}: at least 1")
        if not 0 <= self.drain_s < 1e6:
            raise InvalidSetting(f"drain_s is {self.drain_s}: from 0 to a million seconds")
