"""`radixcache pull`: fetch a model into the user's cache folder."""

from __future__ import annotations

import argparse

import msgspec

from runtime.cli.options import shown_progress
from runtime.config import DEFAULT_MODEL
from runtime.weights.pull import pull


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("pull", help="fetch a model, checked by its sha256")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"default {DEFAULT_MODEL}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch the model unless it is there, and print where it lies."""
    with shown_progress(quiet=args.json) as progress:
        path = pull(args.model, progress=progress)
    if args.json:
        found = {"model": args.model, "path": str(path), "bytes": path.stat().st_size}
        print(msgspec.json.encode(found).decode())
    else:
        print(path)
    return 0
