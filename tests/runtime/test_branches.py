"""Several branches of one prompt, deadlines, and prompts that are only scored or warmed."""

from __future__ import annotations

import gc

import pytest

from radixcache.tokens import unpack_tokens
from runtime.errors import InvalidRequest
from runtime.live import LiveRequest
from runtime.request import SamplingParams
from tests.support.engine_bench import EngineBench
from tests.support.fake_executor import LetterTokenizer, OddThenEven, logprobs_of
from tests.support.faults import Rule

PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_branches_compute_the_prompt_once_and_share_its_blocks(block_size: int):
    bench = EngineBench(num_blocks=64 // block_size, block_size=block_size)
    bench.submit("a", PROMPT, n=4, max_tokens=3)
    bench.step()
    (piece,) = bench.plans[0].slices
    assert len(piece.draws) == 4
    whole = len(PROMPT) // block_size
    stats = bench.engine.stats()
    assert stats.running == 4
    assert stats.cache.num_pinned == whole
    assert stats.cache.num_private == (1 if len(PROMPT) % block_size else 0)
    bench.run()
    for index in range(4):
        assert bench.output("a", index) == bench.expected("a", index).tokens
    assert len({tuple(bench.output("a", index)) for index in range(4)}) == 4
    assert bench.engine.stats().prompt_tokens == len(PROMPT)


def test_a_branch_draws_the_same_however_many_there_are():
    seeds = []
    for n in (1, 2, 5):
        bench = EngineBench(num_blocks=64)
        bench.submit("a", PROMPT, n=n, max_tokens=1, seed=11)
        bench.run()
        seeds.append([draw.seed for draw in bench.plans[0].slices[0].draws])
    assert seeds[0] == seeds[1][:1] == [11]
    assert seeds[1] == seeds[2][:2]
    assert len(set(seeds[2])) == 5


def test_seeds_side_by_side_share_no_branch():
    drawn = set()
    for seed in range(8):
        bench = EngineBench(num_blocks=64)
        bench.submit("a", PROMPT, n=8, max_tokens=1, seed=seed)
        bench.run()
        drawn |= {draw.seed for draw in bench.plans[0].slices[0].draws}
    assert len(drawn) == 64


def test_a_branch_that_gave_way_resumes_alone():
    bench = EngineBench(num_blocks=18, max_running=4)
    bench.submit("a", PROMPT, n=4, max_tokens=9)
    bench.run()
    assert bench.engine.stats().preemptions
    for index in range(4):
        assert (bench.output("a", index), bench.reason("a", index)) == bench.expected("a", index)


def test_only_the_last_news_of_the_last_branch_is_the_last():
    bench = EngineBench(num_blocks=64, eos_ids=frozenset(range(40)))
    bench.submit("a", PROMPT, n=6, max_tokens=5)
    bench.run()
    assert [news.is_last for news in bench.news["a"]].count(True) == 1
    assert bench.news["a"][-1].is_last


def test_an_abort_ends_every_branch():
    bench = EngineBench(num_blocks=64)
    bench.submit("a", PROMPT, n=3, max_tokens=50)
    bench.step()
    ended = bench.abort("a")
    assert [(news.index, news.finish_reason, news.is_last) for news in ended] == [
        (0, "abort", False),
        (1, "abort", False),
        (2, "abort", True),
    ]
    bench.check_idle()


def test_more_branches_than_can_run_together_are_refused():
    bench = EngineBench(num_blocks=64, max_running=3)
    with pytest.raises(InvalidRequest, match="at most 3") as caught:
        bench.submit("a", PROMPT, n=4)
    assert caught.value.param == "n"


def test_branches_wait_until_all_of_them_can_run():
    bench = EngineBench(num_blocks=64, max_running=3)
    bench.submit("a", [9], max_tokens=2)
    bench.submit("b", PROMPT, n=3, max_tokens=2)
    bench.step()
    assert bench.waiting() == ["b"]
    bench.run()
    assert bench.output("b", 2) == bench.expected("b", 2).tokens


def test_branches_to_come_count_as_running():
    """Or more would decode at a time than the budget of a step was made for."""
    bench = EngineBench(num_blocks=64, max_running=3, max_step_tokens=4)
    bench.submit("a", PROMPT, n=3, max_tokens=4)
    bench.submit("b", [9], max_tokens=2)
    while bench.engine.has_work:
        bench.step()
        assert bench.engine.stats().running <= 3
    bench.check_idle()


def test_each_branch_has_its_constraint_to_itself():
    bench = EngineBench(num_blocks=64, vocab_size=40)
    bench.submit("a", PROMPT, n=3, max_tokens=6, constraint=OddThenEven(40))
    bench.run()
    for index in range(3):
        output = bench.output("a", index)
        assert output == bench.expected("a", index).tokens
        parities = [token % 2 for token in output if token != 39]
        assert parities[:1] == [1] or output[0] == 39


class BrokenConstraint(OddThenEven):
    """Breaks down at the second token."""

    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        if not self._is_odd:
            return
        raise ValueError("the grammar broke down")


def test_a_constraint_that_breaks_down_ends_its_own_request_only():
    bench = EngineBench(num_blocks=64, vocab_size=40)
    bench.submit("a", PROMPT, max_tokens=6, constraint=BrokenConstraint(40))
    bench.submit("b", PROMPT, max_tokens=6)
    bench.run()
    assert bench.news["a"][-1].error == "ValueError: the grammar broke down"
    assert bench.output("b") == bench.expected("b").tokens


@pytest.mark.parametrize("where", ["allowed", "accept", "fork"])
def test_a_constraint_that_fails_in_one_branch_ends_all_of_its_request_and_no_other(where: str):
    bench = EngineBench(num_blocks=64)
    constraint = Rule(where, 97, token=5)
    bench.submit("a", PROMPT, n=3, max_tokens=6, constraint=constraint.fork())
    bench.submit("b", PROMPT, max_tokens=6)
    bench.run()
    assert [bench.reason("a", index) for index in range(3)] == ["error"] * 3
    assert [news.is_last for news in bench.news["a"] if news.finish_reason] == [False, False, True]
    assert bench.news["a"][-1].error == f"ZeroDivisionError: a bug in {where}"
    assert bench.output("b") == bench.expected("b").tokens


def test_a_request_ends_at_its_deadline_wherever_it_is():
    now = [0.0]
    bench = EngineBench(num_blocks=64, max_running=1, clock=lambda: now[0])
    bench.submit("runs", PROMPT, max_tokens=50, timeout_s=5)
    bench.submit("waits", PROMPT, max_tokens=50, timeout_s=3)
    bench.submit("has time", [9], max_tokens=2, timeout_s=50)
    bench.step()
    now[0] = 3.0
    bench.step()
    assert (bench.reason("runs"), bench.reason("waits")) == (None, "timeout")
    now[0] = 5.0
    bench.step()
    assert bench.reason("runs") == "timeout"
    assert bench.news["runs"][-1].is_last
    bench.run()
    assert bench.reason("has time") == "length"
    assert bench.engine.stats().finished == {"timeout": 2, "length": 1}
    assert bench.news["has time"][-1].usage.queue_s == 5.0


def test_a_deadline_that_passes_after_the_end_is_nothing():
    now = [0.0]
    bench = EngineBench(num_blocks=64, clock=lambda: now[0])
    bench.submit("a", PROMPT, max_tokens=1, timeout_s=1)
    bench.run()
    bench.submit("a", PROMPT, max_tokens=3)  # the same name, without a deadline
    now[0] = 2.0
    bench.run()
    assert bench.reason("a") == "length"


def test_what_ended_early_is_not_remembered_until_its_deadline():
    def num_remembered() -> int:
        gc.collect()
        return sum(type(each) is LiveRequest for each in gc.get_objects())

    bench, before = EngineBench(num_blocks=64), num_remembered()
    for name in map(str, range(50)):
        bench.submit(name, PROMPT, max_tokens=1, timeout_s=1e6)
        bench.run()
    assert num_remembered() - before < 5


def test_no_token_wanted_computes_the_prompt_and_draws_nothing():
    bench = EngineBench(num_blocks=64)
    bench.submit("a", PROMPT, max_tokens=0)
    bench.run()
    assert (bench.output("a"), bench.reason("a")) == ([], "length")
    assert bench.num_cached(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("first", [1, 3, 6, 7, 50])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("max_step_tokens", [3, 64])
def test_a_prompt_is_scored_from_where_it_was_asked(first: int, warm: bool, max_step_tokens: int):
    bench = EngineBench(num_blocks=64, block_size=2, max_step_tokens=max_step_tokens, max_running=2)
    if warm:
        bench.submit("warm", PROMPT, max_tokens=0)
        bench.run()
    bench.submit("a", PROMPT, max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=first)
    bench.run()
    told = [logprobs for news in bench.news["a"] for logprobs in news.prompt_logprobs]
    assert told == [logprobs_of(PROMPT[:at], PROMPT[at]) for at in range(first, len(PROMPT))]
    if warm:  # what is scored is computed again, but written nowhere
        assert bench.news["a"][-1].usage.cached_tokens == min(first - 1, len(PROMPT) - 1)
        assert bench.engine.stats().cache.published_blocks == 3


def test_scoring_goes_on_where_it_was_when_it_gives_way():
    bench = EngineBench(num_blocks=14, max_step_tokens=3, max_running=2, block_size=1)
    bench.submit("old", [50, 51], max_tokens=8)
    bench.step()
    bench.submit("a", PROMPT, max_tokens=2, prompt_logprobs=0)
    bench.run()
    told = [logprobs for news in bench.news["a"] for logprobs in news.prompt_logprobs]
    assert told == [logprobs_of(PROMPT[:at], PROMPT[at]) for at in range(1, len(PROMPT))]
    assert bench.engine.stats().preemptions


def test_a_closing_sequence_is_not_taken_for_a_new_request_of_its_name():
    bench = EngineBench(num_blocks=64)
    bench.submit("a", PROMPT, max_tokens=1)
    bench.step()
    assert bench.engine.scheduler.closing
    bench.submit("a", [50, 51, 52], max_tokens=2)
    bench.executor.fail_at = {2, 3}  # the step, and the closing sequence alone
    bench.run()
    assert (bench.output("a"), bench.reason("a")) == bench.expected("a")


def test_repetition_costs_what_was_asked_and_biases_are_added():
    bench = EngineBench(num_blocks=64, vocab_size=3)
    bench.submit(
        "a",
        PROMPT[:2],
        max_tokens=6,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((2, 4.0), (1, -1.0)),
    )
    bench.run()
    output = bench.output("a")
    for count, plan in enumerate(bench.plans[:6]):
        (draw,) = plan.slices[0].draws
        ids, values = unpack_tokens(draw.bias_ids), memoryview(draw.bias).cast("f").tolist()
        expected = {2: 4.0, 1: -1.0}
        for token in set(output[:count]):
            cost = 0.5 + 0.25 * output[:count].count(token)
            expected[token] = expected.get(token, 0.0) - cost
        assert dict(zip(ids, values, strict=True)) == expected


def test_text_held_back_at_a_limit_is_told_and_a_stop_in_it_still_stops():
    tokenizer = LetterTokenizer()
    bench = EngineBench(num_blocks=64, vocab_size=26, tokenizer=tokenizer)
    bench.submit("free", PROMPT, max_tokens=4)
    bench.run()
    text = bench.text("free")
    bench.submit("a", PROMPT, max_tokens=4, stop=(text[3] + "?",))
    bench.submit("b", PROMPT, max_tokens=4, stop=(text[3],))
    bench.run()
    assert (bench.text("a"), bench.reason("a")) == (text, "length")
    assert (bench.text("b"), bench.reason("b")) == (text[: text.index(text[3])], "stop")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs_from", 0),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", ((-1, 1.0),)),
        ("max_tokens", -1),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(field: str, value: object):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
