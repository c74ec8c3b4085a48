"""Flags that several commands share, and what they become.

Owns: names and help of the flags, the settings they make, how long work shows itself.  Does not
know: what a command does with them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from radixcache.policy import POLICIES
from runtime.config import ACTIVATIONS, DEFAULT_MODEL, DTYPES, WEIGHTS, RuntimeConfig
from runtime.errors import InvalidSetting
from runtime.exactness.promise import EXACT
from runtime.request import SamplingParams
from runtime.scheduler.ordering import ORDERINGS

Settings = TypeVar("Settings", bound=msgspec.Struct)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """Read a size such as 512MiB, 2g or 1073741824; units are powers of 1024.

    >>> parse_bytes("1.5g")
    1610612736
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512MiB, 2GiB or bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def check_counts(flag: str, *values: int | None) -> None:
    """Raise InvalidSetting for a value of the flag below 1; None is a flag that is not there."""
    for value in values:
        if value is not None and value < 1:
            raise InvalidSetting(f"{flag} is {value}: at least 1")


def check_target(flag: str, path: Path | None) -> None:
    """Raise InvalidSetting where a file can't be written, before the work that it is to show."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InvalidSetting(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InvalidSetting(f"{flag} {path}: it is a folder, and a file is to be written")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidSetting(f"{flag} {path}: it can't be written; choose another place")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model, its memory and the engine's limits."""
    default = RuntimeConfig()
    flag = parser.add_argument
    flag("--model", default=DEFAULT_MODEL, help="name, .gguf file, Hugging Face folder or hub name")
    flag("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    for name, choices, text in (
        ("dtype", DTYPES, "of activations and the KV cache"),
        ("weights", WEIGHTS, "how they are kept: as in the file (quantised), or converted"),
        ("activations", ACTIVATIONS, "int8: faster with quantised weights, less exact"),
        ("exact", EXACT, "what to do where a token's bits depend on its batch on this machine"),
    ):
        value = getattr(default, name)
        flag(f"--{name}", default=value, choices=choices, help=f"{text} (default {value})")
    flag(
        "--kv-memory",
        dest="kv_memory_bytes",
        type=parse_bytes,
        default=default.kv_memory_bytes,
        metavar="SIZE",
        help="memory for K/V, such as 512MiB or 2GiB (default 1GiB)",
    )
    flag("--num-blocks", type=int, metavar="N", help="blocks of the pool, instead of --kv-memory")
    flag(
        "--no-prefix-cache",
        dest="enable_prefix_cache",
        action="store_false",
        help="compute every prompt whole",
    )
    flag("--eviction-policy", default="lru", choices=tuple(POLICIES), help="default lru")
    flag("--ordering", default="fcfs", choices=tuple(ORDERINGS), help="of those that wait: fcfs")
    flag(
        "--watermark",
        type=float,
        default=default.watermark,
        metavar="SHARE",
        help="of the pool left to running sequences when another is admitted (default 0.01)",
    )
    flag(
        "--max-len",
        type=int,
        metavar="N",
        help="longest sequence in tokens (default: what model and pool allow)",
    )
    flag("--debug-seals", action="store_true", help="check each block's seal before it is read")
    for name, text in (
        ("block-size", "tokens a block"),
        ("max-step-tokens", "tokens computed in one step, over all sequences"),
        ("max-chunk-tokens", "tokens of one prompt computed in one step, 0: no limit of its own"),
        ("max-running", "sequences computed together"),
        ("max-waiting", "requests that may wait"),
        ("max-ghosts", "evicted blocks remembered, to explain misses by, 0: none"),
        ("max-overtaken", "later requests that may be admitted before one that waits"),
        ("num-threads", "threads of the CPU kernels, 0: torch's choice"),
    ):
        value = getattr(default, name.replace("-", "_"))
        flag(f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default {value})")


def settings_of(kind: type[Settings], args: argparse.Namespace) -> Settings:
    """Turn flags into settings: each field has a flag, whose destination has its name.

    Raises InvalidSetting.
    """
    return kind(**{name: getattr(args, name) for name in kind.__struct_fields__})


def runtime_config(args: argparse.Namespace) -> RuntimeConfig:
    """Turn the flags into settings.  Raises InvalidSetting."""
    return settings_of(RuntimeConfig, args)


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags that say how tokens are chosen."""
    flag = parser.add_argument
    flag("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    flag("--top-k", type=int, default=0, help="keep the k likeliest tokens, 0: all")
    flag("--top-p", type=float, default=1.0, help="keep tokens up to this probability mass")
    flag("--min-p", type=float, default=0.0, help="keep tokens this fraction as likely as the top")
    flag("--seed", type=int, help="same seed, same tokens")
    flag("--max-tokens", type=int, default=max_tokens, help=f"new tokens (default {max_tokens})")
    flag(
        "--stop", action="append", default=[], metavar="TEXT", help="stop at this text; repeatable"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Turn the flags into sampling parameters.  Raises InvalidRequest."""
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )


@contextmanager
def shown_progress(*, quiet: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show progress on standard error; plain lines where that is no terminal."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    tasks: dict[str, TaskID] = {}
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:

        def show(stage: str, done: int, total: int | None) -> None:
            """Move the bar of a stage; say where there is no bar that it began."""
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, count="")
                if not console.is_terminal and not quiet:
                    print(f"{stage} …", file=sys.stderr, flush=True)
            count = f"{done:,}" if total is None else f"{done:,} of {total:,}"
            bar.update(tasks[stage], completed=done, total=total, count=count)

        yield show


def report(error: Exception, code: int, *, as_json: bool) -> int:
    """Print an error, as JSON on standard output or as a line on standard error; return `code`."""
    message = str(error) or type(error).__name__
    if as_json:
        body = {"error": {"type": type(error).__name__, "message": message}}
        print(msgspec.json.encode(body).decode(), flush=True)
    else:
        print(f"radixcache: {message}", file=sys.stderr, flush=True)
    return code
