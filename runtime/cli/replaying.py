"""Flags of the commands that look at logs, and what they become.

Owns: which model's words a log is read in, and reading bodies from files.  Does not know: what a
command does with them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from runtime.cli.options import shown_progress
from runtime.config import DEFAULT_MODEL
from runtime.doctor.log import LoggedRequest, read_log, request_of
from runtime.doctor.rendering import ModelRenderer, Renderer, WordRenderer
from runtime.errors import InvalidLog
from runtime.weights.checkpoint import open_checkpoint

WORDS = "words"
"""Instead of a model's name: no model, a token for each few letters."""


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how a log is read and replayed."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="whose tokenizer and chat template to use, or 'words' for none: counts are estimates",
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block")


def renderer_of(args: argparse.Namespace) -> Renderer:
    """Return what makes token ids of logged requests.  Raises ModelFileError, DownloadError."""
    if args.model == WORDS:
        return WordRenderer()
    with shown_progress(quiet=args.json) as progress:
        checkpoint = open_checkpoint(args.model, progress=progress)
    return ModelRenderer(checkpoint.tokenizer(), checkpoint.chat_template())


def read_text(name: str) -> str:
    """Return what a file holds, "-" being standard input, without a byte order mark.

    Raises InvalidLog, OSError.
    """
    try:
        if name == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidLog(f"{name} is not UTF-8: {error}") from None


def read_requests(name: str) -> list[LoggedRequest]:
    """Read a file of one body, or a log of one a line.  Raises InvalidLog, OSError."""
    path = Path(name)
    try:
        whole = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # several lines, or a compressed log
        return read_log(path)
    if not isinstance(whole, dict):
        raise InvalidLog(f"{path.name} holds no body: a JSON object is expected")
    try:
        return [request_of(whole)]
    except InvalidLog as error:
        raise InvalidLog(f"{path.name}: {error}") from None
