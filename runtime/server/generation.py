"""From prompts to their news: what every endpoint that generates goes through.

Owns: names of requests, durations, noting replies, and that what is left behind is aborted.  Does
not know: bodies and answers; each API has its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from radixcache.retention import Retention
from runtime.async_engine import RequestStream
from runtime.request import Constraint, Request, RequestOutput, SamplingParams, pack_prompt
from runtime.server.context import Caller, Served


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint wants generated; all prompts are taken on, or none.

    name        of the answer; the requests are named after it
    prompts     token ids of each
    remembers   whether the reply's ids are to be known when it is sent back (one prompt only)
    constraint  for a single prompt
    """

    name: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    caller: Caller
    remembers: bool = False
    priority: int = 0
    timeout_s: float | None = None
    retentions: tuple[Retention, ...] = ()
    constraint: Constraint | None = None


class News(msgspec.Struct, frozen=True):
    """A piece of news, and the place of its choice: prompt by prompt, branch by branch."""

    place: int
    output: RequestOutput


async def generate(served: Served, ask: Ask) -> AsyncGenerator[News, None]:
    """Queue what is asked, and return its news; close them when done.

    Raises what `AsyncEngine.submit` raises, before any news.
    """
    began = served.clock()
    places: dict[str, int] = {}
    requests: list[Request] = []
    for number, ids in enumerate(ask.prompts):
        name = f"{ask.name}/{number}"
        places[name] = number * ask.sampling.n
        requests.append(
            Request(
                request_id=name,
                prompt=pack_prompt(ids),
                sampling=ask.sampling,
                namespace=ask.caller.namespace,
                priority=ask.priority,
                timeout_s=ask.timeout_s,
                retentions=ask.retentions,
                constraint=ask.constraint,
            )
        )
    stream = await served.engine.submit(*requests)
    outputs = _observed(served, stream, began)
    if ask.remembers:
        outputs = _remembered(served, outputs, requests[0])
    return _placed(outputs, places)


async def _placed(
    outputs: AsyncGenerator[RequestOutput, None], places: dict[str, int]
) -> AsyncGenerator[News, None]:
    async with aclosing(outputs):
        async for output in outputs:
            yield News(places[output.request_id] + output.index, output)


async def _observed(
    served: Served, stream: RequestStream, began: float
) -> AsyncGenerator[RequestOutput, None]:
    """Pass news on, observe durations, and abort what has not ended when closed."""
    started: set[str] = set()
    async with aclosing(stream):
        async for output in stream:
            if output.token_ids and output.request_id not in started:
                started.add(output.request_id)
                cached = "yes" if output.usage.cached_tokens else "no"
                served.metrics.time_to_first_token.labels(cached).observe(served.clock() - began)
            if output.is_last:
                served.metrics.request_duration.observe(served.clock() - began)
            yield output


async def _remembered(
    served: Served, outputs: AsyncGenerator[RequestOutput, None], request: Request
) -> AsyncGenerator[RequestOutput, None]:
    """Pass a chat's news on, and note which ids each branch's text was made of."""
    texts = [""] * request.sampling.n
    ids: list[list[int]] = [[] for _ in texts]
    async with aclosing(outputs):
        async for output in outputs:
            texts[output.index] += output.text
            ids[output.index] += output.token_ids
            if output.finish_reason in ("stop", "length"):
                served.runtime.remember_reply(
                    request.prompt,
                    texts[output.index],
                    ids[output.index],
                    namespace=request.namespace,
                )
            yield output
