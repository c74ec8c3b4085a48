"""A chat backend: conversations of several users kept here, answered by a server with a cache.

    python examples/chat_backend.py                                     # starts a server itself
    python examples/chat_backend.py --base-url http://127.0.0.1:8000    # uses one that runs

Needs `pip install openai`.  The whole conversation is sent with every turn, as the API has it; what
was computed for earlier turns, and for the system prompt of all users, is not computed again.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from subprocess import PIPE, Popen

from openai import OpenAI
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
    """Remembers what each user said and was told, and what each answer cost."""

    def __init__(self, client: OpenAI, model: str, max_tokens: int) -> None:
        self.costs: list[tuple[int, int]] = []  # tokens of a prompt, and how many were cached
        self._create = client.chat.completions.create
        self._model, self._max_tokens = model, max_tokens
        self._said: dict[str, list[Message]] = {}

    def answer(self, user: str, text: str) -> Iterator[str]:
        """Answer one user's message, piece by piece; a turn that fails was never said."""
        said = self._said.setdefault(user, [{"role": "system", "content": SYSTEM}])
        asked: Message = {"role": "user", "content": text}
        reply = ""
        for chunk in self._create(
            model=self._model,
            messages=[*said, asked],
            max_tokens=self._max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                reply += piece
                yield piece
            if chunk.usage and (details := chunk.usage.prompt_tokens_details):
                self.costs.append((chunk.usage.prompt_tokens, details.cached_tokens or 0))
        said += [asked, {"role": "assistant", "content": reply}]


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """Start a server on a free port; yield its URL; stop it at the end."""
    serve = ["-m", "runtime.cli.entry", "serve", "--port=0", "--json", "--log-level=warning"]
    with Popen([sys.executable, *serve, "--model", model], stdout=PIPE) as server:
        try:
            told = json.loads(server.stdout.readline() if server.stdout else "{}")
            if "url" not in told:
                sys.exit(f"the server did not start: {told}")
            yield told["url"]
        finally:
            server.terminate()


def talk(base_url: str, model: str, max_tokens: int) -> None:
    """Let the users talk, and print what the cache saved."""
    backend = ChatBackend(OpenAI(base_url=f"{base_url}/v1", api_key="unused"), model, max_tokens)
    for user, text in TURNS:
        print(f"{user}: {text}\ndesk: ", end="")
        for piece in backend.answer(user, text):
            print(piece, end="", flush=True)
        prompt, cached = backend.costs[-1]
        print(f"\n    {cached} of {prompt} prompt tokens cached")
    prompt, cached = map(sum, zip(*backend.costs, strict=True))
    print(f"{prompt} prompt tokens: {cached} cached, {prompt - cached} computed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="of a server that runs; else one is started")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with nullcontext(args.base_url) if args.base_url else own_server(args.model) as url:
        talk(url, args.model, args.max_tokens)
