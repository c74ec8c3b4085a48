"""A token range that is worth more than the rest, and for how long.

Owns: the record, its limits, and which of two is stronger.  Does not know: nodes, clocks, or the
policy that asks for it.
"""

from __future__ import annotations

import math

import msgspec

from radixcache.errors import InvalidConfig

MAX_DURATION_S = 1e12
"""Some 30,000 years; what must not end has no duration."""


def check_duration(duration_s: float | None) -> None:
    """Raise InvalidConfig for a duration that is neither None nor a finite time above 0."""
    if duration_s is None:
        return
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float):
        raise InvalidConfig(f"a duration is a number of seconds, not {duration_s!r}")
    if not 0 < duration_s <= MAX_DURATION_S:
        raise InvalidConfig(f"a duration is above 0 and at most {MAX_DURATION_S:.0f} seconds")


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidConfig(f"{name} must be an integer of at least {least}, not {value!r}")


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token range of a sequence that is worth more than the rest, to a policy that asks.

    priority    at least 1; what has none has 0, and the higher stays longer
    start, end  tokens start … end − 1; end None: to the sequence's end, generated tokens included.
                A block that the range touches belongs to it
    duration_s  seconds after the last lease on it is released until the priority falls to 0;
                None: it stays

    Where two ranges meet, the higher priority holds; of equal ones the longer duration.
    Raises InvalidConfig.
    """

    priority: int
    start: int = 0
    end: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        _check_count("priority", self.priority, 1)
        _check_count("start", self.start, 0)
        if self.end is not None:
            _check_count("end", self.end, self.start + 1)
        check_duration(self.duration_s)

    @property
    def strength(self) -> tuple[int, float]:
        """(priority, duration in seconds): the greater wins."""
        return self.priority, math.inf if self.duration_s is None else self.duration_s

    def overlap(self, block_size: int, start: int, end: int) -> tuple[int, int] | None:
        """Return which tokens of `start … end` are in whole blocks that the range touches.

        start, end  token indices at block edges
        returns     first token and the one after the last; None where it touches none
        """
        first = max(start, self.start - self.start % block_size)
        last = end if self.end is None else min(end, -(-self.end // block_size) * block_size)
        return (first, last) if first < last else None
