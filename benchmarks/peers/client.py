"""One streamed request to a server, in the words that it understands.

Owns: bodies and events of three APIs.  Does not know: workloads, when a request is sent.

    openai   `/v1/completions` with token ids: ours, vLLM, and the server over transformers
    llama    llama.cpp's `/completion`, which tells the ids of what it says
    sglang   `/generate`, likewise
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec


class Refused(Exception):
    """The server answered with an error, or with something that is no answer."""


class Answer(msgspec.Struct, kw_only=True):
    """What came of a request.

    ttft_s  from sending it to the first token
    cached  prompt tokens that the server found in its cache; None where it does not say
    """

    tokens: list[int] = []
    ttft_s: float = 0.0
    total_s: float = 0.0
    cached: int | None = None


def ask(port: int, api: str, prompt: list[int], max_tokens: int, *, timeout_s: float) -> Answer:
    """Send a greedy request that does not end early, and read its answer to the end.

    timeout_s  that the server may be silent for
    Errors: Refused; OSError where there is no server or it went away.
    """
    path, body, read = _APIS[api]
    answer = Answer()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    began = time.perf_counter()
    try:
        content = json.dumps(body(prompt, max_tokens))
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Refused(f"{response.status}: {response.read()[:300]!r}")
        for event in _events(response):
            read(event, answer)
            if answer.tokens and not answer.ttft_s:
                answer.ttft_s = time.perf_counter() - began
    except http.client.HTTPException as error:
        raise Refused(f"the answer was cut: {error!r}") from error
    finally:
        connection.close()
    answer.total_s = time.perf_counter() - began
    if len(answer.tokens) != max_tokens:
        raise Refused(f"{len(answer.tokens)} tokens came, {max_tokens} were asked for")
    return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            yield json.loads(line[5:])


def _openai_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _openai_event(event: dict[str, Any], answer: Answer) -> None:
    for choice in event.get("choices") or ():
        answer.tokens += choice.get("token_ids") or ()
    if usage := event.get("usage"):
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _llama_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": True,
        "stream": True,
    }


def _llama_event(event: dict[str, Any], answer: Answer) -> None:
    answer.tokens += event.get("tokens") or ()
    if event.get("stop"):
        answer.cached = (event.get("timings") or {}).get("cache_n")


def _sglang_body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": True}


def _sglang_event(event: dict[str, Any], answer: Answer) -> None:
    """The ids of an event are all that were generated, or only the new ones, by the version."""
    told, ids = event.get("meta_info") or {}, event.get("output_ids") or []
    whole = len(ids) >= told.get("completion_tokens", 0)
    answer.tokens = ids if whole else answer.tokens + ids
    answer.cached = told.get("cached_tokens")


_Body = Callable[[list[int], int], dict[str, Any]]
_Read = Callable[[dict[str, Any], Answer], None]
_APIS: dict[str, tuple[str, _Body, _Read]] = {
    "openai": ("/v1/completions", _openai_body, _openai_event),
    "llama": ("/completion", _llama_body, _llama_event),
    "sglang": ("/generate", _sglang_body, _sglang_event),
}
