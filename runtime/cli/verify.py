"""`radixcache verify`: does the cache change a bit of this model's answers on this machine?"""

from __future__ import annotations

import argparse
import sys

import msgspec

from runtime.cli.options import add_model_flags, runtime_config, shown_progress
from runtime.exactness.scenarios import quick, thorough
from runtime.exactness.trial import Outcome
from runtime.exactness.verify import verify
from runtime.executor.executor import ModelExecutor
from runtime.loading import load_runtime


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify", help="check bit by bit that the cache changes no answer, and print a certificate"
    )
    parser.add_argument(
        "--thorough", action="store_true", help="every block size × chunk × company, not a dozen"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and draws (default 0)")
    add_model_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load the model, compare, print the certificate; 1 where a bit differs.

    Each scenario has a pool of its own, so the one that is loaded stays small.
    """
    config = msgspec.structs.replace(runtime_config(args), num_blocks=64, max_len=None)
    scenarios = thorough() if args.thorough else quick()
    with shown_progress(quiet=args.json) as progress:
        runtime = load_runtime(config, progress=progress)
        executor = runtime.executor
        assert isinstance(executor, ModelExecutor)

        def told(number: int, outcome: Outcome) -> None:
            """Show that a scenario was compared, and how it came out."""
            progress("comparing, in scenarios", number, len(scenarios))
            if not args.json:
                verdict = "differs" if outcome.difference else "same bits"
                print(f"{verdict}  {outcome.scenario}", file=sys.stderr, flush=True)

        certificate = verify(
            executor.model,
            name=runtime.name,
            check=runtime.exactness,
            scenarios=scenarios,
            seed=args.seed,
            told=told,
        )
    print(msgspec.json.encode(certificate).decode() if args.json else certificate.text())
    return 0 if certificate.exact else 1
