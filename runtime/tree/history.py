"""Samples of the last minutes, and when logical time was: both in fixed memory.

Owns: the tables.  Does not know: what is sampled, or who asks.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec
import numpy as np

from runtime.tree.records import Sample

_FIELDS = tuple(name for name in Sample.__struct_fields__ if name != "running")
_MAYBE = ("ttft_warm", "ttft_cold")
_EXACT = ("time", *_MAYBE)


class SampleRing:
    """The last `size` samples, 8 bytes a number; their lists of sequences are not kept."""

    def __init__(self, size: int) -> None:
        self._table = np.zeros((size, len(_FIELDS)))
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._table))

    def add(self, sample: Sample) -> None:
        """Keep a sample, instead of the oldest where there is no room."""
        row = [getattr(sample, name) for name in _FIELDS]
        self._table[self._count % len(self._table)] = [np.nan if v is None else v for v in row]
        self._count += 1

    def samples(self) -> list[Sample]:
        """Return all that are kept, oldest first."""
        first = self._count % len(self._table) if self._count > len(self._table) else 0
        rows = np.roll(self._table[: len(self)], -first, axis=0).tolist()
        return [msgspec.convert(dict(map(_value, _FIELDS, row)), Sample) for row in rows]


def _value(name: str, number: float) -> tuple[str, float | int | None]:
    if name in _MAYBE and np.isnan(number):
        return name, None
    return name, number if name in _EXACT else int(number)


class Timeline:
    """When logical time was what, over the whole life of a server.

    size  moments kept at most, at least 4

    Where there is no room, every second one of the older half is forgotten: a time is told the more
    exactly the less time has passed since.
    """

    def __init__(self, size: int = 2048) -> None:
        self._size = size
        self._ticks: list[int] = []
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._ticks)

    def note(self, tick: int, time: float) -> None:
        """Note what logical time is now; nothing where it has not moved."""
        if self._ticks and self._ticks[-1] >= tick:
            return
        if len(self._ticks) >= self._size:
            half = self._size // 2
            for kept in (self._ticks, self._times):
                del kept[1:half:2]
        self._ticks.append(tick)
        self._times.append(round(time, 3))

    def when(self, tick: int) -> float:
        """Return the first moment known at which `tick` was over; the last one for the future.

        Seconds since 1970, 0.0 where no moment is known; O(log size).
        """
        place = bisect_left(self._ticks, tick)
        return self._times[min(place, len(self._times) - 1)] if self._times else 0.0
