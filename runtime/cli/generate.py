"""`radixcache generate`: continue prompts and exit."""

from __future__ import annotations

import argparse
import sys

import msgspec

from runtime.cli.options import (
    add_model_flags,
    add_sampling_flags,
    runtime_config,
    sampling_params,
    shown_progress,
)
from runtime.errors import InvalidRequest
from runtime.llm import LLM


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("generate", help="continue prompts and exit")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: standard input")
    parser.add_argument("--chat", action="store_true", help="put each prompt as a user's message")
    add_model_flags(parser)
    add_sampling_flags(parser, max_tokens=128)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Continue every prompt in one batch and print the texts in order."""
    sampling = sampling_params(args)
    prompts = args.prompts or [_standard_input()]
    if not all(prompts):
        raise InvalidRequest("a prompt is empty: give text as an argument or on standard input")
    with shown_progress(quiet=args.json) as progress:
        llm = LLM.from_config(runtime_config(args), progress=progress)
        inputs = prompts
        if args.chat:
            inputs = [llm.chat_tokens([{"role": "user", "content": p}]) for p in prompts]
        done = {"tokens": 0}

        def count(output: object) -> None:
            """Take each piece of news for a step."""
            done["tokens"] += 1
            progress("computing, in steps", done["tokens"], None)

        completions = llm.generate(inputs, sampling, on_news=count)
    for completion in completions:
        print(msgspec.json.encode(completion).decode() if args.json else completion.text)
    return 0


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8: {error}") from None
