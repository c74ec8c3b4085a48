"""One request on its way through the engine.

Owns: what is known of it between steps.  Does not know: when it runs; the scheduler decides.
Idea: a sequence is a lease whose computed count must catch up with its token count; prompt and
output are the same to it.

    lease.tokens   │ computed: K/V is there      │ to compute │
                   0 …              num_computed … lease.num_tokens
    sampled        the newest token, not on the lease yet (there may be no room for it)
"""

from __future__ import annotations

from radixcache.lease import Lease
from radixcache.tokens import num_tokens, pack_tokens
from runtime.request import Request


class Sequence:
    """A request's state; the scheduler alone changes it.

    output        tokens sampled so far
    lease         its hold on the cache, None while it waits
    num_computed  tokens of the lease whose K/V is computed
    sampled       the newest token where it is not on the lease yet
    num_cached    tokens found in the cache at first admission, None before
    """

    __slots__ = ("lease", "num_cached", "num_computed", "output", "request", "sampled", "seed")

    def __init__(self, request: Request, *, seed: int) -> None:
        self.request = request
        self.seed = seed
        self.output: list[int] = []
        self.lease: Lease | None = None
        self.num_computed = 0
        self.sampled: int | None = None
        self.num_cached: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return num_tokens(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.num_prompt_tokens + len(self.output)

    def all_tokens(self) -> bytes:
        """Return prompt and output as packed ids."""
        return self.request.prompt + pack_tokens(self.output)
