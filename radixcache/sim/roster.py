"""The policies that a simulation can ask for, by name.

Owns: the names.  Does not know: how a policy decides.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from radixcache.errors import InvalidTrace
from radixcache.policy import POLICIES, EvictionPolicy
from radixcache.sim.informed import CappedSLRU, Optimum, ToldClosed, ToldDead
from radixcache.sim.replay import Outcome, Progress, Replay, Speed
from radixcache.sim.trace import Trace

PROTECTED_SHARE = 0.8
"""Part of the cache that segmented LRU protects at most."""

Build = Callable[[Trace, int], EvictionPolicy]
"""Makes a policy for a trace, and a number of blocks."""


def _shipped(make: Callable[[], EvictionPolicy]) -> Build:
    return lambda trace, num_blocks: make()


ROSTER: dict[str, Build] = {
    **{name: _shipped(policy) for name, policy in POLICIES.items() if name != "slru"},
    "slru": lambda trace, num_blocks: CappedSLRU(int(num_blocks * PROTECTED_SHARE)),
    "slru-hits": _shipped(POLICIES["slru"]),
    "told-closed": lambda trace, num_blocks: ToldClosed(trace),
    "told-dead": lambda trace, num_blocks: ToldDead(trace),
    "opt": lambda trace, num_blocks: Optimum(trace),
}
"""What may be simulated: the policies of a server, and the yardsticks `slru` (segments as the
literature has them; a server's own `slru` is `slru-hits` here), `told-closed`, `told-dead` and
`opt`."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one size."""

    policy: str
    num_blocks: int
    block_size: int
    outcome: Outcome


def simulate(
    trace: Trace,
    policy: str,
    num_blocks: int,
    *,
    speed: Speed | None = None,
    progress: Progress | None = None,
) -> Row:
    """Replay a trace under a policy of the roster.

    speed  how long requests are served; None: each ends before the next comes

    Raises InvalidTrace for a policy that is not in the roster; InvalidConfig for no blocks.
    """
    if policy not in ROSTER:
        raise InvalidTrace(f"no policy {policy!r}: choose one of {', '.join(ROSTER)}")
    chosen = ROSTER[policy](trace, num_blocks)
    outcome = Replay(trace, chosen, num_blocks=num_blocks, speed=speed).run(progress)
    return Row(policy=policy, num_blocks=num_blocks, block_size=trace.block_size, outcome=outcome)
