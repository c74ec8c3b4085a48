"""From prompts to their news: what every endpoint that generates goes through.

Owns: names of requests, a tenant's place in the queue, what is observed of tokens, noting replies,
and that what is left behind is aborted.  Does not know: bodies and answers; each API has its own.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from radixcache.retention import Retention
from runtime.async_engine import RequestStream
from runtime.request import Constraint, Request, RequestOutput, SamplingParams, Usage, pack_prompt
from runtime.server.context import Caller, Served
from runtime.server.journal import Journal


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What an endpoint wants generated; all prompts are taken on, or none.

    name        of the answer; the requests are named after it
    prompts     token ids of each
    remembers   whether the reply's ids are to be known when it is sent back (one prompt only)
    constraint  at its beginning; each prompt's output follows one of its own
    is_streamed whether a client takes the news one by one, and so may be slower than they come
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
    is_streamed: bool = False

    def requests(self) -> list[Request]:
        """Return one request for each prompt."""
        lowest = self.caller.min_priority
        return [
            Request(
                request_id=f"{self.name}/{number}",
                prompt=pack_prompt(ids),
                sampling=self.sampling,
                namespace=self.caller.namespace,
                priority=self.priority if lowest is None else max(lowest, self.priority),
                timeout_s=self.timeout_s,
                retentions=self.retentions,
                constraint=self.constraint and self.constraint.fork(),
            )
            for number, ids in enumerate(self.prompts)
        ]


class News(msgspec.Struct, frozen=True):
    """A piece of news, and the place of its choice: prompt by prompt, branch by branch."""

    place: int
    output: RequestOutput


async def generate(served: Served, ask: Ask) -> NewsStream:
    """Queue what is asked, and return its news; close them when done.

    Raises what `AsyncEngine.submit` raises, and ServerBusy where too many of the tenant's requests
    wait, before any news.
    """
    requests = ask.requests()
    tenant, count = ask.caller.tenant, len(requests)
    served.waiting.enter(tenant, count, limit=ask.caller.max_waiting)
    asked = served.clock()
    try:
        stream = await served.engine.submit(*requests)
    except BaseException:
        served.waiting.leave(tenant, count)
        raise
    return NewsStream(served, ask, requests, stream, asked=asked)


class NewsStream(AsyncGenerator[News, None]):
    """The news of what was asked for at a time of the clock; iterate over them, and close them.

    Forgotten without being closed, they close themselves: an answer whose client left before its
    first event never began, and a generator that never began runs no `finally`.
    """

    def __init__(
        self,
        served: Served,
        ask: Ask,
        requests: list[Request],
        stream: RequestStream,
        *,
        asked: float,
    ) -> None:
        self._served = served
        self._stream = stream
        self._asked = asked
        self._most_waiting = served.config.max_backlog if ask.is_streamed else sys.maxsize
        self._tenant = ask.caller.tenant
        self._tally = served.tallies.of(self._tenant)
        self._journal = ask.caller.journal or Journal(ask.name, began=served.clock())
        self._journal.answer_ids.append(ask.name)
        self._branches = ask.sampling.n
        self._first_place = {r.request_id: i * self._branches for i, r in enumerate(requests)}
        self._waiting = set(self._first_place)
        self._begun_at: dict[int, float] = {}  # by place: when its first token came
        self._token_at: dict[int, float] = {}  # and its last
        self._usages: dict[int, Usage] = {}
        self._open = set(range(len(requests) * self._branches))
        self._reply = _Reply(served, requests[0]) if ask.remembers else None

    async def __anext__(self) -> News:
        """Return the next piece, or end.

        Raises ConnectionAbortedError where the client is so slow that too many pieces wait.
        """
        output = await anext(self._stream)
        if self._stream.news.qsize() > self._most_waiting:
            self.close()
            raise ConnectionAbortedError("the client reads slower than its answer is made")
        place = self._first_place[output.request_id] + output.index
        self._note(place, output)
        return News(place, output)

    async def asend(self, value: None) -> News:
        """Return the next piece; nothing can be sent."""
        return await anext(self)

    async def athrow(self, *error: Any) -> News:
        """Close, and raise the error."""
        self.close()
        raise error[0]

    async def aclose(self) -> None:
        """Abort what has not ended."""
        self.close()

    def close(self) -> None:
        """Abort what has not ended, and note it."""
        self._stream.close()
        self._served.waiting.leave(self._tenant, len(self._waiting))
        self._waiting.clear()
        for place in list(self._open):
            self._end(place, "abort")

    def __del__(self) -> None:
        if hasattr(self, "_open"):
            self.close()

    def _note(self, place: int, output: RequestOutput) -> None:
        """Observe a piece; this is paid for each token."""
        if output.request_id in self._waiting:
            self._waiting.discard(output.request_id)
            self._served.waiting.leave(self._tenant, 1)
        self._usages[place] = output.usage
        if output.token_ids:
            now = self._served.clock()
            self._tally.generated += len(output.token_ids)
            before = self._token_at.get(place)
            self._token_at[place] = now
            if before is None:
                self._begin(place, output.usage, now)
            else:
                gap = (now - before) / len(output.token_ids)
                self._served.metrics.inter_token.observe(gap)
                self._journal.note_gap(gap)
        if self._reply is not None:
            self._reply.note(output)
        if output.finish_reason is not None:
            self._end(place, output.finish_reason)

    def _begin(self, place: int, usage: Usage, now: float) -> None:
        """A branch has its first token; the first one of a prompt stands for the prompt."""
        metrics, tallies = self._served.metrics, self._served.tallies
        waited, is_warm = now - self._journal.began, usage.cached_tokens > 0
        self._begun_at[place] = now
        if place % self._branches == 0:
            tallies.note_prompt(self._tenant, asked=usage.prompt_tokens, hit=usage.cached_tokens)
            metrics.prefill_time.observe(now - self._asked - usage.queue_s)
        tallies.note_first_token(self._tenant, waited, now, is_warm=is_warm)
        first = metrics.first_token_cached if usage.cached_tokens else metrics.first_token_uncached
        first.observe(waited)
        self._journal.note_first_token(now)

    def _end(self, place: int, reason: str) -> None:
        """A branch has ended; the first one of a prompt stands for the prompt."""
        self._open.discard(place)
        self._journal.finish_reasons.append(reason)
        usage = self._usages.get(place)
        if usage is None:
            return
        metrics = self._served.metrics
        tenant = metrics.tenants[metrics.tenant_label(self._tenant)]
        if place % self._branches == 0:
            self._journal.note_prompt(usage)
            metrics.queue_time.observe(usage.queue_s)
            metrics.request_prompt_tokens.observe(usage.prompt_tokens)
            tenant.prompt_tokens += usage.prompt_tokens
            tenant.cached_tokens += usage.cached_tokens
        self._journal.output_tokens += usage.completion_tokens
        tenant.generation_tokens += usage.completion_tokens
        metrics.request_output_tokens.observe(usage.completion_tokens)
        metrics.request_duration.observe(self._served.clock() - self._journal.began)
        if place in self._begun_at:
            metrics.decode_time.observe(self._token_at[place] - self._begun_at[place])


class _Reply:
    """Which ids each branch of a chat's text was made of; told to the runtime at its end."""

    def __init__(self, served: Served, request: Request) -> None:
        self._served = served
        self._request = request
        self._texts = [""] * request.sampling.n
        self._ids: list[list[int]] = [[] for _ in self._texts]

    def note(self, output: RequestOutput) -> None:
        """Add a piece."""
        branch = output.index
        self._texts[branch] += output.text
        self._ids[branch] += output.token_ids
        if output.finish_reason in ("stop", "length"):
            self._served.runtime.remember_reply(
                self._request.prompt,
                self._texts[branch],
                self._ids[branch],
                namespace=self._request.namespace,
            )
