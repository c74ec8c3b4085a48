"""Random histories of the cache, watched by three independent eyes after every step.

check      `RadixCache.check()`: the invariants, derived anew from the cache's own parts
reference  a second cache of plain dicts foretells every answer, count and victim
content    every slot that a lease or a match may read holds exactly the tokens it stands for

The machine plays an honest runtime: a sequence knows how many of its tokens are computed, computes
some more of them at a time, and commits no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from radixcache import (
    DEFAULT_NAMESPACE,
    POLICIES,
    BlockCopy,
    CacheConfig,
    InvalidLease,
    Lease,
    Match,
    Namespace,
    OutOfBlocks,
    PrefixKey,
    RadixCache,
    StaleEpoch,
    pack_tokens,
    unpack_tokens,
)
from tests.support.content_oracle import ContentOracle
from tests.support.histories import BOUNDED, LONG, STRESS
from tests.support.reference_cache import NoRoom, ReferenceCache, ReferenceLease
from tests.support.strategies import NAMESPACES, Prompt, configs, prompts, small, token_runs

EYES = frozenset({"check", "reference", "content"})
MAX_SEQUENCES = 5
FIRST_PROMPT = (0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1)


class Running:
    """A sequence as the runtime knows it."""

    def __init__(self, lease: Lease, twin: ReferenceLease | None, num_computed: int) -> None:
        self.lease = lease
        self.twin = twin
        self.num_computed = num_computed


class Refused(NamedTuple):
    """The numbers with which a call was refused."""

    needed: int
    free: int
    evictable: int


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or how it is refused."""
    try:
        return call()
    except StaleEpoch:
        return StaleEpoch
    except OutOfBlocks as error:
        return Refused(error.needed, error.free, error.evictable)
    except NoRoom as refused:
        return Refused(*refused.args)


class CacheMachine(RuleBasedStateMachine):
    """Two caches side by side, and the slots of the pool."""

    eyes = EYES
    policy = "lru"

    @initialize(config=configs())
    def start(self, config: CacheConfig) -> None:
        self.cache = self.new_cache(config)
        self.reference = self.new_reference(config)
        self.store = ContentOracle(num_blocks=config.num_blocks, block_size=config.block_size)
        self.running: list[Running] = []
        self.current: dict[Namespace, Namespace] = {}
        self.longest = max(3, config.num_blocks * config.block_size * 2 // 5)
        self.has_reference = "reference" in self.eyes
        self.past: list[tuple[Namespace, tuple[int, ...]]] = [(DEFAULT_NAMESPACE, FIRST_PROMPT)]

    def new_cache(self, config: CacheConfig) -> RadixCache:
        """The cache that this machine plays with."""
        return RadixCache(config, policy=POLICIES[self.policy]())

    def new_reference(self, config: CacheConfig) -> ReferenceCache:
        """The reference that foretells it."""
        return ReferenceCache(config, policy=self.policy)

    def both(self, call: Callable[[], Any], foretell: Callable[[], Any]) -> tuple[Any, Any]:
        """Call the cache, and the reference if that eye is open; refusals must be the same."""
        got = attempt(call)
        if not self.has_reference:
            return got, None
        expected = attempt(foretell)
        if Refused in (type(got), type(expected)):
            assert got == expected, f"{got}, but the reference says {expected}"
        return got, expected

    def take(self, which: int) -> Running:
        return self.running[which % len(self.running)]

    def begin(self, namespace: Namespace, tokens: tuple[int, ...]) -> Running | None:
        lease, twin = self.both(
            lambda: self.acquire_from(self.cache, PrefixKey.of(list(tokens), namespace)),
            lambda: self.acquire_from(self.reference, namespace, list(tokens)),
        )
        if isinstance(lease, Refused):
            self.everything_holds()
            if self.running:  # preempt the oldest, as a runtime would, so that things move on
                self.end(self.running[0])
            return None
        self.store.owe([lease.copy_owed] if lease.copy_owed else [])
        self.running.append(Running(lease, twin, lease.num_cached))
        return self.running[-1]

    def acquire_from(self, cache: Any, *prompt: Any) -> Any:
        """How this machine asks for a prompt."""
        return cache.acquire(*prompt)

    def grow(self, sequence: Running, tokens: tuple[int, ...]) -> None:
        lease = sequence.lease
        tokens = tokens[: max(1, 2 * self.longest - lease.num_tokens)]
        before = lease.block_table.tolist()
        copies, expected = self.both(
            lambda: self.cache.append(lease, pack_tokens(tokens)),
            lambda: self.reference.append(sequence.twin, list(tokens)),
        )
        if isinstance(copies, Refused):
            return
        if self.has_reference:
            last = len(before) - 1
            owed = [BlockCopy(before[last], lease.block_table[last], n) for n in expected]
            assert list(copies) == owed
        self.store.owe(copies)

    def compute(self, sequence: Running, num_tokens: int = 99) -> None:
        """Compute the next tokens, all of them unless told."""
        start = sequence.num_computed
        sequence.num_computed = min(start + num_tokens, sequence.lease.num_tokens)
        self.store.compute(sequence.lease, start, sequence.num_computed)

    def commit(self, sequence: Running, num_tokens: int) -> None:
        done, expected = self.both(
            lambda: self.cache.commit(sequence.lease, num_tokens),
            lambda: self.reference.commit(sequence.twin, num_tokens),
        )
        if self.has_reference:
            assert (done.num_published, done.num_twins) == expected

    def end(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.both(
            lambda: self.cache.release(sequence.lease),
            lambda: self.reference.release(sequence.twin),
        )

    def complete(self, sequence: Running) -> None:
        """All that is left of a request: compute, publish, let go."""
        self.compute(sequence)
        self.commit(sequence, sequence.lease.num_tokens)
        self.everything_holds()
        self.end(sequence)

    def branch(self, sequence: Running) -> Running:
        lease, twin = self.both(
            lambda: self.cache.fork(sequence.lease),
            lambda: self.reference.fork(sequence.twin),
        )
        self.running.append(Running(lease, twin, sequence.num_computed))
        return self.running[-1]

    has_room = precondition(lambda self: len(self.running) < MAX_SEQUENCES)
    has_sequence = precondition(lambda self: bool(self.running))

    def prompt(self, prompt: Prompt) -> tuple[Namespace, tuple[int, ...]]:
        """A new prompt, mostly one that continues or leaves a sequence of before."""
        namespace, tokens = self.past[prompt.which % len(self.past)]
        tokens = (tokens[: prompt.keep] + prompt.more)[: self.longest]
        namespace = self.latest(prompt.namespace or namespace)
        self.past = [*self.past[-5:], (namespace, tokens)]
        return namespace, tokens

    @has_room
    @rule(prompt=prompts())
    def acquire(self, prompt: Prompt) -> None:
        self.begin(*self.prompt(prompt))

    @has_room
    @rule(prompt=prompts(), more=token_runs())
    def acquire_twice(self, prompt: Prompt, more: tuple[int, ...]) -> None:
        """Prompts that share: whoever commits second has twins of the other's blocks."""
        namespace, tokens = self.prompt(prompt)
        self.begin(namespace, tokens)
        self.begin(namespace, tokens + more)

    @rule(first=prompts(), second=prompts())
    def serve(self, first: Prompt, second: Prompt) -> None:
        """Two whole requests, one after the other."""
        for prompt in (first, second):
            sequence = self.begin(*self.prompt(prompt))
            if sequence:
                self.complete(sequence)

    @rule(prompt=prompts())
    def abandon(self, prompt: Prompt) -> None:
        """A request that ends before anything is computed has still used its prefix."""
        sequence = self.begin(*self.prompt(prompt))
        if sequence:
            self.end(sequence)

    @has_sequence
    @rule(which=small(7), tokens=token_runs())
    def append(self, which: int, tokens: tuple[int, ...]) -> None:
        self.grow(self.take(which), tokens)

    @has_sequence
    @rule(which=small(7), num_tokens=small(6))
    def compute_some(self, which: int, num_tokens: int) -> None:
        self.compute(self.take(which), num_tokens)

    @has_sequence
    @rule(which=small(7), held_back=small(2))
    def commit_some(self, which: int, held_back: int) -> None:
        sequence = self.take(which)
        self.commit(sequence, max(0, sequence.num_computed - held_back))

    @has_sequence
    @rule(which=small(7))
    def compute_and_commit_all(self, which: int) -> None:
        sequence = self.take(which)
        self.compute(sequence)
        self.commit(sequence, sequence.lease.num_tokens)

    @has_sequence
    @rule(which=small(7), num_tokens=small(5))
    def truncate(self, which: int, num_tokens: int) -> None:
        sequence = self.take(which)
        keep = max(sequence.lease.num_committed, sequence.lease.num_tokens - num_tokens)
        self.both(
            lambda: self.cache.truncate(sequence.lease, keep),
            lambda: self.reference.truncate(sequence.twin, keep),
        )
        sequence.num_computed = min(sequence.num_computed, keep)

    @has_sequence
    @rule(which=small(7))
    def finish(self, which: int) -> None:
        self.complete(self.take(which))

    @has_sequence
    @rule(which=small(7), tokens=token_runs())
    def decode(self, which: int, tokens: tuple[int, ...]) -> None:
        """A step of a runtime: compute what is there, publish it, make room for what comes."""
        sequence = self.take(which)
        self.compute(sequence)
        self.commit(sequence, sequence.lease.num_tokens)
        self.grow(sequence, tokens)

    @has_sequence
    @has_room
    @rule(which=small(7), computed=small(9), left=token_runs(), right=token_runs())
    def fork(
        self, which: int, computed: int, left: tuple[int, ...], right: tuple[int, ...]
    ) -> None:
        """Two branches: each goes its own way, or stays where it is."""
        sequence = self.take(which)
        self.compute(sequence, computed)
        branch = self.branch(sequence)
        self.everything_holds()
        self.grow(sequence, left)
        self.grow(branch, right)

    @has_sequence
    @has_room
    @rule(which=small(7), tokens=token_runs())
    def fork_and_finish(self, which: int, tokens: tuple[int, ...]) -> None:
        """One branch publishes and leaves; the other still holds those blocks as its own."""
        sequence = self.take(which)
        self.grow(sequence, tokens)
        self.branch(sequence)
        self.complete(sequence)

    @has_sequence
    @rule(which=small(7))
    def release(self, which: int) -> None:
        self.end(self.take(which))

    @rule()
    def let_all_go(self) -> None:
        """At idle nothing is lost: every block is free or evictable."""
        for sequence in list(self.running):
            self.end(sequence)
        stats = self.cache.stats()
        held = stats.num_pinned if stats.num_holds else 0
        assert stats.num_free + stats.num_evictable + held == stats.num_blocks

    @rule(prompt=prompts())
    def touch(self, prompt: Prompt) -> None:
        namespace, tokens = self.prompt(prompt)
        touched = self.cache.touch(PrefixKey.of(tokens, namespace))
        assert touched == self.reference.touch(namespace, tokens) or not self.has_reference

    @rule(num_blocks=st.sampled_from((1, 2, 3, 1, 2, 3, 5, 99)))
    def evict(self, num_blocks: int) -> None:
        freed, expected = self.both(
            lambda: self.cache.evict(num_blocks),
            lambda: self.reference.evict(num_blocks),
        )
        assert not self.has_reference or freed == expected

    @rule(which=small(3), is_dropped=st.booleans())
    def raise_an_epoch(self, which: int, is_dropped: bool) -> None:
        """From now on nothing of the namespace is found; its leases go on."""
        old = self.latest(NAMESPACES[which % len(NAMESPACES)])
        new = self.cache.raise_epoch(old)
        assert new.epoch == old.epoch + 1
        self.current[structs.replace(old, epoch=0)] = new
        self.reference.raise_epoch(old, new)
        if is_dropped:
            freed, expected = self.cache.drop(old), self.reference.drop(old)
            assert not self.has_reference or freed == expected
        assert attempt(lambda: self.cache.acquire(PrefixKey.of([0], old))) is StaleEpoch

    @rule(which=small(3))
    def drop(self, which: int) -> None:
        namespace = self.latest(NAMESPACES[which % len(NAMESPACES)])
        freed, expected = self.both(
            lambda: self.cache.drop(namespace),
            lambda: self.reference.drop(namespace),
        )
        assert not self.has_reference or freed == expected

    def latest(self, namespace: Namespace) -> Namespace:
        """The namespace at its present epoch."""
        return self.current.get(structs.replace(namespace, epoch=0), namespace)

    @rule(prompt=prompts())
    def match(self, prompt: Prompt) -> None:
        namespace, tokens = self.prompt(prompt)
        match = self.cache.match(PrefixKey.of(list(tokens), namespace))
        hits = self.reference.hits(namespace, list(tokens), len(tokens))
        size = self.cache.config.block_size
        assert not self.has_reference or match.num_tokens == len(hits) * size
        self.check_content(namespace, list(tokens), match)

    @has_sequence
    @rule(which=small(7))
    def ask_for_the_impossible(self, which: int) -> None:
        lease = self.take(which).lease
        for call in (
            lambda: self.cache.commit(lease, lease.num_tokens + 1),
            lambda: self.cache.truncate(lease, lease.num_tokens + 1),
            lambda: self.cache.truncate(lease, lease.num_committed - 1),
        ):
            with pytest.raises(InvalidLease):
                call()

    def check_content(self, namespace: Namespace, tokens: list[int], match: Match) -> None:
        if "content" in self.eyes:
            self.store.check_match(namespace, tokens, match)

    @invariant()
    def everything_holds(self) -> None:
        if "check" in self.eyes:
            self.cache.check()
        if self.has_reference:
            self.reference.compare(self.cache, [(s.lease, s.twin) for s in self.running])
        if "content" in self.eyes:
            for sequence in self.running:
                self.store.check_lease(sequence.lease, sequence.num_computed)
            self.check_every_match()

    def check_every_match(self) -> None:
        """Whatever is in the tree can be matched, and read."""
        paths: dict[int | None, list[int]] = {None: []}
        for node in self.cache.view().nodes:
            tokens = paths[node.node_id] = paths[node.parent] + unpack_tokens(node.tokens)
            match = self.cache.match(PrefixKey.of(tokens, node.namespace))
            if node.namespace != self.latest(node.namespace):
                assert match.num_tokens == 0
                continue
            assert match.num_tokens == len(tokens), f"{tokens} is in the tree, but not matched"
            self.check_content(node.namespace, tokens, match)


class TestAnyHistoryAgreesWithTheReferenceAndHoldsTheRightContent(CacheMachine.TestCase):
    settings = LONG if STRESS else BOUNDED
