"""Replaying a trace: what is hit, against a second simulator, and with requests side by side."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from radixcache import LRU, InvalidTrace
from radixcache.errors import InvalidConfig
from radixcache.sim import Replay, Speed, Trace, TraceRequest, lru_curve, simulate
from radixcache.sim.roster import ROSTER
from tests.support.reference_simulator import random_paths, reference_hits

Path = Sequence[int]


def trace_of(paths: Sequence[Path], *, output_tokens: int = 0, every_s: float = 1.0) -> Trace:
    """A trace of blocks of 10 tokens, one request every so many seconds."""
    requests = [
        TraceRequest(
            arrival_s=place * every_s,
            prompt=array("i", path),
            answer=array("i"),
            prompt_tokens=10 * len(path),
            output_tokens=output_tokens,
        )
        for place, path in enumerate(paths)
    ]
    distinct = len({block for path in paths for block in path})
    return Trace(title="made", block_size=10, requests=requests, num_distinct=distinct)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "slru", "opt", "told-dead"])
@pytest.mark.parametrize("seed", range(4))
def test_a_replay_hits_what_a_second_simulator_hits(policy: str, seed: int) -> None:
    paths = random_paths(seed, requests=120)
    for capacity in (6, 9, 14, 25):
        expected = reference_hits(paths, policy, capacity)
        outcome = simulate(trace_of(paths), policy, capacity).outcome
        assert (outcome.hits, outcome.references) == (expected, sum(map(len, paths)))


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_tells_the_hits_of_lru_at_every_size(seed: int) -> None:
    paths = random_paths(seed, requests=120, branching=4)
    trace = trace_of(paths)
    curve = lru_curve(trace)
    for capacity in range(trace.longest, trace.num_distinct + 5, 4):
        assert curve.hits(capacity) == simulate(trace, "lru", capacity).outcome.hits
    assert curve.smallest(curve.best) <= trace.num_distinct
    assert curve.smallest(curve.best + 0.01) is None


@pytest.mark.parametrize("policy", sorted(ROSTER))
def test_no_policy_beats_the_optimum_and_the_cache_stays_whole(policy: str) -> None:
    trace = trace_of(random_paths(7, requests=150))
    best = simulate(trace, "opt", 12).outcome.hits
    replay = Replay(trace, ROSTER[policy](trace, 12), num_blocks=12)
    assert replay.run().hits <= best
    replay.cache.check()


def test_told_what_is_dead_lru_does_better() -> None:
    trace = trace_of(random_paths(1, requests=150))
    hits = [simulate(trace, policy, 12).outcome.hits for policy in ("lru", "told-dead", "opt")]
    assert hits == sorted(hits)
    assert hits[0] < hits[1]


def test_a_request_keeps_its_blocks_while_it_is_served() -> None:
    """Three requests of two blocks at once in a cache of four: the third one waits."""
    trace = trace_of([[0, 1], [2, 3], [4, 5]], output_tokens=10, every_s=0.0)
    alone = Replay(trace, LRU(), num_blocks=6).run()
    served = Replay(trace, LRU(), num_blocks=6, speed=Speed(decode_rate=1.0)).run()
    assert (alone.waited, alone.most_pinned) == (0, 3)
    assert (served.waited, served.most_pinned) == (1, 6)


def test_whoever_comes_later_does_not_overtake_one_that_waits() -> None:
    speed = Speed(decode_rate=1.0, prefill_rate=1e9)
    trace = trace_of([[0, 1, 2, 3], [4, 5, 6, 7], [0]], output_tokens=10, every_s=1.0)
    outcome = Replay(trace, LRU(), num_blocks=4, speed=speed).run()
    # The second waits for the first and evicts it; the third comes after it, and finds nothing.
    assert (outcome.waited, outcome.hits) == (2, 0)


def test_a_request_larger_than_the_cache_is_not_served_and_counts_as_missed() -> None:
    outcome = Replay(trace_of([[0, 1, 2], [0], [0]]), LRU(), num_blocks=2).run()
    assert (outcome.unserved, outcome.hits, outcome.references) == (1, 1, 5)


def test_the_replay_tells_how_far_it_is() -> None:
    told: list[int] = []
    Replay(trace_of([[0]] * 600), LRU(), num_blocks=2).run(told.append)
    assert told == [256, 512, 600]


def test_a_trace_without_requests_has_a_hit_rate_of_0() -> None:
    trace = trace_of([])
    assert simulate(trace, "opt", 4).outcome.hit_rate == lru_curve(trace).hit_rate(9) == 0


def test_what_can_not_be_simulated_is_refused() -> None:
    with pytest.raises(InvalidTrace, match="choose one of"):
        simulate(trace_of([[0]]), "best", 4)
    with pytest.raises(InvalidConfig, match="num_blocks"):
        simulate(trace_of([[0]]), "lru", -1)
    with pytest.raises(InvalidConfig, match="decode_rate"):
        Speed(decode_rate=0)
