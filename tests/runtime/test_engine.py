"""The life of a request: what is refused, how it ends, what it is told, what it leaves behind."""

from __future__ import annotations

import pytest

from radixcache import Namespace
from radixcache.lease import PrefixKey
from runtime.errors import InvalidRequest, PromptTooLong, RequestError, ServerBusy
from tests.support.engine_bench import EngineBench
from tests.support.fake_executor import LetterTokenizer, next_token

PROMPT = [5, 6, 7, 8]


def stream(count: int, prompt: list[int] = PROMPT, vocab_size: int = 97) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab_size))
    return tokens[len(prompt) :]


# What is refused, leaving no trace.


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([], {}, "prompt"),
        ([3, 97], {}, "prompt"),
        ([2**31 - 1], {}, "prompt"),
        (PROMPT, {"stop": ("x",)}, "stop"),
    ],
    ids=["empty", "one-past-the-vocabulary", "largest-id", "stop-without-tokenizer"],
)
def test_a_request_that_can_not_be_served_is_refused(prompt, sampling, param):
    bench = EngineBench(num_blocks=8)
    with pytest.raises(InvalidRequest) as caught:
        bench.submit("a", prompt, **sampling)
    assert caught.value.param == param
    bench.check_idle()
    bench.submit("a", [96], max_tokens=1)  # the name is free, and the last id is served
    bench.run()


def test_a_prompt_must_leave_room_for_one_token_and_may_take_all_the_rest():
    bench = EngineBench(num_blocks=20, max_len=12)
    with pytest.raises(PromptTooLong) as caught:
        bench.submit("long", range(12))
    error = caught.value
    assert isinstance(error, RequestError)
    assert (error.num_tokens, error.max_tokens, error.param) == (12, 11, "prompt")
    bench.submit("fits", range(11))
    bench.run()
    assert (len(bench.output("fits")), bench.reason("fits")) == (1, "length")


def test_a_name_in_use_is_refused_until_its_request_ends():
    bench = EngineBench(num_blocks=20)
    bench.submit("a", PROMPT, max_tokens=2)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="'a' is in use") as caught:
            bench.submit("a", [1], max_tokens=1)
        assert caught.value.param == "request_id"
        bench.step()
    assert bench.engine.scheduler.closing  # the old one has been told all, and still computes
    bench.submit("a", [1], max_tokens=1)
    bench.step()
    bench.run()
    assert bench.output("a") == bench.expected("a").tokens


def test_more_than_max_waiting_requests_are_sent_away():
    bench = EngineBench(num_blocks=20, max_waiting=2, max_running=1)
    bench.submit("a", PROMPT, max_tokens=3)
    bench.submit("b", PROMPT, max_tokens=3)
    with pytest.raises(ServerBusy, match="2 requests wait") as caught:
        bench.submit("c", PROMPT)
    assert caught.value.retry_after_s > 0
    bench.step()
    bench.submit("c", PROMPT, max_tokens=3)
    bench.run()
    assert bench.output("c") == stream(3)


# How a request ends.


def test_max_tokens_ends_with_length():
    bench = EngineBench(num_blocks=20)
    bench.submit("a", PROMPT, max_tokens=3)
    bench.run()
    assert (bench.output("a"), bench.reason("a")) == (stream(3), "length")


def test_max_len_ends_with_length_whatever_max_tokens_says():
    bench = EngineBench(num_blocks=20, max_len=7)
    bench.submit("a", PROMPT, max_tokens=50)
    bench.submit("b", PROMPT)
    bench.run()
    for name in "ab":
        assert (bench.output(name), bench.reason(name)) == (stream(3), "length")


def test_the_models_end_of_sequence_ends_with_stop_unless_ignored():
    end = stream(3)[2]
    bench = EngineBench(num_blocks=20, eos_ids=frozenset({end}), tokenizer=LetterTokenizer())
    bench.submit("a", PROMPT, max_tokens=5)
    bench.submit("b", PROMPT, max_tokens=5, ignore_eos=True)
    bench.run()
    assert (bench.output("a"), bench.reason("a")) == (stream(3), "stop")
    assert (bench.output("b"), bench.reason("b")) == (stream(5), "length")
    assert len(bench.text("a")) == 2  # the end itself is no text
    assert len(bench.text("b")) == 5


def test_a_stop_token_ends_with_stop_even_where_the_end_of_sequence_is_ignored():
    bench = EngineBench(num_blocks=20)
    bench.submit("a", PROMPT, stop_token_ids=(stream(2)[1],), ignore_eos=True)
    bench.run()
    assert (bench.output("a"), bench.reason("a")) == (stream(2), "stop")


def test_a_stop_string_over_two_tokens_ends_with_stop_and_is_no_text():
    bench = EngineBench(num_blocks=20, tokenizer=LetterTokenizer())
    text = LetterTokenizer().bytes_of(stream(4)).decode()
    bench.submit("a", PROMPT, stop=("unseen", text[2:4]))
    bench.run()
    assert (bench.text("a"), bench.reason("a")) == (text[:2], "stop")
    assert bench.output("a") == stream(4)


def test_what_was_held_back_for_a_stop_string_comes_with_the_end():
    bench = EngineBench(num_blocks=20, tokenizer=LetterTokenizer())
    text = LetterTokenizer().bytes_of(stream(3)).decode()
    bench.submit("a", PROMPT, stop=(text[2] + "!",), max_tokens=3)
    bench.run()
    assert (bench.text("a"), bench.reason("a")) == (text, "length")


# A step that fails.


def test_what_fails_again_alone_ends_and_nothing_else_of_the_step_does():
    bench = EngineBench(num_blocks=12, max_running=2)
    for name in "abc":
        bench.submit(name, [*PROMPT[:2], ord(name) % 50], max_tokens=3)
    bench.step()
    bench.executor.fail_for = {"a"}
    bench.step()
    assert [bench.reason(name) for name in "abc"] == ["error", None, None]
    assert str(bench.news["a"][-1].error).startswith("InjectedFailure: plan 3 was told to fail")
    bench.run()
    for name in "bc":
        assert bench.output(name) == bench.expected(name).tokens
        assert bench.news[name][-1].error is None
    assert bench.engine.stats().finished == {"error": 1, "length": 2}
    assert bench.engine.stats().failed_steps == 1


def test_a_step_that_fails_once_costs_no_request():
    bench = EngineBench(num_blocks=12, max_running=2)
    for name in "ab":
        bench.submit(name, [*PROMPT[:2], ord(name) % 50], max_tokens=3)
    bench.executor.fail_at = {2}
    bench.run()
    for name in "ab":
        assert (bench.output(name), bench.reason(name)) == bench.expected(name)
    assert bench.engine.stats().failed_steps == 1


def test_where_a_branch_fails_nobody_else_gets_the_token_of_its_sibling():
    bench = EngineBench(num_blocks=40)
    bench.submit("a", PROMPT, n=2, max_tokens=5)
    bench.step()
    bench.submit("b", PROMPT[1:], max_tokens=5)
    bench.executor.fail_at = {2, 3}  # the step, and branch 0 of "a" alone; branch 1 is computed
    bench.run()
    assert [bench.reason("a", index) for index in range(2)] == ["error", "error"]
    assert (bench.output("b"), bench.reason("b")) == bench.expected("b")


def test_where_copies_fail_no_slice_of_the_step_is_computed_again():
    bench = EngineBench(num_blocks=12, max_running=2)
    for name in "ab":
        bench.submit(name, [*PROMPT[:2], ord(name) % 50], max_tokens=3)
    bench.step()
    bench.executor.fail_next_copies = True
    bench.step()
    assert [bench.reason(name) for name in "ab"] == ["error", "error"]
    bench.run()


def test_nothing_that_a_failed_step_wrote_is_ever_read():
    bench = EngineBench(num_blocks=12)
    bench.executor.fail_at = {1}
    bench.submit("a", PROMPT, max_tokens=3)
    bench.run()
    assert bench.num_cached(PROMPT) == 0
    bench.submit("b", PROMPT, max_tokens=3)
    bench.run()
    assert bench.output("b") == stream(3)


def test_a_failure_while_the_last_token_is_computed_is_no_news():
    bench = EngineBench(num_blocks=12)
    bench.submit("a", PROMPT, max_tokens=2)
    bench.executor.fail_at = {3}
    assert bench.run() == 3
    assert (bench.output("a"), bench.reason("a")) == (stream(2), "length")
    assert bench.num_cached(PROMPT + stream(2)) == 5


# Blocks that somebody else holds.


def test_a_prompt_that_can_not_fit_beside_outside_leases_ends_with_an_error():
    bench = EngineBench(num_blocks=8)
    outside = bench.cache.acquire(PrefixKey.of([1, 2, 3, 4, 5]))
    bench.submit("a", PROMPT, max_tokens=2)
    bench.submit("b", [9], max_tokens=2)
    for _ in range(20):
        bench.engine.step()
    assert not bench.engine.has_work
    bench.cache.release(outside)
    assert bench.engine.stats().finished == {"error": 1, "length": 1}
    bench.check_idle()


def test_a_sequence_that_outgrows_what_outside_leases_leave_ends_with_an_error():
    bench = EngineBench(num_blocks=8)
    outside = bench.cache.acquire(PrefixKey.of([1, 2]))
    bench.submit("a", PROMPT)
    news = []
    for _ in range(20):
        news += bench.engine.step()
    assert not bench.engine.has_work
    assert news[-1].finish_reason == "error"
    assert "no room for the request" in news[-1].error
    assert [t for output in news for t in output.token_ids] == stream(3)
    bench.cache.release(outside)
    bench.check_idle()


# The cache changes nothing but the work.


def test_without_prefix_cache_nothing_is_cached_and_the_output_is_the_same():
    outputs = []
    for enabled in (True, False):
        bench = EngineBench(num_blocks=40, block_size=2, enable_prefix_cache=enabled)
        for name in "abc":
            bench.submit(name, [*PROMPT, *PROMPT, 1], max_tokens=4)
            bench.run()
        outputs.append([bench.output(name) for name in "abc"])
        cached = [bench.news[name][-1].usage.cached_tokens for name in "abc"]
        assert cached == ([0, 8, 8] if enabled else [0, 0, 0])
        assert bench.engine.stats().cached_tokens == sum(cached)
    assert outputs[0] == outputs[1]


def test_two_tenants_with_equal_prompts_never_share():
    bench = EngineBench(num_blocks=60)
    tenants = [Namespace(salt="a"), Namespace(salt="b"), Namespace()]
    for round_ in range(2):
        for index, namespace in enumerate(tenants):
            name = f"{round_}{index}"
            bench.submit(name, PROMPT, namespace=namespace, max_tokens=2)
            bench.run()
            cached = bench.news[name][-1].usage.cached_tokens
            assert cached == (3 if round_ else 0)  # the last token is always computed
            assert bench.output(name) == stream(2)


# What a request is told.


def test_usage_counts_the_prompt_as_it_is_computed():
    bench = EngineBench(num_blocks=40, max_step_tokens=3, max_running=2)
    bench.submit("a", range(8), max_tokens=2)
    bench.run()
    seen = [(n.usage.computed_tokens, n.usage.completion_tokens) for n in bench.news["a"]]
    assert seen == [(3, 0), (6, 0), (8, 1), (8, 2)]
    assert all(n.usage.prompt_tokens == 8 and not n.usage.cached_tokens for n in bench.news["a"])
    bench.submit("b", [*range(6), 50, 51], max_tokens=1)
    bench.run()
    usage = bench.news["b"][-1].usage
    assert (usage.cached_tokens, usage.computed_tokens) == (6, 2)


def test_stats_add_up():
    bench = EngineBench(num_blocks=40, max_running=1)
    assert bench.engine.stats().steps == 0
    bench.submit("a", PROMPT, max_tokens=2)
    bench.submit("b", PROMPT, max_tokens=3)
    bench.submit("c", PROMPT)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting) == (1, 2)
    bench.abort("c")
    bench.run()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens) == (8, 3, 5)
    assert stats.finished == {"length": 2, "abort": 1}
    assert stats.steps == len(bench.plans)
    assert stats.cache.hit_tokens == 3


def test_an_idle_engine_does_nothing():
    bench = EngineBench(num_blocks=4)
    assert not bench.engine.has_work
    assert bench.step() == []
    assert bench.plans == []
