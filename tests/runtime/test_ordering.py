"""Orderings of admission: who goes first, who is never kept waiting, and what that does to hits."""

from __future__ import annotations

import random

import pytest

from radixcache import Namespace
from runtime.config import EngineConfig
from runtime.errors import InvalidSetting
from runtime.scheduler.ordering import ORDERINGS
from tests.support.engine_bench import EngineBench


def one_by_one(ordering: str, **settings: object) -> EngineBench:
    """An engine that runs one sequence at a time, so that order is all there is to see."""
    sizes = {"num_blocks": 64, "max_running": 1, "max_step_tokens": 64} | settings
    return EngineBench(ordering=ordering, **sizes)


def order_of_admission(bench: EngineBench) -> str:
    bench.run()
    names = [piece.request_id for plan in bench.plans for piece in plan.slices]
    return "".join(dict.fromkeys(names))


def test_first_come_is_first_served():
    bench = one_by_one("fcfs")
    for name, first in zip("abc", (7, 1, 5), strict=True):
        bench.submit(name, [first, 2, 3], max_tokens=1, priority=-first)
    assert order_of_admission(bench) == "abc"


def test_the_longest_cached_prefix_goes_first():
    bench = one_by_one("longest_prefix")
    bench.submit("warm", range(8), max_tokens=1)
    bench.run()
    bench.submit("a", [50, 51], max_tokens=1)
    bench.submit("b", [*range(3), 60], max_tokens=1)
    bench.submit("c", [*range(7), 60], max_tokens=1)
    bench.submit("d", [*range(7), 61], max_tokens=1)
    assert order_of_admission(bench).removeprefix("warm") == "cdba"


def test_depth_first_finishes_a_subtree_before_it_leaves_it():
    bench = one_by_one("depth_first")
    for name, prompt in {
        "a": [1, 1, 1],
        "b": [2, 1, 1],
        "c": [1, 1, 2],
        "d": [2, 1, 2],
        "e": [1, 2, 1],
    }.items():
        bench.submit(name, prompt, max_tokens=1)
    assert order_of_admission(bench) == "acebd"


def test_depth_first_goes_on_beside_the_last_admitted_when_others_come():
    bench = one_by_one("depth_first")
    bench.submit("a", [5, 1], max_tokens=1)
    bench.submit("b", [7, 1], max_tokens=1)
    bench.step()
    bench.submit("c", [1, 1], max_tokens=1)
    bench.submit("d", [5, 2], max_tokens=1)
    assert order_of_admission(bench) == "adbc"


def test_the_lowest_priority_number_goes_first_and_the_highest_gives_way_first():
    bench = EngineBench(num_blocks=12, ordering="priority", max_running=2)
    bench.submit("low", [1, 2, 3, 4], max_tokens=6, priority=5)
    bench.step()
    bench.submit("high", [5, 6, 7, 8], max_tokens=6, priority=-5)
    bench.submit("middle", [9, 8], max_tokens=1)
    bench.step()
    while not bench.engine.stats().preemptions:
        bench.step()
    assert "low" in bench.waiting()
    bench.run()
    first = {name: bench.reason(name) for name in ("low", "high", "middle")}
    assert set(first.values()) == {"length"}
    assert bench.output("low") == bench.expected("low").tokens


@pytest.mark.parametrize("ordering", [name for name in ORDERINGS if name != "fcfs"])
def test_nobody_is_overtaken_more_often_than_the_limit(ordering: str):
    """Every ordering prefers those that came later, and would keep the first one to the last."""
    bench = one_by_one(ordering, max_overtaken=5)
    bench.submit("warm", [1, 1, 1, 1], max_tokens=1, priority=-1)
    bench.run()
    bench.submit("unlucky", [9, 9], max_tokens=1, priority=9)
    for count in range(20):
        bench.submit(f"lucky{count}", [1, 1, 1, count], max_tokens=1)
    bench.run()
    admitted = [piece.request_id for plan in bench.plans for piece in plan.slices]
    order = list(dict.fromkeys(admitted))
    assert order.index("unlucky") == 1 + 5


def test_nobody_is_overtaken_more_often_than_the_limit_within_one_step():
    bench = EngineBench(num_blocks=64, ordering="longest_prefix", max_overtaken=2)
    bench.submit("warm", [1, 1, 1, 1], max_tokens=1)
    bench.run()
    bench.submit("unlucky", [9, 9], max_tokens=1)
    for count in range(6):
        bench.submit(f"lucky{count}", [1, 1, 1, count], max_tokens=1)
    bench.step()
    names = [piece.request_id for piece in bench.plans[-1].slices]
    assert names.index("unlucky") == 2
    bench.run()


def test_who_was_overtaken_too_often_does_not_give_way_to_those_that_come_after():
    """Or a stream of urgent requests would end each of its turns after a token."""
    bench = EngineBench(num_blocks=12, ordering="priority", max_running=2, max_overtaken=2)
    bench.submit("low", [1, 2, 3, 4], max_tokens=8, priority=5)
    count = 0
    while bench.reason("low") is None:
        while len(bench.waiting()) < 3:
            bench.submit(f"high{count}", [5, 6, 7, count], max_tokens=6)
            count += 1
        bench.step()
    assert count <= 6
    bench.run()


def test_a_prefix_is_never_waited_for_across_namespaces():
    """Or the time to the first token would tell one tenant what another is asking."""
    bench = EngineBench(num_blocks=64, max_running=3, max_step_tokens=64)
    bench.submit("a", range(20), namespace=Namespace(salt="a"), max_tokens=1)
    bench.submit("b", range(20), namespace=Namespace(salt="b"), max_tokens=1)
    bench.step()
    assert {piece.request_id for piece in bench.plans[0].slices} == {"a", "b"}
    bench.run()


def test_running_sequences_keep_room_to_grow():
    """With a reserve the second prompt waits; without, it is let in and somebody is preempted."""
    preemptions = {}
    for watermark in (0.0, 0.4):
        bench = EngineBench(num_blocks=16, max_running=2, watermark=watermark)
        bench.submit("a", range(6), max_tokens=8)
        bench.submit("b", range(20, 28), max_tokens=6)
        bench.run()
        preemptions[watermark] = bench.engine.stats().preemptions
        for name in "ab":
            assert bench.output(name) == bench.expected(name).tokens
    assert preemptions[0.0] > 0
    assert preemptions[0.4] == 0


def test_what_a_prompt_finds_is_no_room_to_grow_into():
    """It is evictable until the prompt is admitted, and in use from then on."""
    bench = EngineBench(num_blocks=16, max_running=2, watermark=0.4)
    bench.submit("warm", range(20, 28), max_tokens=1)
    bench.run()
    bench.submit("a", range(4), max_tokens=10)
    bench.step()
    bench.submit("b", [*range(20, 28), 30], max_tokens=5)
    bench.step()
    assert bench.waiting() == ["b"]
    bench.run()
    assert bench.engine.stats().preemptions == 0


def test_a_prompt_beyond_the_watermark_is_served_when_nobody_else_runs():
    bench = EngineBench(num_blocks=16, watermark=0.9)
    bench.submit("a", range(12), max_tokens=2)
    bench.run()
    assert bench.reason("a") == "length"


def test_what_gave_way_does_not_fill_the_queue():
    bench = EngineBench(num_blocks=10, max_running=2, max_waiting=1)
    bench.submit("a", [1, 2, 3], max_tokens=7)
    bench.step()
    bench.submit("b", [4, 5, 6], max_tokens=7)
    while not bench.engine.stats().preemptions:
        bench.step()
    assert bench.waiting() == ["b"]
    assert not bench.engine.is_full
    bench.submit("c", [7], max_tokens=1)
    bench.run()


def test_a_prefix_that_somebody_waits_for_is_not_the_one_evicted_next():
    bench = EngineBench(num_blocks=24, max_running=1)
    bench.submit("wanted", range(8), max_tokens=1)
    bench.run()
    bench.submit("idle", range(20, 28), max_tokens=1)
    bench.run()
    bench.submit("big", range(40, 50), max_tokens=1)
    bench.submit("waits", [*range(8), 90], max_tokens=1)
    bench.run()
    assert bench.engine.stats().cache.evicted_blocks
    assert bench.news["waits"][-1].usage.cached_tokens == 8


def test_what_the_most_urgent_wait_for_is_kept_however_many_came_before():
    bench = one_by_one("priority", num_blocks=24)
    bench.submit("wanted", range(8), max_tokens=1)
    bench.run()
    bench.submit("idle", range(20, 28), max_tokens=1)
    bench.run()
    for count in range(40):
        bench.submit(f"later{count}", [80, count], max_tokens=1, priority=1)
    bench.submit("waits", [*range(8), 90], max_tokens=1, priority=-1)
    bench.submit("big", range(40, 50), max_tokens=1, priority=-2)
    bench.run()
    assert bench.news["waits"][-1].usage.cached_tokens == 8


@pytest.mark.parametrize("ordering", ["longest_prefix", "depth_first"])
def test_a_subtree_that_is_finished_does_not_press_out_the_one_that_waits(ordering: str):
    """One more at a time is not worth the template that others will find."""
    bench = EngineBench(num_blocks=20, block_size=4, ordering=ordering, max_running=16)
    first, second = [1] * 16, [2] * 24
    for name, template in {"a": first, "b": second}.items():
        bench.submit(name, [*template, 0], max_tokens=1)
        bench.run()
    for count in range(14):
        bench.submit(f"b{count}", [*second, 10 + count, 3, 3], max_tokens=1)
    bench.submit("a0", [*first, 10], max_tokens=1)
    bench.run()
    assert bench.engine.stats().cache.evicted_blocks
    assert bench.news["a0"][-1].usage.cached_tokens >= 12


def templates(seed: int, *, num_templates: int, questions: int) -> list[list[int]]:
    """Prompts of several templates, mixed at random."""
    rng = random.Random(seed)
    prompts = [
        [template] * 12 + [rng.randrange(90) for _ in range(4)]
        for template in range(num_templates)
        for _ in range(questions)
    ]
    rng.shuffle(prompts)
    return prompts


def cached_tokens(ordering: str, prompts: list[list[int]]) -> int:
    bench = EngineBench(
        num_blocks=40, ordering=ordering, max_running=1, max_overtaken=1000, max_len=20
    )
    for count, prompt in enumerate(prompts):
        bench.submit(f"r{count}", prompt, max_tokens=1)
    bench.run(max_steps=2000)
    return bench.engine.stats().cached_tokens


@pytest.mark.parametrize("seed", range(3))
def test_cache_aware_orderings_raise_the_hits_of_mixed_templates(seed: int):
    prompts = templates(seed, num_templates=6, questions=8)
    hits = {name: cached_tokens(name, prompts) for name in ORDERINGS}
    most = 12 * (len(prompts) - 6)
    assert hits["fcfs"] < 0.7 * most
    assert hits["longest_prefix"] >= 0.95 * most
    assert hits["depth_first"] >= 0.95 * most


@pytest.mark.parametrize(
    "setting",
    [{"ordering": "random"}, {"watermark": 1.0}, {"watermark": -0.1}, {"max_overtaken": -1}],
)
def test_a_wrong_setting_is_refused_by_name(setting: dict[str, object]):
    with pytest.raises(InvalidSetting, match=next(iter(setting))):
        EngineConfig(max_len=8, **setting)


@pytest.mark.parametrize("ordering", sorted(ORDERINGS))
def test_a_full_batch_asks_the_cache_of_nobody_that_waits(ordering: str, monkeypatch):
    bench = one_by_one(ordering)
    bench.submit("a", [1, 2, 3], max_tokens=5)
    bench.step()
    for count in range(5):
        bench.submit(f"b{count}", [1, 2, 3, count], max_tokens=1)
    asked = []
    match_len = bench.cache.match_len
    monkeypatch.setattr(bench.cache, "match_len", lambda key: asked.append(key) or match_len(key))
    bench.step()
    assert bench.reason("a") is None
    assert asked == []
    bench.run()
    assert asked


def test_a_prefix_that_somebody_waits_for_is_not_what_a_decode_evicts_next():
    bench = one_by_one("fcfs", num_blocks=24)
    bench.submit("wanted", range(8), max_tokens=1)
    bench.run()
    bench.submit("idle", range(20, 28), max_tokens=1)
    bench.run()
    bench.submit("long", [40], max_tokens=14)
    bench.submit("waits", [*range(8), 90], max_tokens=1)
    bench.run()
    assert bench.engine.stats().cache.evicted_blocks
    assert bench.news["waits"][-1].usage.cached_tokens == 8
