"""What quantised weights and 8-bit activations cost in quality: perplexity of a fixed text.

    .venv/bin/python -m benchmarks.bench_perplexity [--llama HOME] [--tokens 400] [--out FILE]

Owns: the text (a page of this repository that never changes), the settings that are compared.
Does not know: speed.
Idea: each token's log-probability given all before it, by scoring the text as one prompt.  With
`--llama HOME` (the environments of benchmarks/peers/environments.py) llama.cpp's own server scores
the same tokens of the same file: it tells no prompt's log-probabilities, so it is asked for the
next token behind each prefix, with those of the whole vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.servers import free_port
from radixcache.tokens import pack_tokens
from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.loading import Runtime, load_runtime
from runtime.request import Request, SamplingParams
from runtime.weights.pull import cached

TEXT = Path(__file__).parents[1] / "docs" / "decisions" / "0003-row-invariant-products.md"
LLAMA = Path(__file__).parent / "peers" / "llama_server.py"
SETTINGS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32", "weights": "float32"},
    "file": {"dtype": "float32", "weights": "file"},
    "file, 8-bit activations": {"dtype": "float32", "weights": "file", "activations": "int8"},
    "bfloat16 weights": {"dtype": "float32", "weights": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16", "weights": "bfloat16"},
}


def main() -> None:
    """Score the text under each setting, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, metavar="HOME", help="score with llama.cpp, too")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, float] = {}
    ids: list[int] = []
    for name, settings in SETTINGS.items():
        runtime = load_runtime(RuntimeConfig(num_blocks=64, **settings))
        ids = ids or runtime.prompt_tokens(TEXT.read_text("utf-8"))[: args.tokens]
        found[name] = perplexity(scores(runtime, ids))
    if args.llama:
        found["llama.cpp, the same file"] = perplexity(llama_scores(args.llama, ids))
    base = found["float32"]
    print(f"{TEXT.name}, {len(ids)} tokens of {DEFAULT_MODEL}\n")
    print("| weights | perplexity | beside float32 |\n|---|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.4f} | {value / base - 1:+.2%} |")
    if args.out:
        args.out.write_text(json.dumps({"tokens": len(ids), "perplexity": found}, indent=1))


def perplexity(logprobs: Sequence[float]) -> float:
    """Return e to the power of the mean surprise."""
    return math.exp(-sum(logprobs) / len(logprobs))


def scores(runtime: Runtime, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    runtime.engine.submit(Request(request_id="text", prompt=pack_tokens(ids), sampling=params))
    found: list[float] = []
    while runtime.engine.has_work:
        for output in runtime.engine.step():
            found += [entry.token for entry in output.prompt_logprobs]
    return found


def llama_scores(home: Path, ids: list[int]) -> list[float]:
    """The same by llama.cpp's server, a request a token."""
    port, model = free_port(), cached(DEFAULT_MODEL)
    threads = str(os.cpu_count() or 1)
    command = [str(home / "llama" / "bin" / "python"), str(LLAMA), str(model), str(port), threads]
    with subprocess.Popen([*command, "1", "1024"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            return [next_score(port, ids[:end], ids[end]) for end in range(1, len(ids))]
        finally:
            server.terminate()


def next_score(port: int, prefix: list[int], token: int) -> float:
    """Return a token's log-probability behind a prefix, of llama.cpp."""
    body = {"prompt": prefix, "n_predict": 1, "n_probs": 49_152, "cache_prompt": True}
    body |= {"temperature": 0.0, "samplers": []}
    answer = ask(port, body)
    listed = answer["completion_probabilities"][0]["top_logprobs"]
    return float(next(entry["logprob"] for entry in listed if entry["id"] == token))


def ask(port: int, body: dict[str, Any]) -> Any:
    """Post a completion; the server may still be loading."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    for attempt in range(60):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except OSError:
            if attempt == 59:
                raise
            time.sleep(0.5)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
