"""Hit rate over cache size as it is now: of the whole cache, and of each tenant alone.

Owns: which curve a request belongs to.  Does not know: tenants' keys, HTTP, how a curve is made.
Idea: a tenant's curve is made of its own requests as if it had a cache of its own, so nothing that
others do shows in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from radixcache.curve import CurveEstimate, LiveCurve
from radixcache.lease import Lease
from radixcache.namespace import Namespace
from radixcache.tokens import TOKEN_BYTES

TENANT_SHARE = 8
"""A tenant's curve watches one block where the whole one watches so many."""


class LiveCurves:
    """The curve of all requests, and one for each tenant; of one thread, the engine's.

    block_size   tokens a block
    clock        seconds, never backwards
    seed         a secret of the process
    tenant_of    whose a namespace is; None for nobody's, which only the whole curve shows
    max_samples  blocks that the whole curve watches
    max_tenants  tenants that have a curve, the first ones that ask
    half_life_s  seconds after which a request counts half
    """

    def __init__(
        self,
        *,
        block_size: int,
        clock: Callable[[], float],
        seed: int,
        tenant_of: Callable[[Namespace], str | None] = lambda namespace: None,
        max_samples: int = 8192,
        max_tenants: int = 64,
        half_life_s: float | None = 3600.0,
    ) -> None:
        self._tenant_of = tenant_of
        self._max_tenants = max_tenants
        self._block_size = block_size
        self._clock = clock
        self._half_life_s = half_life_s
        self._seed = seed
        self._max_samples = max_samples
        self._whole = self._curve(max_samples)
        self._tenants: dict[str, LiveCurve] = {}

    def look_up(self, namespace: Namespace, tokens: bytes, *, found: int) -> None:
        """Note a prompt that was asked for.

        found  tokens of it that were cached, whole blocks
        """
        now, found_blocks = self._clock(), found // self._block_size
        for curve in self._of(namespace):
            curve.look_up(namespace, tokens, found_blocks=found_blocks, now=now)

    def touch(self, lease: Lease) -> None:
        """Note that what a lease has committed was used, as its sequence ends."""
        tokens = lease.tokens[: lease.num_committed * TOKEN_BYTES]
        for curve in self._of(lease.namespace):
            curve.touch(lease.namespace, tokens)

    def whole(self) -> CurveEstimate:
        """Return the curve of all requests."""
        return self._whole.estimate()

    def tenants(self) -> Mapping[str, CurveEstimate]:
        """Return the curve of each tenant that has one."""
        return {name: curve.estimate() for name, curve in self._tenants.items()}

    def of_tenant(self, tenant: str) -> CurveEstimate | None:
        """Return the curve of one tenant; None where it has asked for nothing yet."""
        curve = self._tenants.get(tenant)
        return None if curve is None else curve.estimate()

    def check(self) -> None:
        """Check each curve."""
        for curve in (self._whole, *self._tenants.values()):
            curve.check()

    def _of(self, namespace: Namespace) -> tuple[LiveCurve, ...]:
        tenant = self._tenant_of(namespace)
        if tenant is None:
            return (self._whole,)
        curve = self._tenants.get(tenant)
        if curve is None:
            if len(self._tenants) >= self._max_tenants:
                return (self._whole,)
            samples = max(1, self._max_samples // TENANT_SHARE)
            curve = self._tenants[tenant] = self._curve(samples)
        return self._whole, curve

    def _curve(self, max_samples: int) -> LiveCurve:
        return LiveCurve(
            block_size=self._block_size,
            max_samples=max_samples,
            half_life_s=self._half_life_s,
            seed=self._seed,
        )
