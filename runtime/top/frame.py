"""One frame of the screen, as lines of text.

Owns: what stands where, at any width and height, and in which colour.  Does not know: keys, time
beyond what samples tell, the terminal.
Idea: a frame is a pure function of what is known, so what a test sees is what a terminal shows.
Nothing is told by colour alone: heat and state have a sign each, or in plain text a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec
from rich.text import Text

from runtime.top.gauges import Gauges
from runtime.top.listing import Line, Listing
from runtime.top.model import Node, TreeModel
from runtime.tree.records import Sample

HEAT = (
    (10.0, "█", "hot", "bold red"),
    (60.0, "▓", "warm", "magenta"),
    (600.0, "▒", "cool", "blue"),
    (float("inf"), "░", "cold", "bright_black"),
)
"""Up to so many seconds after its last use a node is that warm: sign, word, colour."""

STATES = {
    "p": ("●", "pinned", "bold green"),
    "e": ("○", "evictable", ""),
    "i": ("·", "inner", "bright_black"),
    "r": ("◆", "retained", "bold cyan"),
}
"""What a node's state looks like: sign, word, colour."""

KEYS = (
    ("↑↓", "move"),
    ("→", "open"),
    ("←", "close"),
    ("enter", "details"),
    ("s", "sort"),
    ("a", "as at first"),
    ("p", "pause"),
    ("q", "quit"),
)
"""Keys, and what they do."""

MAX_RUNNING = 5
"""Running sequences that are shown."""

_SPARKS = "▁▂▃▄▅▆▇█"
_WIDE, _MIDDLE, _NARROW = 100, 70, 45


class View(msgspec.Struct, kw_only=True):
    """All that a frame is made of.

    status   how the connection is, in words; "live" where all is well
    lines    of the tree, from the first to the last
    cursor   place of the line that is chosen, None where nobody can choose
    details  what is told of one node, below the tree
    is_plain words in place of signs, indents in place of lines: for scripts and screen readers
    """

    url: str
    model: TreeModel
    gauges: Gauges
    listing: Listing
    status: str = "no snapshot yet"
    is_paused: bool = False
    lines: list[Line] = []
    cursor: int | None = None
    details: list[str] = []
    is_plain: bool = False


def frame(view: View, width: int, height: int | None) -> list[Text]:
    """Return the lines of a frame, none wider than `width`, and `height` of them.

    height  None: as many as there are
    """
    above = [_title(view), *_panels(view, width)]
    below = _footer(view, width)
    room = None if height is None else max(1, height - len(above) - len(below) - 1)
    lines, first = view.lines, 0
    if room is not None and view.cursor is not None and len(lines) > room:
        first = min(max(0, view.cursor - room // 2), len(lines) - room)
    shown = list(islice(lines, first, None if room is None else first + room))
    tree = [_heading(view, len(shown))]
    for place, line in enumerate(shown, first):
        row = _plain_row(view, line) if view.is_plain else _row(view, line, width)
        if place == view.cursor:
            row.stylize("reverse")
        tree.append(row)
    if room is not None:
        tree += [Text("")] * (room - len(shown))
    drawn = [*above, *tree, *below]
    for text in drawn:
        if not view.is_plain:
            text.truncate(width, overflow="ellipsis")
    return drawn if height is None else drawn[:height]


def tree_room(view: View, width: int, height: int) -> int:
    """Return how many lines of the tree a frame has room for."""
    return max(1, height - len(_panels(view, width)) - len(_footer(view, width)) - 2)


def age_text(seconds: float) -> str:
    """Say how long ago something was, in few characters.

    >>> age_text(0.2), age_text(75), age_text(7300)
    ('0 s', '1 min', '2 h')
    """
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{int(max(0.0, seconds)) // unit} {name}"
    return f"{int(seconds) // 86400} d"


def share_text(share: float | None) -> str:
    """Say a share in per cent; a dash for none."""
    return "–" if share is None else f"{share:.0%}"


def sparkline(shares: Iterable[float | None]) -> str:
    """Draw shares from 0 to 1 as bars; a blank for none."""
    return "".join(
        " " if share is None else _SPARKS[min(7, int(max(0.0, share) * 8))] for share in shares
    )


def _title(view: View) -> Text:
    text = Text("radixcache top", style="bold")
    text.append(f"  {view.url}  ", style="not bold")
    is_well = view.status == "live"
    text.append(view.status, style="green not bold" if is_well else "bold red")
    if view.is_paused:
        text.append("  paused", style="bold yellow reverse")
    return text


def _panels(view: View, width: int) -> list[Text]:
    sample = view.gauges.now
    if sample is None:
        return [Text("waiting for the first sample", style="bright_black")]
    pieces = [*_cache_pieces(view, sample, width), *_engine_pieces(view, sample)]
    return [*_flow(pieces, width), *_running(view, sample, width)]


def _cache_pieces(view: View, sample: Sample, width: int) -> list[tuple[str, str]]:
    gauges, used = view.gauges, sample.total - sample.free
    private = used - sample.cached - sample.pinned
    minute = share_text(gauges.hit_rate(60.0))
    blocks = f"{sample.total:,}"
    if not view.is_plain and width >= _NARROW:
        minute += f" {sparkline(gauges.hit_rates(20)).strip()}".rstrip()
        blocks += f" {_fill_bar(sample, 16)}"
    return [
        ("hit rate", share_text(gauges.hit_rate())),
        ("last minute", minute),
        ("blocks", blocks),
        ("pinned", f"{sample.pinned:,}"),
        ("private", f"{max(0, private):,}"),
        ("evictable", f"{sample.cached:,}"),
        ("free", f"{sample.free:,}"),
        ("evicted", f"{sample.evicted:,}, {gauges.rate('evicted'):,.1f}/s"),
        ("nodes", f"{sample.nodes:,}"),
    ]


def _engine_pieces(view: View, sample: Sample) -> list[tuple[str, str]]:
    gauges = view.gauges
    warm, cold = (
        "–" if seconds is None else f"{seconds:.3f} s"
        for seconds in (sample.ttft_warm, sample.ttft_cold)
    )
    return [
        ("queue", f"{sample.waiting:,}"),
        ("running", f"{sample.running_total:,}"),
        ("generated", f"{gauges.rate('generated'):,.1f} tokens/s"),
        ("computed of prompts", f"{gauges.rate('computed'):,.1f} tokens/s"),
        ("first token", f"warm {warm}, cold {cold}"),
    ]


def _flow(pieces: Sequence[tuple[str, str]], width: int, *, gap: int = 3) -> list[Text]:
    """Lay out names and values from left to right, as many in a line as fit."""
    lines = [Text("")]
    for name, value in pieces:
        piece = Text.assemble((f"{name} ", "bright_black"), value)
        if lines[-1].cell_len and lines[-1].cell_len + gap + piece.cell_len > width:
            lines.append(Text(""))
        if lines[-1].cell_len:
            lines[-1].append(" " * gap)
        lines[-1].append_text(piece)
    return lines


def _fill_bar(sample: Sample, width: int) -> str:
    """Draw what the pool is made of: pinned, private, evictable, free."""
    total = max(1, sample.total)
    private = max(0, sample.total - sample.free - sample.cached - sample.pinned)
    bar = ""
    for count, sign in ((sample.pinned, "█"), (private, "▓"), (sample.cached, "▒")):
        bar += sign * round(width * count / total)
    return bar[:width].ljust(width, "░")


def _running(view: View, sample: Sample, width: int) -> list[Text]:
    lines = []
    for one in sample.running[:MAX_RUNNING]:
        done = (
            f"{one.prompt:,} prompt, {one.cached:,} cached, {one.computed:,} computed, "
            f"{one.output:,} output, {one.blocks:,} blocks"
        )
        who = f" {one.tenant}" if one.tenant else ""
        name = one.id if view.is_plain or width >= _WIDE else f"{one.id[:18]}…"
        lines.append(Text.assemble(("  running ", "bright_black"), f"{name}{who}: {done}"))
    more = sample.running_total - len(lines)
    if lines and more > 0:
        lines.append(Text(f"  running: {more:,} more", style="bright_black"))
    return lines


def _heading(view: View, num_shown: int) -> Text:
    num_nodes = len(view.model.nodes) - len(view.model.roots)
    text = f"tree of {num_nodes:,} nodes by {view.listing.order}, {num_shown:,} lines shown"
    hidden = len(view.lines) - num_shown
    return Text(text + (f", {hidden:,} above or below" if hidden else ""), style="bold")


def _footer(view: View, width: int) -> list[Text]:
    lines = [Text(line) for line in view.details]
    if view.is_plain:
        return lines
    signs = [(sign, word) for _, sign, word, _ in HEAT]
    signs += [(sign, word) for sign, word, _ in STATES.values()]
    legend = _flow(signs, width, gap=2) if width >= _NARROW else []
    keys = _flow(KEYS, width, gap=2) if view.cursor is not None else []
    return [*lines, *legend, *keys]


def _heat(view: View, node: Node) -> tuple[float, str, str, str]:
    """How long ago a node was used, and how that looks."""
    now = view.gauges.now
    age = max(0.0, (now.time if now else node.used) - node.used)
    sign, word, colour = next(look for limit, *look in HEAT if age < limit)
    return age, sign, word, colour


def _name(node: Node) -> str:
    if node.parent == 0:
        return node.label or "everybody"
    return f"{node.end - node.tokens:,}–{node.end:,}"


def _left_out(line: Line) -> str:
    return f"… {line.num_left_out:,} more, {line.blocks_left_out:,} blocks"


def _row(view: View, line: Line, width: int) -> Text:
    """One line: heat, state, place in the tree, and as many columns as the width allows."""
    node = line.node
    guides = "".join("│ " if more else "  " for more in line.guides[:-1])
    if line.guides:
        guides += "├─" if line.guides[-1] else "└─"
    if line.num_left_out:
        return Text(f"    {guides}{_left_out(line)}", style="italic")
    age, sign, _, colour = _heat(view, node)
    mark, _, mark_colour = STATES.get(node.state, STATES["i"])
    opener = ("▾ " if line.is_open else "▸ ") if node.children else "  "
    left = Text.assemble((sign, colour), " ", (mark, mark_colour), f" {guides}{opener}")
    left.append(_name(node), style="bold" if node.parent == 0 else "")
    if node.parent:
        left.append(f" #{node.node_id}", style="bright_black")
    if node.children and not line.is_open:
        left.append(f" +{node.num_below:,}", style="bright_black")
    right = _columns(view, node, age, width)
    room = max(1, width - len(right) - 1)
    left.truncate(room, overflow="ellipsis", pad=True)
    return left.append(f" {right}")


def _columns(view: View, node: Node, age: float, width: int) -> str:
    columns = f"{node.all_blocks:>7,} blk"
    if width >= _MIDDLE:
        size = 10 if width >= _WIDE else 6
        share = node.all_blocks / max(1, view.model.num_blocks)
        filled = min(size, round(share * size))
        columns += f" {'■' * filled}{'·' * (size - filled)} {node.all_hits:>6,} hit"
    if width >= _WIDE:
        columns += f" {node.pins:>3,} pin"
    return columns + (f" {age_text(age):>7}" if width >= _NARROW else "")


def _plain_row(view: View, line: Line) -> Text:
    """One line in words."""
    node, indent = line.node, "  " * (1 + len(line.guides))
    if line.num_left_out:
        return Text(f"{indent}{_left_out(line)}")
    age, _, heat, _ = _heat(view, node)
    state = STATES.get(node.state, STATES["i"])[1]
    kind = "namespace" if node.parent == 0 else f"node {node.node_id}, tokens"
    share = share_text(node.all_blocks / max(1, view.model.num_blocks))
    hidden = f", {node.num_below:,} nodes below" if node.children and not line.is_open else ""
    pins = f", {node.pins:,} pins" if node.pins else ""
    return Text(
        f"{indent}{kind} {_name(node)}: {node.all_blocks:,} blocks ({share}), "
        f"{node.all_hits:,} hits, {heat}, used {age_text(age)} ago, {state}{pins}{hidden}"
    )
