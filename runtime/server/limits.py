"""Limits on what one request, and one tenant, may ask for.

Owns: how deep JSON lies, how many parts a body has, and how many requests of a tenant wait.  Does
not know: HTTP, what the parts mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from runtime.errors import InvalidRequest, ServerBusy
from runtime.server.config import ServerConfig

MAX_CONTAINERS = 1 << 17
"""Arrays and objects of a body: millions of them take seconds to build, on everybody's time."""

_PIECE = 1 << 16
"""Bytes that are looked at together, so that little memory is taken."""


def is_deeper(text: bytes, depth: int) -> bool:
    """Return True where arrays and objects of a JSON text lie deeper in each other than `depth`.

    O(n) without a stack, so that no text is too deep to be looked at; brackets within strings
    don't count.

    >>> is_deeper(b'[[1], "[["]', 2), is_deeper(b'[[1], [[2]]]', 2)
    (False, True)
    """
    if _num_brackets(text) <= depth:
        return False
    level = 0
    for steps in _steps(text):
        levels = np.cumsum(steps, dtype=np.int32)
        if level + levels.max(initial=0) > depth:
            return True
        level += int(levels[-1]) if len(levels) else 0
    return False


def has_more(text: bytes, most: int) -> bool:
    """Return True where a JSON text has more than `most` arrays and objects; O(n).

    >>> has_more(b'[[], {}, "[[["]', 3), has_more(b'[[], {}, "[[["]', 2)
    (False, True)
    """
    if _num_brackets(text) <= most:
        return False
    left = most
    for steps in _steps(text):
        left -= int(np.count_nonzero(steps > 0))
        if left < 0:
            return True
    return False


def _num_brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _steps(text: bytes) -> Iterator[npt.NDArray[np.int8]]:
    """Yield 1 for each bracket that opens outside strings, -1 for each that closes; in pieces."""
    # Without escaped characters, every other stretch between quotes is a string.
    letters = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_string = False
    for start in range(0, len(letters), _PIECE):
        piece = letters[start : start + _PIECE]
        strings = np.logical_xor.accumulate(piece == ord('"')) ^ is_string
        is_string = bool(strings[-1])
        brackets = piece[~strings] | 0x20  # "[" and "{" differ in this bit, as "]" and "}" do
        brackets = brackets[(brackets == ord("{")) | (brackets == ord("}"))]
        yield np.where(brackets == ord("{"), np.int8(1), np.int8(-1))


def check_parts(body: object, config: ServerConfig) -> None:
    """Raise InvalidRequest for a body with too many messages or tools."""
    for name, limit in (("messages", config.max_messages), ("tools", config.max_tools)):
        parts = getattr(body, name, None)
        if isinstance(parts, list | tuple) and len(parts) > limit:
            raise InvalidRequest(
                f"{name} has {len(parts)} entries, and this server takes at most {limit}",
                param=name,
            )


class WaitingRoom:
    """How many requests of each tenant wait for their first step; for one event loop."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    def enter(self, tenant: str, count: int, *, limit: int | None) -> None:
        """Count requests in.

        Raises ServerBusy where more than `limit` would wait, InvalidRequest where they alone are
        more; none is counted then.
        """
        if limit is not None and count > limit:
            raise InvalidRequest(
                f"{count} prompts at once, and {limit} of this tenant's may wait: send fewer",
                param="prompt",
            )
        if limit is not None and self._waiting[tenant] + count > limit:
            raise ServerBusy(
                f"{self._waiting[tenant]} requests of this tenant wait already, and {limit} may: "
                "try again later",
                retry_after_s=1.0,
            )
        self._waiting[tenant] += count

    def leave(self, tenant: str, count: int) -> None:
        """Count requests out that began, or ended before they did."""
        self._waiting[tenant] -= count
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def num_waiting(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._waiting.get(tenant, 0)
