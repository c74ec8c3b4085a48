"""Aborts at every stage of a request: its blocks come back, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.engine_bench import EngineBench

PROMPT = [1, 2, 3, 4, 5, 6]


def waiting(bench: EngineBench) -> None:
    assert [s.request.request_id for s in bench.engine.scheduler.waiting] == ["other", "it"]


def mid_prefill(bench: EngineBench) -> None:
    while not bench.news["it"]:
        bench.step()
    assert bench.news["it"][-1].usage.computed_tokens < len(PROMPT)


def decoding(bench: EngineBench) -> None:
    while len(bench.output("it")) < 2:
        bench.step()


def preempted(bench: EngineBench) -> None:
    while not bench.engine.stats().preemptions:
        bench.step()
    assert [s.request.request_id for s in bench.engine.scheduler.waiting] == ["it"]


@pytest.mark.parametrize("stage", [waiting, mid_prefill, decoding, preempted])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_an_abort_frees_everything_at_any_stage(
    stage: Callable[[EngineBench], None], block_size: int
):
    bench = EngineBench(
        num_blocks=20 // block_size, block_size=block_size, max_step_tokens=4, max_running=2
    )
    bench.submit("other", [9, 8, 7], max_tokens=14)
    bench.submit("it", PROMPT, max_tokens=9)
    stage(bench)
    told = len(bench.output("it"))
    (output,) = bench.abort("it")
    assert (output.finish_reason, output.token_ids) == ("abort", ())
    assert output.usage.completion_tokens == told
    assert bench.abort("it") == []
    bench.run()
    assert len(bench.output("it")) == told
    assert bench.output("other") == bench.expected("other").tokens
    assert bench.engine.stats().finished == {"abort": 1, "length": 1}
    # What stayed cached is right: the same prompt again gives what it should.
    bench.submit("again", PROMPT, max_tokens=9)
    bench.run()
    assert bench.output("again") == bench.expected("again").tokens


def test_an_abort_while_the_last_token_is_computed_comes_too_late_and_harms_nothing():
    bench = EngineBench(num_blocks=20)
    bench.submit("it", PROMPT, max_tokens=1)
    bench.step()
    assert bench.reason("it") == "length"
    assert bench.engine.scheduler.closing
    assert bench.abort("it") == []
    bench.run()
    assert bench.num_cached(bench.tokens("it")) == 7


def test_an_abort_of_what_was_never_there_is_no_news():
    bench = EngineBench(num_blocks=20)
    assert bench.abort("nobody") == []
    assert bench.engine.stats().finished == {}


def test_a_request_may_be_submitted_again_right_after_its_abort():
    bench = EngineBench(num_blocks=20)
    bench.submit("it", PROMPT, max_tokens=5)
    bench.step()
    bench.abort("it")
    bench.submit("it", PROMPT, max_tokens=5)
    bench.run()
    assert bench.output("it") == bench.expected("it").tokens


def test_what_was_computed_before_an_abort_stays_cached():
    bench = EngineBench(num_blocks=20, max_step_tokens=4, max_running=2)
    bench.submit("it", PROMPT)
    bench.step()
    bench.abort("it")
    bench.check_idle()
    assert bench.num_cached(PROMPT) == 4
