"""What all endpoints share: the runtime behind them, the server's settings, and who is calling.

Owns: the two records.  Does not know: routes, bodies, answers.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request as HttpRequest

from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from runtime.async_engine import AsyncEngine
from runtime.errors import ModelNotFound
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.server.config import ServerConfig


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request, as far as the server can prove it.

    tenant     name, for logs and metrics
    namespace  what the tenant's requests share; no other tenant's do
    """

    tenant: str = ""
    namespace: Namespace = DEFAULT_NAMESPACE


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime that endpoints serve.

    clock    monotonic seconds, for durations
    created  seconds since 1970 at which serving began
    """

    runtime: Runtime
    engine: AsyncEngine
    metrics: ServerMetrics
    config: ServerConfig
    clock: Callable[[], float]
    created: int

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a model that is not the one served; None is."""
        if name is not None and name != self.runtime.name:
            raise ModelNotFound(
                f"this server serves {self.runtime.name!r}, not {name!r}: see /v1/models",
                param="model",
            )


def caller_of(request: HttpRequest) -> Caller:
    """Return who sent a request."""
    caller = request.scope.get("radixcache.caller")
    return caller if isinstance(caller, Caller) else Caller()
