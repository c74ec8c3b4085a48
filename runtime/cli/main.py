"""The command line: `radixcache serve | generate | chat | explain | doctor | pull |
info | verify | bench | simulate | top`.

Owns: the list of all commands.  Does not know: what a command does, or how one is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from runtime.cli import bench, chat, doctor, explain, generate, info, pull, quick, serve, verify

_COMMANDS: tuple[quick.Command, ...] = (
    *(serve, generate, chat, explain, doctor, pull, info, verify, bench),
    *quick.COMMANDS.values(),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return quick.run(_COMMANDS, arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    return quick.parser_of(_COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
