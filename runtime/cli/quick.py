"""The commands that need no model: they start without loading torch.

Owns: which they are, and running a command of any list.  Does not know: what a command does.

    exit codes   0 done · 1 the world (files, network, port, engine) · 2 the caller
                 3 a log's hit rate is below `doctor --fail-below` · 130 interrupted
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from radixcache.errors import CallerError
from runtime.cli import simulate, top
from runtime.cli.options import report
from runtime.errors import InvalidSetting, RequestError, RuntimeFault


class Command(Protocol):
    """A module of one command."""

    def add_parser(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the command's parser, which sets `run`."""


COMMANDS: dict[str, Command] = {"simulate": simulate, "top": top}
"""By name, as the command line has it."""


def takes(arguments: Sequence[str]) -> bool:
    """Return whether a command line is one of ours."""
    return bool(arguments) and arguments[0] in COMMANDS


def main() -> int:
    """Run one of these commands and return its exit code."""
    return run(tuple(COMMANDS.values()))


def run(commands: Sequence[Command], arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code; errors become one line."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode gets escapes, no traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = parser_of(commands).parse_args(arguments)
    try:
        code: int = args.run(args)
    except (RequestError, InvalidSetting, CallerError) as error:
        return report(error, 2, as_json=args.json)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RuntimeFault, OSError) as error:
        return report(error, 1, as_json=args.json)
    except KeyboardInterrupt:
        return 130
    return code


def parser_of(commands: Sequence[Command]) -> argparse.ArgumentParser:
    """Return the parser of some commands."""
    parser = argparse.ArgumentParser(
        prog="radixcache", description="Serve a language model that keeps the K/V of every prefix."
    )
    parser.add_argument("--version", action="version", version=_version())
    choices = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in commands:
        command.add_parser(choices)
    for sub in choices.choices.values():
        sub.add_argument("--json", action="store_true", help="print JSON, one object a line")
    return parser


def _version() -> str:
    try:
        return version("radixcache")
    except PackageNotFoundError:
        return "not installed"
