"""Keys as they are pressed, of a terminal that would otherwise wait for the end of a line.

Owns: the terminal's mode, and which bytes are which key.  Does not know: what a key does.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import InvalidSetting

if sys.platform != "win32":
    import termios
    import tty

_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
}
_SEQUENCES |= {key.replace(b"[", b"O"): name for key, name in _SEQUENCES.items()}
_BYTES = {0x0D: "enter", 0x0A: "enter", 0x1B: "escape", 0x20: "space", 0x03: "q", 0x04: "q"}


def keys_of(pressed: bytes) -> list[str]:
    r"""Return the names of the keys that bytes stand for; what is unknown is left out.

    >>> keys_of(b"s\x1b[B\r")
    ['s', 'down', 'enter']
    """
    names = []
    while pressed:
        for sequence, name in _SEQUENCES.items():
            if pressed.startswith(sequence):
                names.append(name)
                pressed = pressed[len(sequence) :]
                break
        else:
            first, pressed = pressed[0], pressed[1:]
            if first in _BYTES:
                names.append(_BYTES[first])
            elif 0x20 < first < 0x7F:
                names.append(chr(first))
    return names


class Keyboard:
    """The keys of standard input."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def pressed(self, timeout_s: float) -> list[str]:
        """Return the keys pressed within so many seconds, as soon as there are any."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        found = os.read(self._fd, 1024)
        return keys_of(found) if found else ["q"]  # the terminal is gone


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Take keys one by one, unseen, while the context lasts.

    Raises InvalidSetting where terminals are of another kind.
    """
    if sys.platform == "win32":
        raise InvalidSetting("keys can't be read one by one here: use --once")
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
