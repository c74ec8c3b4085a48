"""Drawing a token of one row on the host.

Owns: the filters and the draw, for a CPU.  Does not know: where noise comes from, other rows.
Idea: a filter keeps few of the likeliest tokens, so only those are sorted and given noise; how many
are looked at is found by looking at more until one of them falls out.  The same rules as
`kernels.sample`, to which tests hold it.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np

from runtime.plan import Draw

Array: TypeAlias = np.ndarray[Any, Any]

FEW: Final = 1024
"""Likeliest tokens that are looked at first; then eight times as many, and so on."""


def draw_token(logits: Array, noise: Array, draw: Draw) -> int:
    """Draw one token.

    logits  [V] float32
    noise   [V] float32, uniform in [0, 1)
    draw    its temperature is above 0; top_k, top_p and min_p as `kernels.sample` has them

    The likeliest token always stays.  Ties go to the lower id.  Cost: a few passes over the row,
    and a sort of the tokens that are looked at.
    Source: Gumbel-max draw (Maddison et al. 2014).
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scaled = logits / np.float32(draw.temperature)
        if not (draw.top_k or draw.min_p or draw.top_p < 1):
            return int((scaled + _gumbel(noise)).argmax())
        kept = np.sort(_kept(scaled, draw))  # of equal sums the first id is taken
        return int(kept[(scaled[kept] + _gumbel(noise[kept])).argmax()])


def _gumbel(noise: Array) -> Array:
    result: Array = -np.log(-np.log(np.maximum(noise, np.float32(1e-20))))
    return result


def _kept(scaled: Array, draw: Draw) -> Array:
    """Return the ids that the filters leave."""
    size, limit = len(scaled), draw.top_k or len(scaled)
    most = scaled.max()
    if not np.isfinite(most):  # it is infinitely likely, or all is lost
        return np.array([scaled.argmax()])
    weights = np.exp(scaled - most)
    if not draw.top_k and draw.top_p >= 1:
        return np.flatnonzero(weights >= np.float32(draw.min_p))
    count = min(size, max(FEW, draw.top_k))
    while True:
        ids = _likeliest(scaled, count)[:limit]
        some = weights[ids]
        total = np.sum(some if draw.top_k else weights, dtype=np.float64)
        before = np.cumsum(some, dtype=np.float64) - some
        drop = some < np.float32(draw.min_p)
        if draw.top_p < 1:
            drop |= before >= draw.top_p * total
        drop[0] = False
        if drop[-1] or len(ids) == limit or count == size:
            stay: Array = ids[~drop]
            return stay
        count = min(size, 8 * count)


def _likeliest(scaled: Array, count: int) -> Array:
    """Return the ids of the `count` likeliest tokens, likeliest first, and of their last's equals.

    Of equally likely ones the lower id comes first.
    """
    least = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    ids = np.flatnonzero(scaled >= least)
    return ids[np.argsort(-scaled[ids], kind="stable")]
