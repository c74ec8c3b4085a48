"""The command line: `radixcache serve | generate | chat | explain | pull | info | verify`.

Owns: finding the command, and turning errors into one line and an exit code.  Does not know: what
a command does.

    exit codes   0 done · 1 the world (files, network, port, engine) · 2 the caller
                 130 interrupted
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from radixcache.errors import CallerError
from runtime.cli import chat, explain, generate, info, pull, serve, verify
from runtime.cli.options import report
from runtime.errors import InvalidSetting, RequestError, RuntimeFault

_COMMANDS = (serve, generate, chat, explain, pull, info, verify)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode gets escapes, no traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(arguments)
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="radixcache", description="Serve a language model that keeps the K/V of every prefix."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    for sub in commands.choices.values():
        sub.add_argument("--json", action="store_true", help="print JSON, one object a line")
    return parser


def _version() -> str:
    try:
        return version("radixcache")
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
