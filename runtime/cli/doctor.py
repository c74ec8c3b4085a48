"""`radixcache doctor`: why the prompts of a log miss, and what each mend would save."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from runtime.cli.options import check_counts, check_target
from runtime.cli.replaying import add_replay_flags, renderer_of
from runtime.doctor.diagnosis import Doctor
from runtime.doctor.log import read_log
from runtime.doctor.report_html import html_report
from runtime.doctor.report_text import percent, text_report
from runtime.errors import InvalidSetting

FAILED = 3
"""Exit code for a hit rate below what `--fail-below` asks for."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="say why the prompts of a log miss the cache")
    flag = parser.add_argument
    flag("log", type=Path, metavar="LOG", help="bodies of requests, one JSON object a line")
    flag("--html", type=Path, metavar="FILE", help="write the report as a page, too")
    flag(
        "--fail-below",
        type=float,
        metavar="SHARE",
        help=f"exit with {FAILED} where less than this share of tokens is found, from 0 to 1",
    )
    flag("--num-blocks", type=int, metavar="N", help="of the pool (default: it never evicts)")
    flag("--tokens-per-s", type=float, metavar="N", help="prompt tokens computed a second")
    add_replay_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay a log, print what is found, and say by the exit code whether it is good enough."""
    if args.fail_below is not None and not 0 <= args.fail_below <= 1:
        raise InvalidSetting(f"--fail-below is {args.fail_below}: a share from 0 to 1")
    if args.tokens_per_s is not None and not args.tokens_per_s > 0:
        raise InvalidSetting(f"--tokens-per-s is {args.tokens_per_s}: a number above 0")
    check_counts("--num-blocks", args.num_blocks)
    check_counts("--block-size", args.block_size)
    check_target("--html", args.html)
    log = read_log(args.log)
    doctor = Doctor(
        renderer_of(args),
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        tokens_per_s=args.tokens_per_s,
        progress=_quiet if args.json else _progress,
    )
    diagnosis = doctor.examine(log)
    title = args.log.name
    if args.html is not None:
        args.html.write_text(html_report(diagnosis, title), encoding="utf-8")
    report = text_report(diagnosis, title)
    print(msgspec.json.encode(diagnosis).decode() if args.json else report)
    if args.fail_below is not None and diagnosis.hit_rate < args.fail_below:
        found, wanted = percent(diagnosis.hit_rate), percent(args.fail_below)
        print(f"radixcache: {found} found, and {wanted} wanted", file=sys.stderr)
        return FAILED
    return 0


def _progress(stage: str) -> None:
    print(f"{stage} …", file=sys.stderr, flush=True)


def _quiet(stage: str) -> None:
    """Say nothing: whoever reads JSON reads no progress."""
