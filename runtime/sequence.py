"""One branch of a request on its way through the engine.

Owns: what is known of it between steps.  Does not know: when it runs; the scheduler decides.
Idea: a sequence is a lease whose computed count must catch up with its token count; prompt and
output are the same to it.

    prompt, output │ computed: K/V is there      │ to compute │
                   0 …              num_computed …   num_tokens
    lease.tokens   │ …        lease.num_tokens │    the newest are not on the lease yet: there may
                   be no room for them, or a whole block of them is put there at once
"""

from __future__ import annotations

from array import array
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING

from radixcache.lease import Lease
from radixcache.tokens import num_tokens, pack_tokens
from runtime.request import MAX_SEED, Constraint, Request

if TYPE_CHECKING:
    from runtime.live import Branch


class Sequence:
    """A branch's state; the scheduler alone changes it.

    What the engine changes: `constraint`, `allowed`, `reader`.

    num_prompt_tokens
                   tokens of the prompt
    index          which branch of the request; all begin as branch 0, which computes the prompt
    num_branches   branches that begin with the next token, this one counted; 1 once they have
    arrival        place in the order of submission
    num_overtaken  sequences that were admitted before it though they came later
    output         tokens sampled so far
    counts         how often each of them was, where a penalty asks
    lease          its hold on the cache, None while it waits
    row            where it stands among those that decode; -1 elsewhere
    num_in_place   tokens of the lease whose K/V others had computed when it was last admitted
    num_scored     tokens of the prompt before the next one to report
    seed           of the request; each branch draws by its own, made of it
    num_cached     tokens taken from the cache at first admission, None before
    constraint     what the output must look like, None for anything
    allowed        which tokens may come next, as `Draw.allowed`
    reader         who reads its tokens, None where nobody does any more
    """

    __slots__ = (
        "_num_computed",
        "allowed",
        "arrival",
        "constraint",
        "counts",
        "index",
        "lease",
        "num_branches",
        "num_cached",
        "num_in_place",
        "num_overtaken",
        "num_prompt_tokens",
        "num_scored",
        "output",
        "reader",
        "request",
        "row",
        "seed",
    )

    def __init__(self, request: Request, *, seed: int, index: int = 0) -> None:
        self.request = request
        self.num_prompt_tokens = num_tokens(request.prompt)
        self.seed = seed
        self.index = index
        self.num_branches = request.sampling.n
        self.arrival = 0
        self.num_overtaken = 0
        self.output: list[int] = []
        self.counts: Counter[int] = Counter()
        self.lease: Lease | None = None
        self.row = -1
        self.num_computed = 0
        self.num_in_place = 0
        self.num_scored = self.num_prompt_tokens
        if request.sampling.prompt_logprobs is not None:
            self.num_scored = request.sampling.prompt_logprobs_from
        self.num_cached: int | None = None
        self.constraint: Constraint | None = request.constraint
        self.allowed = b""
        self.reader: Branch | None = None

    @property
    def num_computed(self) -> int:
        """Tokens whose K/V is computed and, where log-probabilities of the prompt are wanted,
        reported; of one that decodes, all but the newest."""
        return self._num_computed if self.row < 0 else self.num_tokens - 1

    @num_computed.setter
    def num_computed(self, count: int) -> None:
        """Set it, for a sequence that stands in no row."""
        self._num_computed = count

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
        """Tokens that are to be computed."""
        return self.num_tokens - self.num_computed

    @property
    def decodes(self) -> bool:
        """True where nothing of it changes from step to step but its newest token and its place."""
        sampling = self.request.sampling
        return (
            self.constraint is None
            and sampling.logprobs is None
            and not (sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty)
            and bool(self.output)
            and self.num_behind == 1
            and self.num_in_place <= self.num_computed
        )

    def unwritten(self) -> bytes:
        """Return the newest tokens, packed, that are not on the lease yet."""
        assert self.lease is not None
        missing = self.num_tokens - self.lease.num_tokens
        return array("i", self.output[-missing:]).tobytes() if missing else b""

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
        sampling = self.request.sampling
        if sampling.presence_penalty or sampling.frequency_penalty:
            self.counts[token] += 1
        self.num_branches = 1

    def branch(self, lease: Lease, index: int) -> Sequence:
        """Return another branch of the same request that stands at the same token, on a fork."""
        twin = Sequence(self.request, seed=self.seed, index=index)
        twin.lease, twin.num_computed, twin.num_in_place = lease, self.num_computed, 0
        twin.arrival, twin.num_overtaken = self.arrival, self.num_overtaken
        twin.num_cached = self.num_cached
        twin.num_scored, twin.num_branches = self.num_prompt_tokens, 1
        return twin


def _branch_seed(seed: int, index: int) -> int:
    """Branch 0 draws as the seed says; the others as if they had been given seeds of their own."""
    if not index:
        return seed
    words = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(words, "little") % MAX_SEED
