"""A token range that is worth more than the rest, and for how long.

Owns: the record, its limits, and which of two is stronger.  Does not know: nodes, clocks, or the
policy that asks for it.
"""

from __future__ import annotations

import math

import msgspec

from radixcache.errors import InvalidConfig


def check_duration(duration_s: float | None) -> None:
    """Raise InvalidConfig for a duration that is neither None nor a finite time above 0."""
    if duration_s is None:
        return
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float):
        raise InvalidConfig(f"a duration is a number of seconds, not {duration_s!r}")
    if not 0 < duration_s < math.inf:
        raise InvalidConfig(f"a duration must be above 0 and finite, not {duration_s!r}")


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
        end = self.start + 1 if self.end is None else self.end
        for name, value, least in (
            ("priority", self.priority, 1),
            ("start", self.start, 0),
            ("end", end, self.start + 1 if isinstance(self.start, int) else 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidConfig(f"{name} must be an integer of at least {least}, not {value!r}")
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
