"""Pictures of a simulation: the curve with every policy on it, and how the tree grew.

Owns: how they look; the only file that imports matplotlib.  Does not know: how numbers came about.
Idea: one file answers one question for one trace, so all panels share the trace's name and colours
that stay apart for the colour-blind (Okabe and Ito 2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from radixcache.sim import HitCurve, Row, Trace

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKS = "osD^vP*"
CURVE_POINTS = 200
"""Sizes at which the curve is drawn."""


def draw(path: Path, trace: Trace, curve: HitCurve, rows: Sequence[Row]) -> None:
    """Write a picture; its kind is that of the file's name, such as .svg or .png.

    Raises ValueError for a kind that matplotlib can't write, or OSError.
    """
    with mpl.rc_context({"svg.hashsalt": "radixcache", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.suptitle(f"{trace.title}, blocks of {trace.block_size:,} tokens")
        rates, growth = figure.subplots(1, 2)
        _draw_rates(rates, trace, curve, rows)
        _draw_growth(growth, rows)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_rates(axes: mpl.axes.Axes, trace: Trace, curve: HitCurve, rows: Sequence[Row]) -> None:
    first = max(1, min([trace.longest, *(row.num_blocks for row in rows)]))
    last = max(trace.num_distinct, first + 1)
    ratio = (last / first) ** (1 / CURVE_POINTS)
    sizes = sorted({round(first * ratio**step) for step in range(CURVE_POINTS + 1)})
    axes.plot(sizes, [100 * curve.hit_rate(size) for size in sizes], color="#999999", label="LRU")
    axes.axhline(100 * curve.best, color="#999999", linestyle=":", label="no bound")
    for place, name in enumerate(dict.fromkeys(row.policy for row in rows)):
        mine = sorted((r.num_blocks, 100 * r.outcome.hit_rate) for r in rows if r.policy == name)
        axes.plot(
            *zip(*mine, strict=True),
            marker=MARKS[place % len(MARKS)],
            color=COLOURS[place % len(COLOURS)],
            linewidth=0.8,
            label=name,
        )
    axes.set(xscale="log", xlabel="blocks of the cache", ylabel="hit rate, %", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_growth(axes: mpl.axes.Axes, rows: Sequence[Row]) -> None:
    """The tree of the first policy, at each of its sizes."""
    shown = [row for row in rows if row.policy == rows[0].policy]
    for place, row in enumerate(shown):
        requests = [point.requests for point in row.outcome.growth]
        nodes = [point.num_nodes for point in row.outcome.growth]
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(requests, nodes, color=colour, label=f"{row.num_blocks:,} blocks")
    axes.set(xlabel="requests", ylabel=f"nodes of the tree under {rows[0].policy}", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
