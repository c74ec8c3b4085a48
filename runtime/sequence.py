"""One branch of a request on its way through the engine.

Owns: what is known of it between steps.  Does not know: when it runs; the scheduler decides.
Idea: a sequence is a lease whose computed count must catch up with its token count; prompt and
output are the same to it.

    lease.tokens   │ computed: K/V is there      │ to compute │
                   0 …              num_computed … lease.num_tokens
    sampled        the newest token, not on the lease yet (there may be no room for it)
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from radixcache.lease import Lease
from radixcache.tokens import num_tokens, pack_tokens
from runtime.request import MAX_SEED, Constraint, Request


class Sequence:
    """A branch's state; the scheduler alone changes it, but for `constraint` and `allowed`.

    index          which branch of the request; all begin as branch 0, which computes the prompt
    num_branches   branches that begin with the next token, this one counted; 1 once they have
    arrival        place in the order of submission
    num_overtaken  sequences that were admitted before it though they came later
    output         tokens sampled so far
    counts         how often each of them was
    lease          its hold on the cache, None while it waits
    num_computed   tokens of the lease whose K/V is computed and, where log-probabilities of the
                   prompt are wanted, reported
    num_in_place   tokens of the lease whose K/V others had computed when it was last admitted
    num_scored     tokens of the prompt before the next one to report
    seed           of the request; each branch draws by its own, made of it
    sampled        the newest token where it is not on the lease yet
    num_cached     tokens taken from the cache at first admission, None before
    constraint     what the output must look like, None for anything
    allowed        which tokens may come next, as `Draw.allowed`
    """

    __slots__ = (
        "allowed",
        "arrival",
        "constraint",
        "counts",
        "index",
        "lease",
        "num_branches",
        "num_cached",
        "num_computed",
        "num_in_place",
        "num_overtaken",
        "num_scored",
        "output",
        "request",
        "sampled",
        "seed",
    )

    def __init__(self, request: Request, *, seed: int, index: int = 0) -> None:
        self.request = request
        self.seed = seed
        self.index = index
        self.num_branches = request.sampling.n
        self.arrival = 0
        self.num_overtaken = 0
        self.output: list[int] = []
        self.counts: Counter[int] = Counter()
        self.lease: Lease | None = None
        self.num_computed = 0
        self.num_in_place = 0
        self.num_scored = self.num_prompt_tokens
        if request.sampling.prompt_logprobs is not None:
            self.num_scored = request.sampling.prompt_logprobs_from
        self.sampled: int | None = None
        self.num_cached: int | None = None
        self.constraint: Constraint | None = request.constraint
        self.allowed = b""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return num_tokens(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the next token's draws: one, or those of all branches that begin with it."""
        first = self.index
        return tuple(_branch_seed(self.seed, i) for i in range(first, first + self.num_branches))

    @property
    def num_behind(self) -> int:
        """Tokens of the lease that are to be computed."""
        assert self.lease is not None
        return self.lease.num_tokens - self.num_computed

    def all_tokens(self) -> bytes:
        """Return prompt and output as packed ids."""
        return self.request.prompt + pack_tokens(self.output)

    def admit(self, lease: Lease, num_in_place: int) -> None:
        """Take a lease whose first tokens have their K/V, computed but for what is reported."""
        self.lease = lease
        self.num_in_place = self.num_computed = num_in_place
        if self.num_scored < self.num_prompt_tokens:
            self.num_computed = min(num_in_place, self.num_scored - 1)
        if self.num_cached is None:
            self.num_cached = self.num_computed

    def take(self, token: int) -> None:
        """Note a token that was drawn."""
        self.output.append(token)
        self.counts[token] += 1
        self.sampled = token
        self.num_branches = 1

    def branch(self, lease: Lease, index: int) -> Sequence:
        """Return another branch of the same request that stands at the same token, on a fork."""
        twin = Sequence(self.request, seed=self.seed, index=index)
        twin.lease, twin.num_computed, twin.num_in_place = lease, self.num_computed, 0
        twin.arrival, twin.num_cached = self.arrival, self.num_cached
        twin.num_scored, twin.num_branches = self.num_prompt_tokens, 1
        return twin


def _branch_seed(seed: int, index: int) -> int:
    """Branch 0 draws as the seed says; the others as if they had been given seeds of their own."""
    if not index:
        return seed
    words = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(words, "little") % MAX_SEED
