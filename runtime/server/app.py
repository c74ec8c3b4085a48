"""The web application: routes, error answers, and the engine's life.

Owns: putting them together.  Does not know: what a route does.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import metadata
from typing import IO

import msgspec
from anyio.to_thread import current_default_thread_limiter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from radixcache.errors import CacheError
from runtime.async_engine import AsyncEngine, Outlet
from runtime.curves import LiveCurves
from runtime.errors import EngineFailure, RuntimeFault
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.misses.records import MissReport
from runtime.recheck import Recheck
from runtime.request import pack_prompt
from runtime.server.anthropic import Conversation, MessagesRequest
from runtime.server.anthropic_answers import ErrorEvent, MessageAnswer, TokenCount
from runtime.server.completions import Completions
from runtime.server.config import ServerConfig
from runtime.server.context import Served, tenant_of
from runtime.server.curve import CurveEndpoint
from runtime.server.errors import answer_error, json_response
from runtime.server.explaining import Explaining, ExplainRequest
from runtime.server.hints import HintEndpoints
from runtime.server.messages import MessageEndpoints
from runtime.server.middleware import Gate, Tracer
from runtime.server.openapi import Endpoint, openapi_document, routes_of
from runtime.server.operations import Operations
from runtime.server.rekeying import follow_keys
from runtime.server.sessions import SessionEndpoints
from runtime.server.tenants import Tenants
from runtime.server.tree import TreeEndpoints
from runtime.server.tree_feed import TreeFeed
from runtime.trace_log import TraceLog

WORKER_THREADS = 8
"""Threads that render and tokenize, instead of anyio's 40: the tokenizer keeps caches of some
megabytes for each thread, and more threads than cores gain nothing."""


async def _answer_nobody(request: HttpRequest, error: Exception) -> Response:
    """The client is gone; whatever is returned goes nowhere (499 as nginx logs it)."""
    return Response(status_code=499)


_ANSWERS = {
    ClientDisconnect: _answer_nobody,
    **dict.fromkeys(
        (RuntimeFault, CacheError, msgspec.ValidationError, HTTPException, Exception), answer_error
    ),
}
"""What answers each kind of error; told as `server/errors.py` has it."""


def create_app(
    runtime: Runtime,
    config: ServerConfig | None = None,
    *,
    tenants: Tenants | None = None,
    tracer: Tracer | None = None,
    public_prefix: Sequence[int] = (),
    trace_stream: IO[bytes] | None = None,
    outlets: Sequence[Outlet] = (),
) -> Starlette:
    """Return the application that serves a runtime; its lifespan runs the engine's thread.

    tenants  who may call, each in a namespace of its own; None lets everybody in
    tracer   takes a trace of each request
    public_prefix
             token ids that every tenant may share, such as a system prompt's; computed and held
             before anything is served
    trace_stream
             takes a line for each request that `radixcache simulate` can replay; closed at the end
    outlets  told of each turn of the engine's thread, such as a `KVEventPublisher`

    `app.state.engine` is the `AsyncEngine`, for whoever stops it earlier; with tenants,
    `app.state.follow_keys` takes over another reading of their file, as `follow_keys` has it.
    """
    config = config or ServerConfig()
    served = _served(runtime, config, tenants, outlets)
    trace_log = _trace_log(runtime, served, trace_stream)
    engine = served.engine
    sessions = SessionEndpoints(served)
    feed = TreeFeed(served, sessions=sessions.book.sessions)
    endpoints = [*endpoints_of(served, sessions), *TreeEndpoints(served, feed).endpoints()]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        """Run the engine while requests are served; let go of everything after."""
        current_default_thread_limiter().total_tokens = WORKER_THREADS
        engine.start()
        try:
            if public_prefix:
                await _share_publicly(engine, pack_prompt(public_prefix))
            async with feed.running():
                yield
        finally:
            await asyncio.to_thread(engine.stop, drain_s=config.drain_s)
            if engine.failure is None:  # its thread has ended, so book and cache are ours
                sessions.book.close_all()
                runtime.engine.release_public()
                feed.close()
            if trace_log is not None:
                trace_log.close()

    app = Starlette(
        routes=[_document_route(endpoints, tenants), *routes_of(endpoints)],
        exception_handlers=_ANSWERS,
        middleware=[Middleware(Gate, served=served, tenants=tenants, tracer=tracer)],
        lifespan=lifespan,
    )
    app.state.engine = engine
    app.state.follow_keys = None if tenants is None else partial(follow_keys, served, tenants)
    return app


async def _share_publicly(engine: AsyncEngine, tokens: bytes) -> None:
    """Compute a public prefix and hold it."""
    request = await engine.call(lambda owner: owner.share_publicly(tokens))
    async for news in await engine.submit(request):
        if news.finish_reason not in (None, "length"):
            raise EngineFailure(f"the public prefix could not be computed: {news.error}")
    await engine.call(lambda owner: owner.hold_public())


def _document_route(endpoints: Sequence[Endpoint], tenants: Tenants | None) -> Route:
    """Return the route of the OpenAPI document, which is made once."""
    document = openapi_document(
        endpoints,
        title="radixcache",
        version=metadata.version("radixcache"),
        needs_key=tenants is not None,
    )

    async def openapi(request: HttpRequest) -> Response:
        return json_response(document)

    return Route("/openapi.json", openapi)


def endpoints_of(served: Served, sessions: SessionEndpoints) -> list[Endpoint]:
    """Return every endpoint: what is routed, and what the OpenAPI document tells of."""
    messages, explaining = MessageEndpoints(served), Explaining(served)
    return [
        *Completions(served).endpoints(),
        Endpoint(
            "POST",
            "/v1/messages",
            messages.create,
            "Answer a conversation in Anthropic's words",
            body=MessagesRequest,
            answer=MessageAnswer,
            error=ErrorEvent,
            is_streamed=True,
        ),
        Endpoint(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "How many tokens a conversation has",
            body=Conversation,
            answer=TokenCount,
            error=ErrorEvent,
        ),
        Endpoint(
            "POST",
            "/cache/explain",
            explaining.explain,
            "Why a prompt or a conversation would miss; computes nothing",
            body=ExplainRequest,
            answer=MissReport,
        ),
        Endpoint(
            "POST",
            "/cache/explain/messages",
            explaining.explain_messages,
            "Why a conversation in Anthropic's words would miss",
            body=Conversation,
            answer=MissReport,
        ),
        *sessions.endpoints(),
        *HintEndpoints(served, sessions.book).endpoints(),
        *CurveEndpoint(served).endpoints(),
        *Operations(served).endpoints(),
    ]


def _served(
    runtime: Runtime, config: ServerConfig, tenants: Tenants | None, outlets: Sequence[Outlet]
) -> Served:
    recheck = None
    if config.recheck_every:
        recheck = Recheck(runtime.engine, runtime.executor, every=config.recheck_every)
    engine = AsyncEngine(runtime.engine, recheck=recheck, outlets=outlets)
    salts = tenants.salts if tenants else {}
    runtime.engine.scheduler.admission.curves = _curves(runtime, config, salts)
    if tenants:  # before the engine's thread begins, which is the cache's only owner then
        cache = runtime.engine.cache
        for namespace, quota in tenants.quotas(cache.config.num_blocks).items():
            cache.set_quota(namespace, quota)
    return Served(
        runtime=runtime,
        engine=engine,
        metrics=ServerMetrics(
            lambda: engine.latest_stats,
            model=runtime.name,
            block_size=runtime.engine.cache.config.block_size,
            tenants=salts.values(),
            max_tenants=config.max_tenant_labels,
            exact=bool(runtime.exactness.holds),
            read_recheck=lambda: engine.recheck_stats,
        ),
        config=config,
        clock=time.monotonic,
        created=int(time.time()),
        salts=salts,
    )


def _curves(runtime: Runtime, config: ServerConfig, salts: Mapping[str, str]) -> LiveCurves | None:
    """Return what watches the cache, if anything shall."""
    if not config.curve_samples:
        return None
    return LiveCurves(
        block_size=runtime.engine.cache.config.block_size,
        clock=time.monotonic,
        seed=secrets.randbits(64),
        tenant_of=lambda namespace: tenant_of(salts, namespace),
        max_samples=config.curve_samples,
        max_tenants=config.max_tenant_labels,
    )


def _trace_log(runtime: Runtime, served: Served, stream: IO[bytes] | None) -> TraceLog | None:
    """Let the engine write a line for each request, if there is a stream for them."""
    log = None
    if stream is not None:
        log = TraceLog(
            stream,
            block_size=runtime.engine.cache.config.block_size,
            clock=time.monotonic,
            key=secrets.token_bytes(32),
            tenant_of=served.tenant_of,
        )
    runtime.engine.scheduler.admission.trace_log = log
    return log
