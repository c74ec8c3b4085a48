"""The records of the tree's feed, as readers get them.

Owns: fields and their meaning.  Does not know: where the numbers come from, or how they are sent.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TIER = "gpu"
"""Where the blocks of every node are: there is one tier."""

PinKind = Literal["request", "session", "hold", "public", "lease"]


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that is being computed, in tokens.

    id        of its request; "/1" follows for its second branch, and so on
    cached    of the prompt, found at first admission
    computed  of the prompt and the output, K/V that is there
    output    drawn so far
    blocks    of its lease
    """

    id: str
    prompt: int
    cached: int
    computed: int
    output: int
    blocks: int
    tenant: str | None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The engine in numbers at one moment; of a tenant, what is its own.

    time       seconds since 1970
    asked      prompt tokens of requests that began, since the start
    hit        of those, found in the cache
    computed   of those, computed
    generated  tokens generated since the start
    free       blocks that nobody owns; of a tenant, those left of its hard limit
    cached     blocks of the tree that nobody stands on
    pinned     blocks of the tree that somebody stands on
    total      blocks of the pool; of a tenant, its hard limit, or what it owns where it has none
    evicted    blocks given up since the start
    waiting    requests that wait
    running    sequences that run, the first 64; none in a history
    nodes      of the tree, roots not counted; 0 for a tenant while nobody watches its tree
    ttft_warm, ttft_cold
               median seconds to the first token over the last minute, of prompts of which some was
               cached, and of the others; None where there were none
    """

    time: float
    asked: int
    hit: int
    computed: int
    generated: int
    free: int
    cached: int
    pinned: int
    total: int
    evicted: int
    waiting: int
    nodes: int
    running_total: int
    ttft_warm: float | None
    ttft_cold: float | None
    running: tuple[Running, ...] = ()


class Pin(msgspec.Struct, frozen=True):
    """Who stands on a node or below it.

    kind  a running request, a session, another hold, the hold of the public prefix, or a lease of
          something else, such as a recheck
    id    the request's; of a session enough to know it by; else the number of lease or hold
    """

    kind: PinKind
    id: str


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One node of the tree, in full.

    path_tokens    of the prefix up to and with the edge
    token_ids, text
                   of the edge, None where they may not be shown
    text_hidden    why they are not, else None
    blocks         ids in the pool; empty for a tenant, whom they would tell of others
    num_blocks     of the edge
    used, created  seconds since 1970, as near as is known
    pins           how many stand on it or below it
    pinned_by      the first 64 of them
    eviction_rank  leaves that go before it by the policy's order, 0: it goes next; of a tenant,
                   its own leaves.  None where it can't be evicted now, or far from it
    """

    id: int
    parent: int
    path_tokens: int
    tokens: int
    token_ids: list[int] | None
    text: str | None
    text_hidden: str | None
    blocks: list[int]
    num_blocks: int
    hits: int
    used: float
    created: float
    pins: int
    pinned_by: list[Pin]
    eviction_rank: int | None
    children: int
    state: Literal["p", "e", "i", "r"]
    tier: str
    namespace: str
    tenant: str | None


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of the last 15 minutes, oldest first, `interval_s` apart."""

    interval_s: float
    samples: list[Sample]
