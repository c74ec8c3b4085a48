"""Hints to the cache over HTTP: a prompt that will be wanted again, one that will not.

Owns: the three endpoints and their bodies.  Does not know: how a prompt is held or abandoned.
Idea: whoever has no session can still say what a session says by itself, with the very body that it
sent.  What is retained is a session of the caller's, with all its limits; nobody's prompt is
touched but in the caller's own namespace.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixcache.lease import PrefixKey
from runtime.accepting import check_tokens
from runtime.engine import Engine
from runtime.request import pack_prompt
from runtime.server.bodies import read_body
from runtime.server.context import Caller, Served, caller_of
from runtime.server.errors import json_response
from runtime.server.explaining import ExplainRequest, prompt_of
from runtime.server.fields import told
from runtime.server.openapi import Endpoint
from runtime.sessions.book import SessionBook


class AbandonRequest(ExplainRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of `/cache/abandon`: a chat's or a completion's, whatever else it asks for."""


class RetainRequest(ExplainRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of `/cache/retain`: the same, and for how long.

    seconds  from now on
    """

    seconds: Annotated[float, told(minimum=0)]


class ReleaseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/cache/release`: what `/cache/retain` answered."""

    id: str


class AbandonAnswer(msgspec.Struct, frozen=True):
    """How many blocks are the first to go now, until somebody uses them."""

    abandoned_blocks: int


class RetainAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of a prompt.

    id           to release it by; null where nothing is held, as nothing of it is cached, or too
                 much is held already
    held_tokens  in whole blocks
    held_for_s   seconds from now
    """

    id: str | None
    held_tokens: int
    held_for_s: float


class ReleaseAnswer(msgspec.Struct, frozen=True):
    """That a prompt is held no more."""

    id: str
    released: bool = True


class HintEndpoints:
    """The endpoints of hints, over the book that sessions are in."""

    def __init__(self, served: Served, book: SessionBook) -> None:
        self._served = served
        self._book = book

    def endpoints(self) -> list[Endpoint]:
        """Return what is served, as it is routed and documented."""
        return [
            Endpoint(
                "POST",
                "/cache/retain",
                self.retain,
                "Hold what is cached of a prompt for a time",
                body=RetainRequest,
                answer=RetainAnswer,
            ),
            Endpoint(
                "POST",
                "/cache/release",
                self.release,
                "Hold a prompt no more",
                body=ReleaseRequest,
                answer=ReleaseAnswer,
            ),
            Endpoint(
                "POST",
                "/cache/abandon",
                self.abandon,
                "Say that nobody comes back to a prompt",
                body=AbandonRequest,
                answer=AbandonAnswer,
            ),
        ]

    async def retain(self, request: HttpRequest) -> Response:
        """`POST /cache/retain`: hold what is cached of a prompt."""
        body = await read_body(request, RetainRequest, self._served.config)
        caller, tokens = await self._prompt(request, body)

        def hold(engine: Engine) -> RetainAnswer:
            """Hold it, and tell what is held; no id where nothing is."""
            state = self._book.retain(
                tokens, body.seconds, owner=caller.tenant, namespace=caller.namespace
            )
            if state is None:
                return RetainAnswer(id=None, held_tokens=0, held_for_s=0.0)
            return RetainAnswer(
                id=state.session_id,
                held_tokens=state.held_tokens,
                held_for_s=round(state.held_for_s, 3),
            )

        return json_response(await self._served.engine.call(hold))

    async def release(self, request: HttpRequest) -> Response:
        """`POST /cache/release`: end such a hold before its time."""
        body = await read_body(request, ReleaseRequest, self._served.config)
        owner = caller_of(request).tenant
        turn = await self._served.engine.call(lambda _: self._book.close(body.id, owner=owner))
        if turn is not None:  # it was a session that generates
            await self._served.engine.abort(*turn.requests)
        return json_response(ReleaseAnswer(body.id))

    async def abandon(self, request: HttpRequest) -> Response:
        """`POST /cache/abandon`: let go first what nobody else went on from."""
        body = await read_body(request, AbandonRequest, self._served.config)
        caller, tokens = await self._prompt(request, body)
        check_tokens(tokens, self._served.runtime.engine.vocab_size)

        def abandon(engine: Engine) -> int:
            """Return how many blocks go first now."""
            cache = engine.cache
            namespace = cache.epochs.current(caller.namespace)  # callers know of no epochs
            return cache.abandon(PrefixKey(namespace, tokens))

        return json_response(AbandonAnswer(await self._served.engine.call(abandon)))

    async def _prompt(self, request: HttpRequest, body: ExplainRequest) -> tuple[Caller, bytes]:
        """Return who asks, in the namespace that the body names, and the packed prompt."""
        body.check()
        self._served.check_model(body.model)
        caller = caller_of(request).narrowed(body.cache_salt)
        ids, _ = await run_in_threadpool(prompt_of, self._served, body, caller)
        return caller, pack_prompt(ids)
