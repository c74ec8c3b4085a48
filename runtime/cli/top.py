"""`radixcache top`: the live tree of a server, in the terminal."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from contextlib import suppress

import msgspec
from rich.console import Console

from runtime.cli.asking import KEY_VARIABLE, Server
from runtime.errors import InvalidRequest, NoAnswer
from runtime.top.feed import SILENCE_S, FeedThread, events_of
from runtime.top.frame import View, frame
from runtime.top.gauges import Gauges
from runtime.top.keys import keyboard
from runtime.top.listing import Listing
from runtime.top.model import Snapshot, TreeModel
from runtime.top.screen import Screen, show
from runtime.tree.records import History

PLAIN_LINES = 40
"""Lines of the tree in a frame that is printed once, unless asked for another number."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("top", help="show the live tree of a server in the terminal")
    flag = parser.add_argument
    flag("url", nargs="?", default="http://127.0.0.1:8000", help="of the server (port 8000 here)")
    flag("--api-key", metavar="KEY", help=f"of that server (default: ${KEY_VARIABLE})")
    flag("--once", action="store_true", help="print one frame in words, and end")
    flag(
        "--lines",
        type=int,
        default=PLAIN_LINES,
        metavar="N",
        help=f"of the tree that --once prints, about (default {PLAIN_LINES})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the tree until somebody quits, or print it once."""
    server = Server(args.url, args.api_key)
    if args.lines < 1:
        raise InvalidRequest(f"--lines {args.lines}: at least 1")
    if args.json:
        print(msgspec.json.encode(_snapshot(server).sample).decode())
    elif args.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(_printed(server, args.lines))
    else:
        _show(server)
    return 0


def _snapshot(server: Server) -> Snapshot:
    """Return the tree as it is now.  Raises InvalidRequest, NoAnswer."""
    with server.open("/tree/feed", timeout_s=SILENCE_S) as answer:
        try:
            for event in events_of(answer):
                if isinstance(event, Snapshot):
                    return event
        except (OSError, msgspec.DecodeError) as error:
            raise NoAnswer(f"no feed from {server.url}: {error}; what runs there?") from None
    raise NoAnswer(f"{server.url} ended the feed: is it shutting down?")


def _gauges(server: Server) -> Gauges:
    """Return the samples of the last minutes; none where they can't be had."""
    with suppress(NoAnswer, InvalidRequest, msgspec.DecodeError):
        history = server.read("/tree/history", timeout_s=SILENCE_S)
        return Gauges(msgspec.json.decode(history, type=History).samples)
    return Gauges()


def _printed(server: Server, num_lines: int) -> str:
    """Return one frame in words; as wide as it must be."""
    view = View(
        url=server.url,
        model=TreeModel(),
        gauges=_gauges(server),
        listing=Listing(),
        status="live",
        is_plain=True,
    )
    snapshot = _snapshot(server)
    view.model.start(snapshot)
    view.gauges.add(snapshot.sample)
    view.lines = view.listing.lines(view.model, num_lines)
    width = shutil.get_terminal_size((100, 24)).columns
    return "\n".join(line.plain for line in frame(view, width, None))


def _show(server: Server) -> None:
    feed = FeedThread(server)
    screen = Screen(
        server.url,
        details=lambda node_id: server.read(f"/tree/nodes/{node_id}", timeout_s=SILENCE_S),
        reconnect=feed.reconnect,
    )
    screen.view.gauges = _gauges(server)
    feed.start()
    for number in (signal.SIGTERM, signal.SIGINT):  # which whoever started us may have shut off
        signal.signal(number, signal.default_int_handler)  # leaves the terminal in order
    try:
        with suppress(KeyboardInterrupt), keyboard() as keys:
            show(screen, feed, keys, Console())
    finally:
        feed.close()
