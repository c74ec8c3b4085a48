"""A trace: which blocks each request looks up and publishes, and when.

Owns: the records, and the names of blocks.  Does not know: files, caches, policies.
Idea: a block is named by its whole prefix, so a name is a place in one endless tree, names are
dense numbers, and replaying a trace of any block size is replaying a cache of blocks of one "token"
each, the name itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence

import msgspec

from radixcache.errors import InvalidTrace

MAX_NAMES = 2**31 - 2
"""Names are token ids of the cache that replays them; the last one stands for private blocks."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace.

    arrival_s      seconds since the trace began
    prompt         names of the prompt's blocks, int32
    answer         names of the blocks that its answer completes, where the trace tells
    prompt_tokens  of the prompt
    output_tokens  of the answer
    tenant         whose request it is, "" where the trace has none
    """

    arrival_s: float
    prompt: array[int]
    answer: array[int]
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a trace, in the order of their arrival.

    title         what it is called in tables
    block_size    tokens that a name stands for
    num_distinct  different blocks, of prompts and answers
    has_times     whether the arrival times are the trace's own
    """

    title: str
    block_size: int
    requests: Sequence[TraceRequest]
    num_distinct: int
    has_times: bool = True

    @property
    def num_references(self) -> int:
        """Blocks of all prompts: what a hit rate is a share of."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def longest(self) -> int:
        """Blocks of the longest request, its answer included."""
        return max((len(r.prompt) + len(r.answer) for r in self.requests), default=0)

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last."""
        if not self.requests:
            return 0.0
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def head(self, num_requests: int) -> Trace:
        """Return a trace of the first requests alone."""
        requests = self.requests[:num_requests]
        names = {name for r in requests for blocks in (r.prompt, r.answer) for name in blocks}
        return msgspec.structs.replace(self, requests=requests, num_distinct=len(names))


class BlockNames:
    """Names of blocks: a number for each different prefix, in the order of first sight."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Hashable], int] = {}
        self._roots: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def path(self, contents: Iterable[Hashable], *, tenant: str = "") -> array[int]:
        """Return the name of each block of a prompt, given what stands in each.

        tenant  whose blocks these are: different tenants share none

        About 0.3 µs a block.  Raises InvalidTrace beyond two thousand million names.
        """
        names, path = self._names, array("i")
        at = self._roots.setdefault(tenant, -1 - len(self._roots))
        for content in contents:
            at = names.setdefault((at, content), len(names))
            path.append(at)
        if len(names) > MAX_NAMES:
            raise InvalidTrace("the trace has more than 2³¹ different blocks: use larger blocks")
        return path
