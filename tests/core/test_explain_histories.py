"""Explanations of small random histories, against looking at everything that is in the view."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

import radixcache.cache as caching
import radixcache.explain as explaining
from radixcache import CacheConfig, CacheError, Namespace, RadixCache, StaleEpoch, unpack_tokens
from radixcache.explain import Cause
from tests.core.serving import acquire, insert
from tests.core.test_explain import PLAIN, explain, haunted
from tests.support.histories import BOUNDED, LONG, STRESS
from tests.support.planted import PlantedBug
from tests.support.strategies import small, token_runs

SPACES = (PLAIN, Namespace(salt="a"), Namespace(model="m", salt="a"))


class Path(NamedTuple):
    """All tokens from a root to the end of a node, and where its own begin."""

    node_id: int
    start: int
    tokens: tuple[int, ...]


class History:
    """A cache with a past: what was ever cached is kept beside it, as whole prefixes."""

    def __init__(self, block_size: int, is_haunted: bool) -> None:
        self.block_size = block_size
        self.is_haunted = is_haunted
        self.cache = (
            haunted(200, block_size)
            if is_haunted
            else RadixCache(CacheConfig(num_blocks=200, block_size=block_size))
        )
        self.ever: set[tuple[Namespace, tuple[int, ...]]] = set()
        self.epochs = dict.fromkeys(SPACES, 0)

    def play(self, verb: str, which: int, tokens: tuple[int, ...]) -> None:
        space = structs.replace(SPACES[which], epoch=self.epochs[SPACES[which]])
        if verb == "insert":
            insert(self.cache, tokens, space)
        elif verb == "hold":
            self.cache.commit(acquire(self.cache, tokens, space), len(tokens))
        elif verb == "evict":
            self.cache.evict(len(tokens))
        else:
            self.epochs[SPACES[which]] = self.cache.raise_epoch(space).epoch
        self.ever |= self.cached_blocks()

    def cached_blocks(self) -> set[tuple[Namespace, tuple[int, ...]]]:
        return {
            (space, path.tokens[:end])
            for space, paths in self.paths().items()
            for path in paths
            for end in range(self.block_size, len(path.tokens) + 1, self.block_size)
        }

    def paths(self) -> dict[Namespace, list[Path]]:
        paths: dict[Namespace, list[Path]] = {}
        above: dict[int | None, tuple[int, ...]] = {None: ()}
        for node in self.cache.view().nodes:
            start = above[node.parent]
            above[node.node_id] = (*start, *unpack_tokens(node.tokens))
            path = Path(node.node_id, len(start), above[node.node_id])
            paths.setdefault(node.namespace, []).append(path)
        return paths

    def state(self) -> object:
        """All that a call could have changed."""
        nodes = [
            (node.node_id, node.last_access, node.num_hits, node.lock_ref, list(node.children))
            for node in self.cache.tree.walk()
        ]
        return nodes, list(self.cache.tree.roots), self.cache.view(), self.cache.stats()


def agreeing(tokens: tuple[int, ...], path: Path) -> int:
    """Tokens that a prompt shares with a path, its last one left out."""
    return next(
        (i for i, (a, b) in enumerate(zip(tokens[:-1], path.tokens, strict=False)) if a != b),
        min(max(len(tokens) - 1, 0), len(path.tokens)),
    )


def expected_cause(history: History, tokens: tuple[int, ...], space: Namespace) -> Cause:
    """The cause by brute force, in the order that is documented."""
    size, paths = history.block_size, history.paths()
    reach = {
        other: max((agreeing(tokens, path) for path in found), default=0)
        for other, found in paths.items()
    }
    if space.epoch < history.epochs[structs.replace(space, epoch=0)]:
        return Cause.EPOCH
    num_cached = reach.pop(space, 0)
    if num_cached >= len(tokens) - 1:
        return Cause.HIT
    following = (space, tokens[: (num_cached // size + 1) * size])
    if history.is_haunted and len(following[1]) % size == 0 and following in history.ever:
        return Cause.EVICTED
    more = [other for other, num_tokens in reach.items() if num_tokens >= num_cached + size]
    if any(structs.replace(other, epoch=space.epoch) == space for other in more):
        return Cause.EPOCH
    if more:
        return Cause.OTHER_NAMESPACE
    if num_cached and _next_tokens(paths[space], tokens, num_cached):
        return Cause.DIVERGED
    return Cause.SHORT if len(tokens) % size == len(tokens) - num_cached else Cause.NEVER_SEEN


def _next_tokens(paths: list[Path], tokens: tuple[int, ...], num_cached: int) -> set[int]:
    """What the cache has behind the tokens that agree."""
    return {
        path.tokens[num_cached]
        for path in paths
        if len(path.tokens) > num_cached and path.tokens[:num_cached] == tokens[:num_cached]
    }


def examine(history: History, tokens: tuple[int, ...], space: Namespace) -> None:
    """Compare an explanation with what stands in the view and with what `acquire` finds."""
    cache, paths = history.cache, history.paths().get(space, [])
    before = history.state()
    why = explain(cache, tokens, space)
    why.describe()
    assert history.state() == before
    cache.check()
    assert why.cause is expected_cause(history, tokens, space)
    assert (why.num_elsewhere > 0) == bool(why.other)
    if space.epoch < history.epochs[structs.replace(space, epoch=0)]:
        assert why.num_cached == 0
        with pytest.raises(StaleEpoch):
            acquire(cache, tokens, space)
        return
    assert why.num_cached == max((agreeing(tokens, path) for path in paths), default=0)
    assert (why.first_missing is None) == (why.num_cached >= len(tokens) - 1)
    if why.first_missing is not None:
        assert why.first_missing == why.num_cached
        assert why.token == tokens[why.first_missing]
        after = _next_tokens(paths, tokens, why.num_cached) if why.num_cached else set()
        assert tokens[why.num_cached] not in after
        assert (why.cached_token in after) if after else why.cached_token is None
    at = [p.node_id for p in paths if p.start < agreeing(tokens, p) == why.num_cached]
    assert (why.node_id in at) if at else why.node_id is None
    lease = acquire(cache, tokens, space)
    assert (why.num_cached, why.num_cached_blocks) == (
        lease.num_cached,
        lease.num_committed // history.block_size,
    )
    cache.release(lease)


class Asked(NamedTuple):
    """A prompt: the begin of an earlier one, and what follows, under an epoch old or new."""

    which: int
    keep: int
    more: tuple[int, ...]
    space: Namespace
    is_current: bool


STEP = st.tuples(
    st.sampled_from(("insert", "insert", "insert", "hold", "evict", "raise")),
    st.sampled_from((0, 0, 0, 1, 2)),
    token_runs(),
)
ASKED = st.builds(
    Asked, small(9), small(5), token_runs(), st.sampled_from((PLAIN, *SPACES)), st.booleans()
)
WORLD = given(
    block_size=st.sampled_from((1, 2, 3)),
    is_haunted=st.booleans(),
    past=st.lists(STEP, min_size=1, max_size=10),
    asked=st.lists(ASKED, min_size=1, max_size=8),
)
HUNT = settings(BOUNDED, phases=[Phase.generate], report_multiple_bugs=False)


def play_and_ask(
    block_size: int,
    is_haunted: bool,
    past: list[tuple[str, int, tuple[int, ...]]],
    asked: list[Asked],
) -> None:
    history = History(block_size, is_haunted)
    for verb, which, tokens in past:
        history.play(verb, which, tokens)
    for which, keep, more, space, is_current in asked:
        _, _, earlier = past[which % len(past)]
        epoch = history.epochs[space] if is_current else 0
        examine(history, (*earlier[:keep], *more), structs.replace(space, epoch=epoch))


def test_an_explanation_is_what_is_in_the_cache_and_changes_nothing():
    settings(LONG if STRESS else BOUNDED)(WORLD(play_and_ask))()


BUGS = {
    "the last token counts": ("_place", "end = key.num_tokens - 1", "end = key.num_tokens"),
    "whole blocks alone count": (
        "_place",
        "num_tokens = found.num_tokens + same",
        "num_tokens = found.num_tokens",
    ),
    "the place within an edge is forgotten": ("_place", "block * tree.block_size + same", "same"),
    "children are forgotten": ("_reach", "reversed(place.node.children.values())", "()"),
    "a root is made": ("_place", "tree.roots.get(namespace)", "tree.root(namespace)"),
    "an older epoch is like any other": ("_elsewhere", "is_older = ", "is_older = False and "),
    "another namespace need not have more": (
        "_elsewhere",
        ">= num_cached + tree.block_size",
        ">= num_cached > 0",
    ),
    "short goes before diverged": (
        "_cause_of",
        "if here.cached_token is not None:",
        "if here.cached_token is not None and key.num_tokens - here.num_tokens >= block_size:",
    ),
    "a raised epoch can be reached": ("explain", "and not is_stale", ""),
    "ghosts are not asked": ("explain", "if ghosts is not None:", "if False:"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_of_the_explanation_is_caught(name, monkeypatch):
    where, old, new = BUGS[name]
    PlantedBug(name, (explaining, where), edit=(old, new), seen_by="view").plant(monkeypatch)
    monkeypatch.setattr(caching, "explain", explaining.explain)  # the cache knows it by name
    with pytest.raises((AssertionError, CacheError, LookupError)):
        HUNT(WORLD(play_and_ask))()
