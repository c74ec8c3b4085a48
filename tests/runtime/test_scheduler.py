"""Which tokens a step computes: the budget, the chunk limit, who comes first."""

from __future__ import annotations

import pytest

from radixcache.tokens import num_tokens
from runtime.plan import StepPlan
from tests.support.engine_bench import EngineBench


def counts(plan: StepPlan) -> dict[str, int]:
    """Tokens that a plan computes of each request."""
    return {piece.request_id: num_tokens(piece.tokens) for piece in plan.slices}


def test_a_long_prefill_holds_up_no_decode():
    bench = EngineBench(num_blocks=400, max_running=3, max_step_tokens=8)
    bench.submit("a", [1, 2], max_tokens=60)
    bench.submit("b", [3], max_tokens=60)
    bench.step()
    bench.submit("long", range(90), max_tokens=2)
    while not bench.output("long"):
        told = {output.request_id: output.token_ids for output in bench.step()}
        assert len(told["a"]) == len(told["b"]) == 1
        assert counts(bench.plans[-1]) == {"a": 1, "b": 1, "long": 6}
    bench.run()


@pytest.mark.parametrize(("chunk", "most_at_once"), [(2, 4), (3, 3)])
def test_a_long_prefill_gets_on_while_all_others_decode_and_finish(chunk, most_at_once):
    bench = EngineBench(num_blocks=400, max_running=4, max_step_tokens=5, max_chunk_tokens=chunk)
    bench.submit("long", range(50), max_tokens=2)
    for index in range(90):
        bench.submit(f"r{index}", [60 + index % 30], max_tokens=1 + index % 3)
    at_once = 0
    while not bench.output("long"):
        ready = [s.request.request_id for s in bench.engine.scheduler.running]
        closing = [s.request.request_id for s in bench.engine.scheduler.closing]
        bench.step()
        assert {"long", *ready, *closing} <= counts(bench.plans[-1]).keys()
        at_once = max(at_once, len({*ready, *closing}))
    assert at_once == most_at_once
    bench.run()
    for index in range(90):
        assert bench.output(f"r{index}") == bench.expected(f"r{index}").tokens


def test_a_step_uses_its_budget_and_never_exceeds_it():
    bench = EngineBench(num_blocks=400, max_running=8, max_step_tokens=10)
    for first in range(6):
        bench.submit(f"r{first}", range(first, 15 + first), max_tokens=3)
    bench.run()
    totals = [sum(counts(plan).values()) for plan in bench.plans]
    assert max(totals) == 10
    assert totals[:9] == [10] * 9  # 6 · 15 tokens of prompt wait, so every step is full


def test_no_slice_exceeds_the_chunk_limit_and_the_rest_goes_to_others():
    bench = EngineBench(num_blocks=400, max_running=4, max_step_tokens=10, max_chunk_tokens=4)
    for first in range(3):
        bench.submit(f"r{first}", range(first, 9 + first), max_tokens=1)
    bench.step()
    assert counts(bench.plans[0]) == {"r0": 4, "r1": 4, "r2": 2}
    bench.run()
    assert max(n for plan in bench.plans for n in counts(plan).values()) == 4


def test_a_prompt_is_cut_where_the_budget_ends_and_drawn_from_once():
    bench = EngineBench(num_blocks=40, max_running=2, max_step_tokens=4)
    bench.submit("a", range(10), max_tokens=1)
    bench.run()
    slices = [piece for plan in bench.plans for piece in plan.slices]
    assert [(s.start, num_tokens(s.tokens)) for s in slices] == [(0, 4), (4, 4), (8, 2), (10, 1)]
    assert [bool(s.draws) for s in slices] == [False, False, True, False]


def test_first_come_first_served():
    bench = EngineBench(num_blocks=400, max_running=2, max_step_tokens=5)
    names = [f"r{index}" for index in range(9)]
    for index, name in enumerate(names):
        bench.submit(name, range(index, index + 7 - index % 4), max_tokens=2)
    bench.run()
    starts: dict[str, int] = {}
    for plan in bench.plans:
        for piece in plan.slices:
            starts.setdefault(piece.request_id, plan.step)
    assert list(starts) == names


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_room():
    bench = EngineBench(num_blocks=12)
    bench.submit("first", range(8), max_tokens=3)
    bench.submit("large", range(20, 30), max_tokens=1)
    bench.submit("small", [50], max_tokens=1)
    while bench.engine.has_work:
        bench.step()
        assert not bench.output("small") or bench.output("large")
    bench.check_idle()


def test_no_more_than_max_running_are_computed_together():
    bench = EngineBench(num_blocks=400, max_running=3)
    for first in range(10):
        bench.submit(f"r{first}", [first], max_tokens=4)
    while bench.engine.has_work:
        bench.step()
        assert bench.engine.stats().running <= 3
        drawing = [piece for piece in bench.plans[-1].slices if piece.draws]
        assert len(drawing) <= 3
    bench.check_idle()


def test_equal_prompts_of_one_step_are_computed_once():
    bench = EngineBench(num_blocks=40, block_size=2)
    for name in "abc":
        bench.submit(name, range(8), max_tokens=3)
    bench.step()
    assert counts(bench.plans[0]) == {"a": 8}
    bench.step()
    assert counts(bench.plans[1]) == {"a": 1, "b": 1, "c": 1}
    bench.run()
    assert bench.engine.stats().cached_tokens == 14
    assert bench.output("b") == bench.output("c") == bench.expected("a").tokens


def test_others_pass_a_request_that_waits_for_its_prefix():
    bench = EngineBench(num_blocks=60, max_running=3, max_step_tokens=6)
    bench.submit("a", range(16), max_tokens=1)
    bench.submit("same", [*range(14), 90], max_tokens=1)
    bench.submit("other", [50, 51], max_tokens=1)
    bench.step()
    bench.step()
    assert bench.waiting() == ["same", "other"]  # no budget was left
    bench.step()
    assert counts(bench.plans[-1]) == {"a": 4, "other": 2}
    bench.step()
    assert counts(bench.plans[-1])["same"] == 1
    bench.run()


def test_who_waits_for_a_prefix_computes_it_where_the_other_one_goes_away():
    bench = EngineBench(num_blocks=60, max_running=3, max_step_tokens=6)
    bench.submit("a", range(16), max_tokens=1)
    bench.submit("same", range(16), max_tokens=1)
    bench.step()
    bench.abort("a")
    bench.step()
    assert counts(bench.plans[-1]) == {"same": 6}
    assert bench.plans[-1].slices[0].start == 6
    bench.run()


def test_equal_prompts_within_a_block_are_computed_twice_and_kept_once():
    bench = EngineBench(num_blocks=40, block_size=2)
    for name in "ab":
        bench.submit(name, range(2), max_tokens=3)
    bench.step()
    assert counts(bench.plans[0]) == {"a": 2, "b": 2}
    stats = bench.engine.stats().cache
    assert (stats.twin_blocks, stats.num_pinned, stats.num_private) == (1, 1, 0)
    bench.run()
    assert bench.output("a") == bench.output("b") == bench.expected("a").tokens


def test_a_second_request_starts_where_the_first_one_is_by_now():
    bench = EngineBench(num_blocks=60, max_running=2, max_step_tokens=4)
    bench.submit("a", range(20), max_tokens=1)
    bench.step()
    bench.step()
    bench.abort("a")
    bench.submit("b", range(20), max_tokens=1)
    bench.step()
    assert bench.plans[-1].slices[0].start == 8
    bench.run()
