"""The screen: from events and keys to frames, until somebody quits.

Owns: what each key does, pausing, and when a frame is drawn.  Does not know: HTTP, how a frame
looks.
Idea: events change what is known, keys change what is looked at, and a frame is drawn of both; so
all but the terminal itself runs in tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
from rich.console import Console, Group
from rich.live import Live

from runtime.errors import InvalidRequest, NoAnswer, RequestError
from runtime.top.feed import Event, FeedThread, Lost, Refused
from runtime.top.frame import View, frame, tree_room
from runtime.top.gauges import Gauges
from runtime.top.keys import Keyboard
from runtime.top.listing import Listing
from runtime.top.model import Change, Snapshot, TreeModel
from runtime.tree.records import NodeAnswer, Sample

TURN_S = 0.1
"""Seconds that keys are waited for before events are looked at."""

MAX_HELD = 5000
"""Events that wait while the screen is paused; beyond, the feed is begun anew afterwards."""

Details = Callable[[int], bytes]
"""Asks the server for one node; raises InvalidRequest, NoAnswer."""


class Screen:
    """What is known and what is looked at.

    details    asks for one node
    reconnect  lets the feed begin anew, where a change is missing
    """

    def __init__(self, url: str, *, details: Details, reconnect: Callable[[], None]) -> None:
        self.view = View(url=url, model=TreeModel(), gauges=Gauges(), listing=Listing(), cursor=0)
        self.has_quit = False
        self._details = details
        self._reconnect = reconnect
        self._held: deque[Event] = deque()
        self._has_dropped = False
        self._chosen: tuple[int, bool] | None = None  # the line's key, which survives a new frame
        self._size = (80, 24)

    def take(self, event: Event) -> None:
        """Take an event; while paused, keep it for later.

        Raises InvalidRequest where the server refused the feed.
        """
        if isinstance(event, Refused):
            raise InvalidRequest(event.why)
        if not self.view.is_paused or isinstance(event, Lost):
            self._apply(event)
        elif isinstance(event, Snapshot):  # nothing before it is of account
            self.view.status = "live"
            self._held = deque([event])
        elif len(self._held) < MAX_HELD:
            self._held.append(event)
        else:
            self._held.clear()
            self._has_dropped = True

    def lay_out(self, width: int, height: int) -> None:
        """Choose the lines of the tree for a screen of that size."""
        view = self.view
        self._size = width, height
        view.lines = view.listing.lines(view.model, tree_room(view, width, height))
        keys = [line.key for line in view.lines]
        if self._chosen in keys:
            view.cursor = keys.index(self._chosen)
        self._choose(view.cursor or 0)

    def press(self, key: str) -> None:
        """Do what a key stands for; nothing for others."""
        view = self.view
        page = max(1, tree_room(view, *self._size) - 1)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        if key in moves:
            self._choose((view.cursor or 0) + moves[key])
        elif key in ("home", "end"):
            self._choose(0 if key == "home" else len(view.lines) - 1)
        elif key in ("q", "escape"):
            self.has_quit = key == "q" or not view.details
            view.details = []
        elif key in ("p", "space"):
            self._pause()
        elif key == "s":
            view.listing.next_order()
        elif key == "a":
            view.listing.forget()
        elif view.lines:
            self._press_on_line(key)
        self.lay_out(*self._size)

    def _press_on_line(self, key: str) -> None:
        view = self.view
        line = view.lines[view.cursor or 0]
        if key in ("right", "l") or (key == "enter" and line.num_left_out):
            view.listing.open(line)
        elif key in ("left", "h"):
            if line.is_open or line.num_left_out:
                view.listing.close(line)
            else:
                ids = [above.node.node_id for above in view.lines]
                if line.node.parent in ids:
                    self._choose(ids.index(line.node.parent))
        elif key in ("enter", "d"):
            view.details = self._told(line.node.node_id)

    def _choose(self, place: int) -> None:
        lines = self.view.lines
        self.view.cursor = place = max(0, min(place, len(lines) - 1))
        self._chosen = lines[place].key if lines else None

    def _pause(self) -> None:
        view = self.view
        view.is_paused = not view.is_paused
        if view.is_paused:
            return
        if self._has_dropped:
            self._has_dropped = False
            self._reconnect()
        while self._held:
            self._apply(self._held.popleft())

    def _apply(self, event: Event) -> None:
        view = self.view
        if isinstance(event, Snapshot):
            view.model.start(event)
            view.gauges.add(event.sample)
            view.status = "live"
        elif isinstance(event, Change):
            if not view.model.apply(event):
                self._reconnect()
        elif isinstance(event, Sample):
            view.gauges.add(event)
        elif isinstance(event, Lost):
            view.status = f"connection lost, trying again in {event.wait_s:g} s: {event.why}"

    def _told(self, node_id: int) -> list[str]:
        """Say what one node is."""
        try:
            node = msgspec.json.decode(self._details(node_id), type=NodeAnswer)
        except (RequestError, NoAnswer, msgspec.DecodeError) as error:
            return [f"node {node_id}: {error}"]
        return told(node)


def told(node: NodeAnswer) -> list[str]:
    """Say in a few lines what a node is; control characters of its text are escaped."""
    rank = "not now" if node.eviction_rank is None else f"after {node.eviction_rank:,} others"
    pinned = ", ".join(f"{pin.kind} {pin.id}" for pin in node.pinned_by) or "nobody"
    text = f"hidden: {node.text_hidden}" if node.text is None else repr(node.text)
    return [
        f"node {node.id} of {node.namespace or 'everybody'}: tokens "
        f"{node.path_tokens - node.tokens:,}–{node.path_tokens:,}, {node.num_blocks:,} blocks, "
        f"{node.hits:,} hits, {node.children:,} children",
        f"evicted {rank}; pinned by {pinned}",
        f"text {text}",
    ]


def show(screen: Screen, feed: FeedThread, keys: Keyboard, console: Console) -> None:
    """Draw until somebody quits.  Raises InvalidRequest where the server refuses the feed."""

    def drawn() -> Group:
        """Lay out and draw what is shown, as large as the terminal is now."""
        width, height = console.size
        screen.lay_out(width, height)
        return Group(*frame(screen.view, width, height))

    with Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
        size = console.size
        while not screen.has_quit:
            pressed = keys.pressed(TURN_S)
            for key in pressed:
                screen.press(key)
            is_new = bool(pressed) or size != console.size
            size = console.size
            while not feed.events.empty():
                screen.take(feed.events.get())
                is_new = True
            if is_new:
                live.update(drawn(), refresh=True)
