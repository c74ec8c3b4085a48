"""Random histories in which time passes: holds, priorities that end, quotas, under a fake clock.

The machine of test_state_machine.py with these verbs beside; the same three eyes look after every
step, and the reference foretells also who is guarded, held, or worth more, and until when.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from radixcache import (
    POLICIES,
    CacheConfig,
    Hold,
    InvalidConfig,
    PrefixKey,
    Quota,
    RadixCache,
    Retention,
)
from tests.core.test_state_machine import CacheMachine
from tests.support.histories import BOUNDED_KEEPING, LONG, STRESS
from tests.support.reference_keeping import KeepingReference, ReferenceHold
from tests.support.strategies import NAMESPACES, Prompt, prompts, small, token_runs

DURATIONS = (None, 1.0, 2.0, 5.0)


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def retentions() -> st.SearchStrategy[Retention]:
    """Ranges over the first few tokens; many to the end."""
    return st.builds(
        lambda start, length, priority, duration: Retention(
            priority=priority,
            start=start,
            end=start + length if length else None,
            duration_s=duration,
        ),
        st.sampled_from((0, 0, 0, 1, 2, 3, 4)),
        st.sampled_from((0, 0, 0, 1, 2, 3, 5)),
        st.sampled_from((1, 2)),
        st.sampled_from(DURATIONS),
    )


def quotas() -> st.SearchStrategy[Quota | None]:
    """Shares and limits of a few blocks, or none."""
    pairs = ((0, 2), (1, 2), (2, None), (3, None), (2, 4), (4, 6), (0, None))
    return st.sampled_from((None, *(Quota(soft_limit=s, hard_limit=h) for s, h in pairs)))


class KeepingMachine(CacheMachine):
    """Two caches side by side, slots, and a clock that both read."""

    policy = "priority"

    @initialize()
    def begin_time(self) -> None:
        self.held: list[tuple[Hold, ReferenceHold | None]] = []
        self.ranges: tuple[Retention, ...] = ()

    def new_cache(self, config: CacheConfig) -> RadixCache:
        self.clock = FakeClock()
        return RadixCache(config, policy=POLICIES[self.policy](), clock=self.clock)

    def new_reference(self, config: CacheConfig) -> KeepingReference:
        return KeepingReference(config, clock=self.clock, policy=self.policy)

    def acquire_from(self, cache: Any, *prompt: Any) -> Any:
        """Ask with the ranges that were chosen last."""
        return cache.acquire(*prompt, retentions=self.ranges)

    @rule(ranges=st.lists(retentions(), min_size=0, max_size=2).map(tuple))
    def choose_ranges(self, ranges: tuple[Retention, ...]) -> None:
        """From now on, requests say what their tokens are worth."""
        self.ranges = ranges

    @rule(prompt=prompts(), ranges=st.lists(retentions(), min_size=1, max_size=2).map(tuple))
    def serve_with_ranges(self, prompt: Prompt, ranges: tuple[Retention, ...]) -> None:
        self.ranges = ranges
        sequence = self.begin(*self.prompt(prompt))
        if sequence:
            self.complete(sequence)

    @rule(
        prompt=prompts(),
        retention=retentions(),
        seconds=st.sampled_from((0.5, 1.0, 3.0)),
        more=token_runs(),
    )
    def branch_for_a_while(
        self, prompt: Prompt, retention: Retention, seconds: float, more: tuple[int, ...]
    ) -> None:
        """Time passes while two branches stand on what is worth something."""
        self.ranges = (retention,)
        sequence = self.begin(*self.prompt(prompt))
        if sequence:
            branch = self.branch(sequence)
            self.grow(branch, more)
            self.let_time_pass(seconds, is_noticed=True)
            for running in (sequence, branch):
                if running in self.running:
                    self.complete(running)

    @rule(which=small(2), share=small(9), spare=small(4), prompts=st.lists(prompts(), max_size=4))
    def flood(self, which: int, share: int, spare: int, prompts: list[Prompt]) -> None:
        """A namespace with a share, perhaps with a limit, and requests of its own and of others."""
        share = min(share, self.cache.config.num_blocks)
        limit = None if spare == 4 else share + spare
        self.set_quota(which, Quota(soft_limit=share, hard_limit=limit))
        for prompt in prompts:
            sequence = self.begin(*self.prompt(prompt))
            if sequence:
                self.complete(sequence)

    @rule(seconds=st.sampled_from((0.5, 1.0, 1.5, 3.0)), is_noticed=st.booleans())
    def let_time_pass(self, seconds: float, is_noticed: bool) -> None:
        """Noticed at once, or not before somebody wants room."""
        self.clock.now += seconds
        if is_noticed:
            self.both(self.cache.expire, self.reference.expire)

    @rule(prompt=prompts(), duration=st.sampled_from(DURATIONS))
    def hold(self, prompt: Prompt, duration: float | None) -> None:
        namespace, tokens = self.prompt(prompt)
        if len(self.held) > 3:
            self.end_hold(0)
        hold, twin = self.both(
            lambda: self.cache.retain(PrefixKey.of(list(tokens), namespace), duration),
            lambda: self.reference.retain(namespace, list(tokens), duration),
        )
        if self.has_reference:
            assert hold.num_tokens == len(twin.prefixes) * self.cache.config.block_size
        self.held.append((hold, twin))

    @rule(which=small(3))
    def end_hold(self, which: int) -> None:
        """Before its time, or long after."""
        if self.held:
            hold, twin = self.held.pop(which % len(self.held))
            self.both(
                lambda: self.cache.end_hold(hold),
                lambda: self.reference.end_hold(twin),
            )
            self.cache.end_hold(hold)  # once more is nothing

    @rule(prompt=prompts(), start=small(4))
    def abandon(self, prompt: Prompt, start: int) -> None:
        """Somebody says that nobody comes back."""
        namespace, tokens = self.prompt(prompt)
        marked, expected = self.both(
            lambda: self.cache.abandon(PrefixKey.of(list(tokens), namespace), start=start),
            lambda: self.reference.abandon(namespace, list(tokens), start),
        )
        assert not self.has_reference or marked == expected

    @rule(which=small(2), quota=quotas())
    def set_quota(self, which: int, quota: Quota | None) -> None:
        namespace = self.latest(NAMESPACES[which])
        others = [q.soft_limit for n, q in self.reference.quotas.items() if n != namespace]
        fits = sum(others) + (quota.soft_limit if quota else 0) <= self.cache.config.num_blocks
        try:
            freed, expected = self.both(
                lambda: self.cache.set_quota(namespace, quota),
                lambda: self.reference.set_quota(namespace, quota) if fits else None,
            )
        except InvalidConfig:
            assert not self.has_reference or not fits
        else:
            assert not self.has_reference or (fits and freed == expected)


class TestAnyHistoryInWhichTimePasses(KeepingMachine.TestCase):
    settings = LONG if STRESS else BOUNDED_KEEPING


class LRUKeepingMachine(KeepingMachine):
    """Holds and quotas under the policy that is the default."""

    policy = "lru"


class TestAnyHistoryInWhichTimePassesUnderLRU(LRUKeepingMachine.TestCase):
    settings = LONG if STRESS else BOUNDED_KEEPING
