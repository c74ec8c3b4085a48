"""Where blocks run out: the youngest gives way, comes back with a hit, and says the same."""

from __future__ import annotations

import pytest

from tests.support.engine_bench import EngineBench


def names(bench: EngineBench) -> tuple[str, str]:
    """Who runs and who waits, in order, a letter each."""
    scheduler = bench.engine.scheduler
    running, waiting = (
        "".join(s.request.request_id for s in group)
        for group in (scheduler.running, scheduler.waiting)
    )
    return running, waiting


def step_until_preempted(bench: EngineBench, times: int = 1) -> None:
    while bench.engine.stats().preemptions < times:
        bench.step()


def crowded(num_blocks: int = 16) -> EngineBench:
    """Three that run and one that waits, in a pool that they outgrow."""
    bench = EngineBench(num_blocks=num_blocks, max_running=3)
    for first, name in enumerate("abc"):
        bench.submit(name, [10 * first + i for i in range(4)], max_tokens=7)
    bench.submit("d", [90], max_tokens=2)
    bench.step()
    assert names(bench) == ("abc", "d")
    return bench


def test_the_youngest_gives_way_and_waits_in_front():
    bench = crowded()
    step_until_preempted(bench)
    assert names(bench) == ("ab", "cd")
    bench.run()


def test_those_that_gave_way_come_back_in_their_order():
    bench = crowded(num_blocks=12)
    bench.step()
    assert names(bench) == ("ab", "cd")
    step_until_preempted(bench, times=2)
    assert names(bench) == ("a", "bcd")
    while bench.engine.has_work:
        bench.step()
        running, waiting = names(bench)
        assert list(running + waiting) == sorted(running + waiting)
    assert bench.engine.stats().preemptions == 3
    bench.check_idle()


def test_the_output_is_that_of_a_request_alone():
    for num_blocks in range(12, 40):
        bench = crowded(num_blocks)
        bench.run()
        for name in "abcd":
            assert bench.output(name) == bench.expected(name).tokens
            assert bench.reason(name) == "length"
        assert (bench.engine.stats().preemptions > 0) == (num_blocks < 30)


def test_it_resumes_with_a_hit():
    bench = EngineBench(num_blocks=16)
    bench.submit("a", [1, 2], max_tokens=4)
    bench.submit("b", range(20, 30), max_tokens=5)
    step_until_preempted(bench)
    cached, num_plans = bench.num_cached(bench.tokens("b")), len(bench.plans)
    assert cached >= 10
    bench.run()
    later = [piece for plan in bench.plans[num_plans:] for piece in plan.slices]
    start = next(piece.start for piece in later if piece.request_id == "b")
    assert start >= cached - 3  # "a" has taken the rest meanwhile
    assert bench.output("b") == bench.expected("b").tokens


def test_its_usage_tells_of_the_first_admission_only():
    bench = crowded()
    bench.run()
    assert bench.engine.stats().preemptions
    for name in "abcd":
        usage = bench.news[name][-1].usage
        assert (usage.cached_tokens, usage.computed_tokens) == (0, usage.prompt_tokens)
    assert bench.engine.stats().cached_tokens == 0
    assert bench.engine.stats().cache.hit_tokens > 0


def test_one_that_gave_way_gets_each_token_told_once():
    bench = crowded()
    bench.run()
    for name in "abcd":
        told = [output.usage.completion_tokens for output in bench.news[name] if output.token_ids]
        assert told == list(range(1, len(told) + 1))


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("max_running", [1, 2, 5])
def test_a_pool_of_exactly_the_longest_request_serves_any_number(block_size, max_running):
    bench = EngineBench(
        num_blocks=4,
        block_size=block_size,
        max_running=max_running,
        max_step_tokens=max_running + 1,
    )
    longest = 4 * block_size
    for first in range(6):
        bench.submit(f"r{first}", range(first, first + 1 + first % (longest - 1)))
    steps = bench.run(max_steps=6 * (longest + 1))
    assert steps
    for first in range(6):
        name = f"r{first}"
        assert (bench.output(name), bench.reason(name)) == bench.expected(name)
        assert len(bench.tokens(name)) == longest


def test_the_oldest_never_gives_way():
    bench = crowded(num_blocks=12)
    told = 1
    while bench.reason("a") is None:
        bench.step()
        assert len(bench.output("a")) == told + 1
        told += 1
    bench.run()
