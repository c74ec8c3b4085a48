"""`radixcache chat`: talk to the model in the terminal; each turn shows what the cache saved."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.cli.options import (
    add_model_flags,
    add_sampling_flags,
    report,
    runtime_config,
    sampling_params,
    shown_progress,
)
from runtime.errors import RequestError
from runtime.llm import LLM
from runtime.request import FinishReason, RequestOutput, SamplingParams, Usage


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What `radixcache chat --json` prints for each turn; times in seconds."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    time_to_first_token_s: float
    duration_s: float


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("chat", help="talk to the model in the terminal")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_model_flags(parser)
    add_sampling_flags(parser, max_tokens=256)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read a message a line until the end of input, and answer each."""
    sampling = sampling_params(args)
    with shown_progress(quiet=args.json) as progress:
        llm = LLM.from_config(runtime_config(args), progress=progress)
    messages: list[dict[str, Any]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    for line in _lines(prompt=not args.json and sys.stdin.isatty()):
        messages.append({"role": "user", "content": line})
        try:
            turn = _answer(llm, messages, sampling, show=not args.json)
        except KeyboardInterrupt:  # only this answer is given up
            print("\n(stopped)", file=sys.stderr)
            messages.pop()
            continue
        except RequestError as error:  # such as a conversation that grew too long
            report(error, 2, as_json=args.json)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": turn.text})
        print(msgspec.json.encode(turn).decode() if args.json else _footer(turn), flush=True)
    return 0


def _lines(*, prompt: bool) -> Iterator[str]:
    while True:
        try:
            line = input("you> " if prompt else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line.strip():
            yield line


def _answer(
    llm: LLM, messages: list[dict[str, Any]], sampling: SamplingParams, *, show: bool
) -> Turn:
    began = time.monotonic()
    first: list[float] = []
    terminal = show and sys.stderr.isatty()

    def news(output: RequestOutput) -> None:
        """Note when the first token came; show it, or how far the prompt is read."""
        if output.token_ids and not first:
            first.append(time.monotonic() - began)
            if terminal:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
        if not first and terminal:
            usage = output.usage
            done = usage.cached_tokens + usage.computed_tokens
            text = f"reading the prompt: {done} of {usage.prompt_tokens} tokens"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        if show:
            print(output.text, end="", flush=True)

    completion = llm.chat(messages, sampling, on_news=news)
    return Turn(
        text=completion.text,
        finish_reason=completion.finish_reason,
        usage=completion.usage,
        time_to_first_token_s=round(first[0], 4),
        duration_s=round(time.monotonic() - began, 4),
    )


def _footer(turn: Turn) -> str:
    usage = turn.usage
    rest = turn.duration_s - turn.time_to_first_token_s
    speed = (usage.completion_tokens - 1) / rest if rest > 0 else 0.0
    return (
        f"\n  [{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached · first token "
        f"after {turn.time_to_first_token_s * 1000:,.0f} ms · {usage.completion_tokens} tokens at "
        f"{speed:.1f}/s]"
    )
