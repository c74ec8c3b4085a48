"""The server over an engine without a model: what is left is HTTP, scheduler and cache.

    .venv/bin/python -m benchmarks.fake_server [--num-blocks N] [--max-running N] [--max-waiting N]

Prints a line of JSON with its URL, as `radixcache serve --json` does, and serves until interrupted.
Tokenizer and chat template are the real ones; tokens come from a hash.
"""

from __future__ import annotations

import argparse
import json
import threading

from runtime.server.logs import set_up_logs
from tests.support.served import quick_runtime, serving


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-blocks", type=int, default=4096)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=1024)
    args = parser.parse_args()
    set_up_logs("text", "warning")
    runtime = quick_runtime(
        num_blocks=args.num_blocks, max_running=args.max_running, max_waiting=args.max_waiting
    )
    with serving(runtime) as url:
        print(json.dumps({"url": url, "model": runtime.name}), flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
