"""The policy that learns: LRU until it knows better, and better where blocks differ."""

from __future__ import annotations

import numpy as np
import pytest

from radixcache import (
    CacheConfig,
    InvalidConfig,
    InvariantViolation,
    Namespace,
    PrefixKey,
    Priority,
    Quota,
    RadixCache,
)
from radixcache.adaptive import AGES, CLASSES, Adaptive, age_of, hit_density
from radixcache.sim import Replay, simulate
from tests.sim.test_replay import trace_of
from tests.support.reference_simulator import random_paths


@pytest.mark.parametrize("seed", range(3))
def test_before_it_has_learned_anything_it_is_lru(seed: int) -> None:
    trace = trace_of(random_paths(seed, requests=120))
    replay = Replay(trace, Adaptive(learn_every=10**6), num_blocks=12)
    assert replay.run().hits == simulate(trace, "lru", 12).outcome.hits
    replay.cache.check()


def test_it_keeps_what_comes_back_before_what_never_does() -> None:
    """Short prompts recur after a while; between them come long ones, each a single time."""
    paths, fresh = [], 1000
    for turn in range(400):
        paths.append([turn % 12])
        for _ in range(3):
            paths.append(list(range(fresh, fresh + 8)))
            fresh += 8
    trace = trace_of(paths)
    policy = Adaptive(learn_every=64)
    learned = Replay(trace, policy, num_blocks=60).run()
    policy.check()
    assert simulate(trace, "lru", 60).outcome.hits == 0
    assert learned.hits > 0.5 * simulate(trace, "opt", 60).outcome.hits


def test_it_is_no_worse_than_lru_where_nothing_can_be_told_apart() -> None:
    trace = trace_of(random_paths(3, requests=1500, branching=5))
    lru = simulate(trace, "lru", 40).outcome.hit_rate
    learned = Replay(trace, Adaptive(learn_every=32), num_blocks=40).run().hit_rate
    assert learned > lru - 0.01


def test_the_worth_of_a_block_is_hits_for_the_time_it_is_kept() -> None:
    reused, waiting = np.zeros((CLASSES, AGES)), np.zeros((CLASSES, AGES))
    reused[0, age_of(30)] = 10  # all come back, after 30
    reused[1, age_of(300)] = 10  # all come back, after 300
    reused[2, age_of(30)], waiting[2, age_of(300)] = 5, 5  # half of them do
    soon, late, half = hit_density(reused, waiting)[:3]
    assert soon[0] == pytest.approx(1 / 30, rel=0.3)
    assert late[0] == pytest.approx(1 / 300, rel=0.3)
    assert late[0] < half[0] < soon[0]
    assert half[age_of(60)] == 0  # whoever is not back by then never comes
    assert soon[age_of(20)] > soon[0]  # the wait is nearly over


def test_its_memory_is_bounded_and_a_wrong_note_is_noticed() -> None:
    policy = Adaptive(max_samples=8)
    cache = RadixCache(CacheConfig(num_blocks=64, block_size=1), policy=policy)
    for begin in range(0, 4000, 40):
        cache.release(cache.acquire(PrefixKey.of(list(range(begin, begin + 40)))))
        policy.check()
    policy._seen.popitem()
    with pytest.raises(InvariantViolation, match="watched"):
        policy.check()


def test_shares_of_namespaces_hold_under_it() -> None:
    cache = RadixCache(CacheConfig(num_blocks=20, block_size=1), policy=Adaptive(learn_every=4))
    guarded = Namespace(salt="guarded")
    cache.set_quota(guarded, Quota(soft_limit=6, hard_limit=10))
    for turn in range(60):
        for namespace, width in ((guarded, 5), (Namespace(), 9)):
            tokens = [turn % 7 * 100 + place for place in range(width)]
            lease = cache.acquire(PrefixKey.of(tokens, namespace))
            cache.commit(lease, len(tokens))
            cache.release(lease)
            cache.check()
    assert cache.namespaces()[guarded].num_evictable >= 6


def test_priorities_have_no_order_that_learns_within() -> None:
    with pytest.raises(InvalidConfig, match="learns"):
        Priority(Adaptive())
