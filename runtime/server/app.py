"""The web application: routes, error answers, and the engine's life.

Owns: putting them together.  Does not know: what a route does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from radixcache.errors import CacheError
from runtime.async_engine import AsyncEngine
from runtime.errors import RuntimeFault
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.server.config import ServerConfig
from runtime.server.context import Served
from runtime.server.errors import answer_error
from runtime.server.routes import Endpoints


def create_app(runtime: Runtime, config: ServerConfig | None = None) -> Starlette:
    """Return the application that serves a runtime; its lifespan runs the engine's thread.

    `app.state.engine` is the `AsyncEngine`, for whoever stops it earlier.
    """
    config = config or ServerConfig()
    engine = AsyncEngine(runtime.engine)
    served = Served(
        runtime=runtime,
        engine=engine,
        metrics=ServerMetrics(lambda: engine.latest_stats),
        config=config,
        clock=time.monotonic,
        created=int(time.time()),
    )
    endpoints = Endpoints(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(engine.stop, drain_s=config.drain_s)

    app = Starlette(
        routes=[
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
        ],
        exception_handlers={
            RuntimeFault: answer_error,
            CacheError: answer_error,
            msgspec.ValidationError: answer_error,
            HTTPException: answer_error,
            ClientDisconnect: _answer_nobody,
            Exception: answer_error,
        },
        lifespan=lifespan,
    )
    app.state.engine = engine
    return app


async def _answer_nobody(request: HttpRequest, error: Exception) -> Response:
    """The client is gone; whatever is returned goes nowhere (499 as nginx logs it)."""
    return Response(status_code=499)
