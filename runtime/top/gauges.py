"""Samples of the last minutes, and the numbers that are read off them.

Owns: which samples are kept, shares and rates.  Does not know: where samples come from, or colours.
Idea: counters only grow, so a rate is a difference of two samples; where one shrinks, another
server has taken the place of the first, and what was kept of that is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from runtime.tree.records import Sample

KEPT_S = 900.0
"""Seconds of samples that are kept."""


class Gauges:
    """The samples of the last 15 minutes."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples: deque[Sample] = deque()
        for sample in samples:
            self.add(sample)

    @property
    def now(self) -> Sample | None:
        """The last one."""
        return self._samples[-1] if self._samples else None

    def add(self, sample: Sample) -> None:
        """Take a sample; one that is no later than the last is left out."""
        last = self.now
        if last is not None:
            if sample.generated < last.generated or sample.asked < last.asked:
                self._samples.clear()
            elif sample.time <= last.time:
                return
        self._samples.append(sample)
        while self._samples[0].time < sample.time - KEPT_S:
            self._samples.popleft()

    def rate(self, name: str, seconds: float = 10.0) -> float:
        """Return how much a counter grows each second, over the last so many."""
        first, last = self._since(seconds), self.now
        if first is None or last is None or last.time <= first.time:
            return 0.0
        grown: float = getattr(last, name) - getattr(first, name)
        return grown / (last.time - first.time)

    def hit_rate(self, seconds: float | None = None) -> float | None:
        """Return the share of prompt tokens found, since the start or so many seconds ago.

        None where nothing was asked for.
        """
        last = self.now
        if last is None:
            return None
        first = None if seconds is None else self._since(seconds)
        asked = last.asked - (first.asked if first else 0)
        hit = last.hit - (first.hit if first else 0)
        return hit / asked if asked else None

    def hit_rates(self, count: int, seconds: float = 300.0) -> list[float | None]:
        """Return the hit rate of each of `count` equal parts of the last so many seconds."""
        last = self.now
        if last is None:
            return [None] * count
        begin, width = last.time - seconds, seconds / count
        asked, hit = [0] * count, [0] * count
        before = self._samples[0]
        for sample in self._samples:
            part = min(count - 1, int((sample.time - begin) / width))
            if part >= 0:
                asked[part] += sample.asked - before.asked
                hit[part] += sample.hit - before.hit
            before = sample
        return [found / of if of else None for found, of in zip(hit, asked, strict=True)]

    def _since(self, seconds: float) -> Sample | None:
        """The first sample that is no older than so many seconds."""
        last = self.now
        if last is None:
            return None
        return next(sample for sample in self._samples if sample.time >= last.time - seconds)
