"""A small server over Hugging Face transformers' `generate`, one request at a time.

    ENV/bin/python transformers_server.py FOLDER PORT DTYPE REUSE

Runs in transformers' environment, where nothing of ours is.  It understands what client.py sends
as `openai`: token ids, greedy, streamed.

REUSE yes keeps the K/V of finished requests, as the library's documentation of prefix reuse shows:
a request begins with a copy of the longest prefix that one of them has.  The oldest are given up
beyond MOST_TOKENS.  REUSE no computes each prompt whole.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

MOST_TOKENS = 100_000  # 46 KB each in float32


class Prefixes:
    """K/V of finished requests, the last used one at the end."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[int], DynamicCache]] = []

    def begin(self, prompt: list[int]) -> tuple[DynamicCache, int]:
        """Return a cache that holds the longest known prefix, and how long that is.

        At least the last token of a prompt is left to compute.
        """
        best, length = -1, 0
        for i, (tokens, _) in enumerate(self._kept):
            shared = common_prefix(tokens, prompt[:-1])
            if shared > length:
                best, length = i, shared
        cache = DynamicCache()
        if length:
            entry = self._kept.pop(best)
            self._kept.append(entry)
            for i, layer in enumerate(entry[1].layers):
                keys, values = (kv[:, :, :length].clone() for kv in (layer.keys, layer.values))
                cache.update(keys, values, i)
        return cache, length

    def keep(self, tokens: list[int], cache: DynamicCache) -> None:
        """Remember what was computed for these tokens."""
        self._kept.append((tokens, cache))
        while sum(len(tokens) for tokens, _ in self._kept) > MOST_TOKENS:
            del self._kept[0]


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens two lists begin with alike."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


class Tokens(SimpleQueue):
    """What `generate` calls with each token; the first call brings the prompt."""

    def put(self, value: Any, *args: Any, **kwargs: Any) -> None:
        super().put(value.flatten().tolist())

    def end(self) -> None:
        super().put(None)


class Model:
    """The model, and what it has computed."""

    def __init__(self, folder: str, dtype: str, *, reuse: bool) -> None:
        transformers.logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # requests end by their length
        self._prefixes = Prefixes() if reuse else None
        self._lock = threading.Lock()

    def generate(self, prompt: list[int], max_tokens: int) -> Iterator[tuple[list[int], int]]:
        """Yield new tokens as they come, each time with how many of the prompt were cached."""
        with self._lock:
            cache, length = DynamicCache(), 0
            if self._prefixes is not None:
                cache, length = self._prefixes.begin(prompt)
            told = Tokens()
            thread = threading.Thread(
                target=self._compute, args=(prompt, max_tokens, cache, told), daemon=True
            )
            thread.start()
            told.get()  # the prompt
            new: list[int] = []
            while (tokens := told.get()) is not None:
                new += tokens
                yield tokens, length
            thread.join()
            if self._prefixes is not None:
                self._prefixes.keep(prompt + new[:-1], cache)

    def _compute(
        self, prompt: list[int], max_tokens: int, cache: DynamicCache, told: Tokens
    ) -> None:
        ids = torch.tensor([prompt])
        try:
            with torch.inference_mode():
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    pad_token_id=2,
                    past_key_values=cache,
                    streamer=told,
                )
        finally:
            told.end()  # again, or after an error: whoever waits goes on


class Completions(BaseHTTPRequestHandler):
    """`POST /v1/completions`, streamed."""

    model: Model
    protocol_version = "HTTP/1.0"  # an answer ends where its connection does

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        details = {"cached_tokens": 0}
        for tokens, cached in self.model.generate(body["prompt"], body["max_tokens"]):
            details["cached_tokens"] = cached
            self._event({"choices": [{"index": 0, "token_ids": tokens}]})
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": details}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def main() -> None:
    """Serve until the process is ended."""
    folder, port, dtype, reuse = sys.argv[1:5]
    Completions.model = Model(folder, dtype, reuse=reuse == "yes")
    ThreadingHTTPServer(("127.0.0.1", int(port)), Completions).serve_forever()


if __name__ == "__main__":
    main()
