"""`radixcache simulate`: what a cache of another size or policy would have hit.

Owns: the flags, and what is printed.  Does not know: how a trace is read or replayed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from radixcache.sim.curve import HitCurve, lru_curve
from radixcache.sim.generate import KINDS, generate, traffic_of
from radixcache.sim.read import HASHED_TOKENS, Encode, read_trace
from radixcache.sim.replay import Speed
from radixcache.sim.report import advice, growth, heading, plot, table
from radixcache.sim.roster import ROSTER, Row, simulate
from radixcache.sim.texts import pieces
from radixcache.sim.trace import Trace
from runtime.cli.options import check_counts, check_target, shown_progress
from runtime.errors import InvalidSetting
from runtime.tokenizer.load import tokenizer_from_folder

DEFAULT_SHARES = (0.01, 0.03, 0.1, 0.3)
"""Of the different blocks: the sizes that are simulated unless others are asked for."""

MAX_VOCABULARY = 1 << 20

PICTURES = (".svg", ".png")
"""Kinds of pictures."""

Draw = Callable[[Path, Trace, HitCurve, Sequence[Row]], None]
Show = Callable[[str, int, int | None], None]


class JsonRow(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints of one policy at one size.

    block_size  only where several were asked for
    """

    policy: str
    num_blocks: int
    hit_rate: float
    hits: int
    references: int
    block_size: int | msgspec.UnsetType = msgspec.UNSET


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("simulate", help="replay a trace in caches of other sizes")
    flag = parser.add_argument
    flag(
        "trace",
        metavar="TRACE",
        help="a file of requests (block hashes or chats, gzip or not), or made traffic: "
        f"{', '.join(KINDS)}, with parameters as in chat:sessions=100,turns=8",
    )
    flag(
        "--policy",
        action="append",
        default=[],
        choices=tuple(ROSTER),
        help="order of eviction; repeatable (default lru and opt)",
    )
    flag(
        "--blocks",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="size of the cache; repeatable (default 1, 3, 10 and 30 %% of the different blocks)",
    )
    flag(
        "--block-size",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help=f"tokens a block; repeatable (default {HASHED_TOKENS})",
    )
    flag(
        "--concurrency",
        choices=("none", "trace"),
        default="none",
        help="trace: requests come at the trace's times and keep their blocks while they are "
        "served; none: one after another (default)",
    )
    speed = Speed()
    for name, text in (
        ("prefill-rate", "tokens a second computed of a prompt"),
        ("decode-rate", "tokens a second of an answer"),
    ):
        value = getattr(speed, name.replace("-", "_"))
        text = f"{text}, with --concurrency trace (default {value:g})"
        flag(f"--{name}", type=float, default=value, metavar="X", help=text)
    _add_output_flags(parser)
    parser.set_defaults(run=run)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--requests", type=int, metavar="N", help="replay the first N requests only")
    flag("--tokenizer", type=Path, metavar="FOLDER", help="with tokenizer.json, for logs of text")
    flag(
        "--curve",
        action="store_true",
        help="draw LRU's hit rate over all sizes, and how the first policy's tree grew",
    )
    flag(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw both as .svg or .png; needs pip install 'radixcache[plots]'",
    )


def run(args: argparse.Namespace) -> int:
    """Read or make the trace, replay it, and print hit rates."""
    check_counts("--blocks", *args.blocks)
    check_counts("--block-size", *args.block_size)
    check_counts("--requests", args.requests)
    check_target("--plot", args.plot)
    speed = None
    if args.concurrency == "trace":
        speed = Speed(prefill_rate=args.prefill_rate, decode_rate=args.decode_rate)
    draw = None if args.plot is None else _plotter(args.plot, args.block_size)
    rows: list[Row] = []
    with shown_progress(quiet=args.json) as show:
        for trace in _traces(args, show):
            if speed is not None and not trace.has_times:
                raise InvalidSetting(
                    f"{args.trace} doesn't tell when each request came: use --concurrency none"
                )
            curve = lru_curve(trace)
            if not args.json:
                print(heading(trace, curve.best), flush=True)
            found = list(_simulated(trace, args, speed, show))
            rows += found
            if not args.json:
                _print_text(trace, curve, found, args)
            if draw is not None:
                draw(args.plot, trace, curve, found)
    if args.json:
        several = len({row.block_size for row in rows}) > 1
        print(msgspec.json.encode([_json_row(row, several) for row in rows]).decode())
    return 0


def _traces(args: argparse.Namespace, show: Show) -> Iterator[Trace]:
    """Yield the trace in blocks of each size that was asked for."""
    traffic = traffic_of(args.trace)
    encode = _encode(args.tokenizer)
    for size in dict.fromkeys(args.block_size or (HASHED_TOKENS,)):
        if traffic is not None:
            trace = generate(traffic, block_size=size, title=args.trace)
            yield trace.head(args.requests) if args.requests else trace
        else:
            yield read_trace(
                Path(args.trace),
                block_size=size,
                encode=encode,
                most=args.requests,
                progress=lambda lines: show("reading lines", lines, None),
            )


def _plotter(path: Path, block_sizes: Sequence[int]) -> Draw:
    """Return what draws the picture.  Raises InvalidSetting before anything is replayed."""
    if path.suffix not in PICTURES:
        raise InvalidSetting(f"--plot {path}: the name must end with {' or '.join(PICTURES)}")
    if len(set(block_sizes)) > 1:
        raise InvalidSetting("--plot shows one --block-size: run it once for each")
    try:
        from runtime.plots import draw
    except ImportError:
        raise InvalidSetting(
            "--plot needs matplotlib: pip install 'radixcache[plots]', or use --curve"
        ) from None
    return draw


def _encode(folder: Path | None) -> Encode:
    if folder is None:
        return pieces
    tokenizer = tokenizer_from_folder(folder, vocab_size=MAX_VOCABULARY)
    return partial(tokenizer.encode, parse_special=True)


def _sizes(trace: Trace, asked: Sequence[int]) -> list[int]:
    """The sizes to simulate, ascending; by default none that the longest request doesn't fit in."""
    if asked:
        return sorted(set(asked))
    shares = (round(trace.num_distinct * share) for share in DEFAULT_SHARES)
    return sorted({max(1, trace.longest, size) for size in shares})


def _simulated(
    trace: Trace, args: argparse.Namespace, speed: Speed | None, show: Show
) -> Iterator[Row]:
    policies = list(dict.fromkeys(args.policy or ("lru", "opt")))
    for policy in policies:
        for num_blocks in _sizes(trace, args.blocks):
            stage = f"{policy}, {num_blocks:,} blocks of {trace.block_size}"
            told = partial(_tell, show, stage, len(trace.requests))
            told(0)
            yield simulate(trace, policy, num_blocks, speed=speed, progress=told)


def _tell(show: Show, stage: str, total: int, done: int) -> None:
    show(stage, done, total)


def _print_text(
    trace: Trace, curve: HitCurve, rows: Sequence[Row], args: argparse.Namespace
) -> None:
    print(table(rows))
    for row in rows:
        if row.outcome.unserved:
            print(
                f"{row.policy}, {row.num_blocks:,} blocks: {row.outcome.unserved:,} requests were "
                "larger than the whole cache"
            )
    if args.curve:
        print(plot(curve.hit_rate, most=max(1, trace.num_distinct), best=curve.best))
        print("\n".join(growth(row) for row in rows if row.policy == rows[0].policy))
    smallest = min(row.num_blocks for row in rows)
    tokens = sum(request.prompt_tokens for request in trace.requests)
    known = trace.has_times and trace.seconds > 0
    print(
        f"from {smallest:,} blocks on, under LRU: "
        + advice(
            lambda times: curve.hit_rate(round(smallest * times)),
            prompt_tokens_per_s=tokens / trace.seconds if known else None,
        )
    )


def _json_row(row: Row, several: bool) -> JsonRow:
    return JsonRow(
        policy=row.policy,
        num_blocks=row.num_blocks,
        hit_rate=row.outcome.hit_rate,
        hits=row.outcome.hits,
        references=row.outcome.references,
        block_size=row.block_size if several else msgspec.UNSET,
    )
