"""What a simulation found, as text: a table, a curve drawn in characters, a sentence.

Owns: how numbers are laid out.  Does not know: how they came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixcache.sim.roster import Row
from radixcache.sim.trace import Trace

PLOT_WIDTH = 64
"""Columns of a plot."""

PLOT_HEIGHT = 12
"""Lines of a plot."""

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def heading(trace: Trace, best: float) -> str:
    """Return what a trace is, and the hit rate of a cache without bounds."""
    minutes = f" in {trace.seconds / 60:,.0f} minutes" if trace.has_times else ""
    return (
        f"{trace.title}: {len(trace.requests):,} requests{minutes}, "
        f"{trace.num_references:,} references to {trace.num_distinct:,} different blocks of "
        f"{trace.block_size:,} tokens\nhit rate of a cache without bounds: {best:.2%}"
    )


def table(rows: Sequence[Row]) -> str:
    """Return hit rates in per cent: a line for each policy, a column for each size."""
    sizes = sorted({row.num_blocks for row in rows})
    policies = list(dict.fromkeys(row.policy for row in rows))
    rates = {(row.policy, row.num_blocks): f"{row.outcome.hit_rate:.2%}" for row in rows}
    heads = [f"{size:,}" for size in sizes]
    first = max(len("blocks"), *map(len, policies))
    widths = [max(len(head), len("100.00%")) for head in heads]
    lines = [("blocks", heads)]
    lines += [(name, [rates.get((name, size), "") for size in sizes]) for name in policies]
    return "\n".join(
        f"{name:<{first}}  "
        + "  ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        for name, cells in lines
    )


def plot(rate: Callable[[int], float], *, most: int, best: float, mark: int | None = None) -> str:
    """Draw hit rate over cache size in characters, from nothing to `best` and to `most` blocks.

    rate  hit rate of a cache of so many blocks
    mark  a size to point at, such as the present one
    """
    best = best or 1.0
    columns = [rate(max(1, round(most * (at + 1) / PLOT_WIDTH))) / best for at in range(PLOT_WIDTH)]
    lines = []
    for level in range(PLOT_HEIGHT - 1, -1, -1):
        filled = [min(8, max(0, round(8 * (c * PLOT_HEIGHT - level)))) for c in columns]
        label = f"{best * (level + 1) / PLOT_HEIGHT:6.1%}"
        lines.append(f"{label} │{''.join(_EIGHTHS[eighth] for eighth in filled)}")
    lines.append(" " * 6 + " └" + "─" * PLOT_WIDTH)
    end = f"{most:,} blocks"
    lines.append(" " * 8 + "0" + end.rjust(PLOT_WIDTH - 1))
    if mark is not None and 0 < mark <= most:
        at = min(PLOT_WIDTH - 1, max(0, round(PLOT_WIDTH * mark / most) - 1))
        lines.append(" " * (8 + at) + f"▲ {mark:,}")
    return "\n".join(lines)


def growth(row: Row) -> str:
    """Draw the number of the tree's nodes over the requests in one line of characters."""
    nodes = [point.num_nodes for point in row.outcome.growth]
    most = max(nodes, default=0) or 1
    bars = "".join(_EIGHTHS[max(1, round(8 * count / most))] for count in nodes)
    return f"nodes under {row.policy}, {row.num_blocks:,} blocks: {bars} at most {most:,}"


def advice(
    rate: Callable[[float], float], *, prompt_tokens_per_s: float | None, near: float = 0.005
) -> str:
    """Say in words what more memory would bring.

    rate                 hit rate at so many times the present size
    prompt_tokens_per_s  of all requests together; None where nobody knows the time
    near                 a gain of hit rate that is nothing

    >>> advice(lambda times: min(0.6, 0.3 * times), prompt_tokens_per_s=1000)
    'at 2× the memory the hit rate goes from 30 % to 60 %, which saves 300 prefill tokens a \
second; beyond 2× nothing'
    """
    now, steps = rate(1.0), (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)
    most = rate(steps[-1])
    if most - now < near:
        return f"the hit rate is {now:.0%} and more memory changes nothing".replace("%", " %")
    enough = next(times for times in steps if most - rate(times) < near)
    shown = min(2.0, enough)
    gain = rate(shown) - now
    saved = ""
    if prompt_tokens_per_s is not None:
        saved = f", which saves {gain * prompt_tokens_per_s:,.0f} prefill tokens a second"
    text = f"at {shown:g}× the memory the hit rate goes from {now:.0%} to {rate(shown):.0%}"
    rest = f"; beyond {enough:g}× nothing"
    if enough > shown:
        rest = f"; at {enough:g}× to {rate(enough):.0%}, and beyond nothing"
    return text.replace("%", " %") + saved + rest.replace("%", " %")
