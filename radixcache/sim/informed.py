"""Policies that only a simulator can run: they know the future, or what becomes of every block.

Owns: the clairvoyant optimum, LRU told what is dead, segmented LRU as the literature has it.  Does
not know: how requests are served.
Idea: these are bounds and yardsticks.  They rank blocks, not leaves, so the replay evicts for them
one block at a time, and tells them of each request before it makes room for it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from radixcache.node import Node, NodeFacts
from radixcache.observer import TreeObserver
from radixcache.policy import LRU, Rank
from radixcache.sim.trace import Trace, TraceRequest
from radixcache.tokens import TOKEN_BYTES, unpack_tokens

NEVER = 2**62
"""The next use of a block that is not used again."""


class BlockPolicy(ABC):
    """A policy that ranks single blocks and hears of every request."""

    by_recency = False
    observer: TreeObserver | None = None
    """Listens to the tree for the policy."""

    @abstractmethod
    def rank(self, node: NodeFacts) -> Rank:
        """Return the rank of the last block on a leaf's edge."""

    @abstractmethod
    def arrive(self, request: TraceRequest, num_found: int) -> Iterable[Node]:
        """Note the next request, which found so many blocks, before room is made for it.

        returns  nodes whose rank may have changed without anybody touching them
        """


def last_name(node: NodeFacts) -> int:
    """Return the name of the last block on an edge of one-token blocks."""
    return int.from_bytes(node.edge[-TOKEN_BYTES:], sys.byteorder)


class Future:
    """When each block of a trace is asked for next, as of the request that arrived last.

    O(references) to build, 8 bytes each to keep.
    """

    def __init__(self, trace: Trace) -> None:
        self._following: list[array[int]] = []
        self._next_use: dict[int, int] = {}
        coming: dict[int, int] = {}
        for place in range(len(trace.requests) - 1, -1, -1):
            request = trace.requests[place]
            path = request.prompt + request.answer
            self._following.append(array("q", [coming.get(name, NEVER) for name in path]))
            coming.update(dict.fromkeys(request.prompt, place))

    def arrive(self, request: TraceRequest) -> None:
        """Let the next request arrive: its blocks' next use is after it from now on."""
        path = request.prompt + request.answer
        self._next_use.update(zip(path, self._following.pop(), strict=True))

    def next_use(self, name: int) -> int:
        """Return the place in the trace of the next request for a block, or NEVER."""
        return self._next_use.get(name, NEVER)


class Optimum(BlockPolicy):
    """The leaf whose next use is furthest away first: Belady's rule, with leaves as candidates.

    Source: Belady 1966; a prefix is used whole, so a parent's next use is never after its child's.
    """

    def __init__(self, trace: Trace) -> None:
        self._future = Future(trace)

    def rank(self, node: NodeFacts) -> Rank:
        """Return the next use, backwards."""
        return -self._future.next_use(last_name(node))

    def arrive(self, request: TraceRequest, num_found: int) -> Iterable[Node]:
        """Look beyond this request from now on."""
        self._future.arrive(request)
        return ()


class ToldDead(BlockPolicy):
    """What is never used again first, then the least recently used: LRU with perfect hints."""

    def __init__(self, trace: Trace) -> None:
        self._future = Future(trace)

    def rank(self, node: NodeFacts) -> Rank:
        """Return (will be used, last access)."""
        return self._future.next_use(last_name(node)) < NEVER, node.last_access

    def arrive(self, request: TraceRequest, num_found: int) -> Iterable[Node]:
        """Look beyond this request from now on."""
        self._future.arrive(request)
        return ()


class ToldClosed(LRU):
    """LRU with clients that say when they come back no more, and nothing else.

    After the last request that anybody goes on from, its client abandons the branch, as a closed
    session does: `RadixCache.abandon` marks what nobody else went on from.  A request is the last
    where the last whole block of its prompt is not asked for again.
    """

    def __init__(self, trace: Trace) -> None:
        self.closing: set[int] = set()
        coming: set[int] = set()
        for place in range(len(trace.requests) - 1, -1, -1):
            prompt = trace.requests[place].prompt
            num_whole = min(len(prompt), trace.requests[place].prompt_tokens // trace.block_size)
            if num_whole and prompt[num_whole - 1] not in coming:
                self.closing.add(place)
            coming.update(prompt)


class CappedSLRU(BlockPolicy):
    """Segmented LRU: what was hit is protected, up to a share of the cache; the rest goes first.

    cap  blocks that may be protected; beyond, the least recently used of them are so no more

    Also a `TreeObserver`, to know where each block stands.
    A block that loses its protection keeps its place by recency among the unprotected.
    Source: Karedla et al. 1994.
    """

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._protected: OrderedDict[int, None] = OrderedDict()  # names, least recently hit first
        self._nodes: dict[int, Node] = {}
        self.observer = self

    def rank(self, node: NodeFacts) -> Rank:
        """Return (is protected, last access)."""
        return last_name(node) in self._protected, node.last_access

    def arrive(self, request: TraceRequest, num_found: int) -> Iterable[Node]:
        """Protect what was hit, the root as the most recent; yield what lost its protection."""
        for name in reversed(request.prompt[:num_found]):
            self._protected[name] = None
            self._protected.move_to_end(name)
        lost = []
        while len(self._protected) > self._cap:
            lost.append(self._nodes[self._protected.popitem(last=False)[0]])
        return lost

    def stored(self, node: Node, num_blocks: int) -> None:
        """Note on which node the new blocks stand."""
        self._nodes.update(dict.fromkeys(_names(node, num_blocks), node))

    def removed(self, node: Node, num_blocks: int) -> None:
        """Forget blocks."""
        for name in _names(node, num_blocks):
            self._nodes.pop(name)
            self._protected.pop(name, None)

    def split(self, upper: Node, lower: Node) -> None:
        """Note that the first blocks of an edge stand on a node of their own now."""
        self._nodes.update(dict.fromkeys(_names(upper, len(upper.block_ids)), upper))


def _names(node: Node, num_blocks: int) -> Iterator[int]:
    return iter(unpack_tokens(bytes(node.edge[-num_blocks * TOKEN_BYTES :])))
