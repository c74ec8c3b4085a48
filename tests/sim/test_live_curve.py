"""The curve while serving: exact where everything is watched, bounded, and blind to nothing."""

from __future__ import annotations

import pytest

from radixcache import InvalidConfig, InvariantViolation, Namespace, pack_tokens
from radixcache.curve import LiveCurve
from radixcache.sim import Trace, generate, lru_curve, traffic_of
from tests.sim.test_replay import trace_of
from tests.support.reference_simulator import random_paths

HERE = Namespace()


def watched(trace: Trace, **settings: int) -> LiveCurve:
    """A live curve that has seen a trace, in blocks of one token."""
    live = LiveCurve(block_size=1, **settings)
    for request in trace.requests:
        live.look_up(HERE, request.prompt.tobytes())
        if request.answer:
            live.touch(HERE, (request.prompt + request.answer).tobytes())
    live.check()
    return live


@pytest.mark.parametrize("seed", range(3))
def test_where_every_block_is_watched_the_curve_is_exact(seed: int) -> None:
    trace = trace_of(random_paths(seed, requests=150))
    live = watched(trace, max_samples=10_000)
    exact, estimate = lru_curve(trace), live.estimate()
    assert live.sampled_share == 1
    for size in (8, 16, 32, 64, 128):  # whole buckets
        assert estimate.hit_rate(size) == pytest.approx(exact.hit_rate(size))


def test_answers_are_used_but_not_asked_for() -> None:
    trace = generate(traffic_of("chat:sessions=15"), block_size=16)
    exact, estimate = lru_curve(trace), watched(trace, max_samples=10**6).estimate()
    assert estimate.references == trace.num_references
    for size in (512, 1024, 2048):
        assert estimate.hit_rate(size) == pytest.approx(exact.hit_rate(size))


def test_few_samples_come_close_and_close_for_every_seed() -> None:
    trace = generate(traffic_of("few-shot:questions=200,preambles=10"), block_size=16)
    exact = lru_curve(trace)
    for seed in range(3):
        live = watched(trace, max_samples=1000, seed=seed)
        assert live.sampled_share < 0.25
        estimate = live.estimate()
        for size in (1024, 2048, 4096):
            assert estimate.hit_rate(size) == pytest.approx(exact.hit_rate(size), abs=0.1)


def test_a_curve_is_moved_to_what_the_cache_found() -> None:
    live = LiveCurve(block_size=2)
    for _ in range(4):
        live.look_up(HERE, pack_tokens(range(8)), found_blocks=2)
    estimate = live.estimate()
    assert estimate.hit_rate(4) == pytest.approx(0.75)
    assert estimate.anchored(4).hit_rate(4) == pytest.approx(0.5)
    assert estimate.anchored(4).hit_rate(8) == pytest.approx(0.5)
    alone = LiveCurve(block_size=2)
    assert alone.estimate().anchored(4) == alone.estimate()


def test_what_was_long_ago_counts_less() -> None:
    live = LiveCurve(block_size=1, half_life_s=10.0)
    again = pack_tokens([1, 2])
    live.look_up(HERE, again, now=0.0)
    live.look_up(HERE, again, now=0.0)
    live.look_up(HERE, pack_tokens([3, 4]), now=10.0)
    estimate = live.estimate()
    assert estimate.references == 4
    assert estimate.hit_rate(4) == pytest.approx(0.25)  # one of the four hits' weight is left
    assert estimate.tokens_per_s == pytest.approx(0.4)


def test_namespaces_share_nothing_and_parts_of_blocks_count_for_nothing() -> None:
    live = LiveCurve(block_size=4)
    live.look_up(HERE, pack_tokens(range(7)))
    live.look_up(Namespace(salt="other"), pack_tokens(range(7)))
    live.look_up(HERE, pack_tokens(range(3)))
    assert live.estimate().references == 2
    assert live.estimate().hit_rate(100) == 0
    live.look_up(HERE, pack_tokens(range(4)))
    assert live.estimate().hit_rate(2) == pytest.approx(1 / 3)


def test_the_same_block_behind_another_prefix_is_another_block() -> None:
    live = LiveCurve(block_size=1)
    live.look_up(HERE, pack_tokens([1, 2]))
    live.look_up(HERE, pack_tokens([2, 1]))
    live.look_up(HERE, pack_tokens([3, 2]))
    assert live.estimate().hit_rate(100) == 0


def test_memory_stays_bounded_and_a_wrong_table_is_noticed() -> None:
    live = LiveCurve(block_size=1, max_samples=16)
    for begin in range(0, 2000, 10):
        live.look_up(HERE, pack_tokens(range(begin, begin + 10)))
        live.check()
    assert 0 < live.sampled_share < 0.1
    live._stamps.popitem()
    with pytest.raises(InvariantViolation, match="watched"):
        live.check()


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"max_samples": 0}, {"half_life_s": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match="above 0"):
        LiveCurve(**({"block_size": 1} | wrong))
