"""A chat backend: conversations of several users kept here, answered by a server with a cache.

    python examples/chat_backend.py                                     # starts a server itself
    python examples/chat_backend.py --base-url http://127.0.0.1:8000    # uses one that runs

Needs `pip install openai`.  The whole conversation is sent with every turn, as the API has it; what
was computed for earlier turns, and for the system prompt of all users, is not computed again.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from openai import OpenAI
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam as Message

SYSTEM = (
    "You are the help desk of a small library. You answer in one short sentence. The library is "
    "open from Tuesday to Saturday, from 10 to 18. Books may be kept for four weeks, films for one."
)
TURNS = [
    ("ann", "When are you open?"),
    ("bob", "How long may I keep a film?"),
    ("ann", "And on Sundays?"),
    ("bob", "And a book?"),
]


class ChatBackend:
    """Remembers what each user said and was told."""

    def __init__(self, client: OpenAI, model: str, max_tokens: int) -> None:
        self._create = client.chat.completions.create
        self._model, self._max_tokens = model, max_tokens
        self._said: dict[str, list[Message]] = {}

    def answer(self, user: str, text: str) -> Iterator[str | CompletionUsage]:
        """Answer one user's message: pieces of text, then what it cost."""
        said = self._said.setdefault(user, [{"role": "system", "content": SYSTEM}])
        said.append({"role": "user", "content": text})
        reply = ""
        for chunk in self._create(
            model=self._model,
            messages=said,
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                reply += piece
                yield piece
            if chunk.usage:
                yield chunk.usage
        said.append({"role": "assistant", "content": reply})


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """Start a server on a free port; yield its URL; stop it at the end."""
    command = [sys.executable, "-m", "runtime.cli.main", "serve", "--port", "0", "--json"]
    with subprocess.Popen([*command, "--model", model], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


def talk(base_url: str, model: str, max_tokens: int) -> None:
    """Let the users talk, and print what the cache saved."""
    client = OpenAI(base_url=f"{base_url}/v1", api_key="unused")
    backend = ChatBackend(client, model, max_tokens)
    for user, text in TURNS:
        print(f"{user}: {text}\ndesk: ", end="")
        began, first_s = time.perf_counter(), 0.0
        for piece in backend.answer(user, text):
            first_s = first_s or time.perf_counter() - began
            if isinstance(piece, str):
                print(piece, end="", flush=True)
            elif piece.prompt_tokens_details:
                cached = piece.prompt_tokens_details.cached_tokens or 0
                print(f"\n    {cached} of {piece.prompt_tokens} prompt tokens cached", end="")
        print(f", first text after {first_s:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="of a server that runs; else one is started")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with nullcontext(args.base_url) if args.base_url else own_server(args.model) as url:
        talk(url, args.model, args.max_tokens)
