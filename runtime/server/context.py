"""What all endpoints share: the runtime behind them, the server's settings, and who is calling.

Owns: the two records, and which namespaces are a caller's.  Does not know: routes, bodies, answers.
Idea: what a caller sends can only lengthen its tenant's salt, so a tenant's namespaces are told by
how their salts begin; nothing needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b

import msgspec
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.requests import Request as HttpRequest

from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from runtime.async_engine import AsyncEngine
from runtime.errors import InvalidRequest, ModelNotFound
from runtime.grammar import Grammar
from runtime.loading import Runtime
from runtime.metrics import ServerMetrics
from runtime.request import Constraint
from runtime.server.config import ServerConfig
from runtime.server.journal import Journal
from runtime.server.limits import WaitingRoom
from runtime.tree.tallies import Tallies


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request, as far as the server can prove it.

    tenant       name, for logs and metrics; "" where the server asks for no keys
    namespace    what the tenant's requests share; no other tenant's do
    is_admin     may see and change what belongs to all
    max_waiting  requests of the tenant that may wait; None: as many as the engine's queue takes
    min_priority requests of the tenant go no earlier than this; None: as early as they ask
    may_narrow   False where a `cache_salt` would lead out of the tenant's hard limit of blocks
    journal      where the numbers of the request are noted; None where nobody reads them
    """

    tenant: str = ""
    namespace: Namespace = DEFAULT_NAMESPACE
    is_admin: bool = False
    max_waiting: int | None = None
    min_priority: int | None = None
    may_narrow: bool = True
    journal: Journal | None = None

    def narrowed(self, cache_salt: str | None) -> Caller:
        """Return the caller within a smaller namespace of its own; None leaves it as it is.

        Equal salts of one tenant share; salts of two tenants never do.  Raises InvalidRequest.
        """
        if cache_salt is None:
            return self
        if not self.may_narrow:
            raise InvalidRequest(
                "this tenant's blocks are limited, and a cache_salt would lead out of the limit: "
                "leave it out",
                param="cache_salt",
            )
        own = self.namespace.salt.encode()
        # The length says where the tenant's salt ends, so no two pairs give the same bytes.
        pair = len(own).to_bytes(8, "little") + own + cache_salt.encode("utf-8", "surrogatepass")
        salt = f"{self.namespace.salt}.{blake2b(pair, digest_size=16).hexdigest()}"
        return msgspec.structs.replace(
            self, namespace=msgspec.structs.replace(self.namespace, salt=salt)
        )

    def owns(self, namespace: Namespace) -> bool:
        """Return True for the caller's own namespace and those narrowed from it."""
        own = self.namespace.salt
        return namespace.salt == own or namespace.salt.startswith(own + ".")

    def may_be_told_of(self, namespace: Namespace) -> bool:
        """Return True for what an explanation may tell to be cached elsewhere.

        That is the caller's own salt under another adapter or epoch, and for a tenant with an
        administrator's key everything.  Nobody else is told what another salt has: it would be a
        way to ask whether others sent a prompt.
        """
        is_operator = self.is_admin and bool(self.tenant)
        return is_operator or namespace.salt == self.namespace.salt

    def may_see(self, namespace: Namespace) -> bool:
        """Return True for what the caller owns; for everything where it is an administrator."""
        return self.is_admin or self.owns(namespace)


COMPILING_THREADS = 2
"""Grammars that are compiled at once."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime that endpoints serve.

    clock    monotonic seconds, for durations
    created  seconds since 1970 at which serving began
    waiting  how many requests of each tenant wait
    compiling
             how many grammars are compiled at once
    tallies  what each tenant's requests came to
    salts    the tenant of each salt that namespaces begin with; empty without API keys
    """

    runtime: Runtime
    engine: AsyncEngine
    metrics: ServerMetrics
    config: ServerConfig
    clock: Callable[[], float]
    created: int
    waiting: WaitingRoom = msgspec.field(default_factory=WaitingRoom)
    compiling: CapacityLimiter = msgspec.field(
        default_factory=lambda: CapacityLimiter(COMPILING_THREADS)
    )
    tallies: Tallies = msgspec.field(default_factory=Tallies)
    salts: Mapping[str, str] = {}

    def tenant_of(self, namespace: Namespace) -> str | None:
        """Return whose a namespace is; None for one that is no tenant's."""
        return tenant_of(self.salts, namespace)

    async def constrain(self, grammar: Grammar | None) -> Constraint | None:
        """Compile a grammar, if there is one, on a worker thread: a hostile one takes a while.

        Only so many at a time, so that they never hold up what renders and tokenizes.
        Raises InvalidRequest.
        """
        if grammar is None:
            return None
        return await run_sync(self.runtime.constrain, grammar, limiter=self.compiling)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a model that is not the one served; None is."""
        if name is not None and name != self.runtime.name:
            raise ModelNotFound(
                f"this server serves {self.runtime.name!r}, not {name!r}: see /v1/models",
                param="model",
            )


def tenant_of(salts: Mapping[str, str], namespace: Namespace) -> str | None:
    """Return whose a namespace is, given the tenant of each salt; None for nobody's."""
    return salts.get(namespace.salt.partition(".")[0])


def caller_of(request: HttpRequest) -> Caller:
    """Return who sent a request."""
    caller = request.scope.get("radixcache.caller")
    return caller if isinstance(caller, Caller) else Caller()
