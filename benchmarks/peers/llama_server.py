"""llama.cpp's own HTTP server, as the package xllamacpp holds it.  Runs in that environment.

    ENV/bin/python llama_server.py GGUF PORT THREADS SLOTS TOKENS

TOKENS is the context of each slot.  Nothing but threads and slots is set: batch sizes, K/V type
and prompt caching are llama.cpp's own choice.
"""

from __future__ import annotations

import sys
import threading

import xllamacpp


def main() -> None:
    """Serve until the process is ended."""
    path, port, threads, slots, tokens = sys.argv[1], *map(int, sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = slots * tokens
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
