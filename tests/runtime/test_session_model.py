"""Sessions and scores with the real model: the cache changes no token and no bit.

Everything that a tree of sessions gives is compared with what a runtime without a prefix cache
gives for the same tokens, log-probabilities included.
"""

from __future__ import annotations

import pytest

from runtime.llm import LLM, Completion
from runtime.request import SamplingParams
from tests.runtime.test_llm import assert_nothing_held

SYSTEM = "You are a travel agent with a few tools. Answer briefly and name one city."
GREEDY = SamplingParams(max_tokens=6, logprobs=2)
DRAWN = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=11, logprobs=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=64, max_len=512)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(num_blocks=64, max_len=512, enable_prefix_cache=False, max_chunk_tokens=24)


def same(plain: LLM, prompt: list[int], sampling: SamplingParams, done: Completion) -> None:
    """The tokens, the text and the bits are those of a run without a cache."""
    (alone,) = plain.generate([prompt], sampling)
    assert alone.usage.cached_tokens == 0
    assert (alone.token_ids, alone.text) == (done.token_ids, done.text)
    assert alone.logprobs == done.logprobs
    assert len(done.logprobs) == len(done.token_ids)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_tree_of_tool_calls_gives_bit_for_bit_what_no_cache_gives(
    llm: LLM, plain: LLM, sampling: SamplingParams
) -> None:
    said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where to go?"}]
    with llm.session(said) as trunk:
        prompt = trunk.token_ids
        same(plain, prompt, sampling, trunk.generate(sampling))
        calls = [trunk.fork() for _ in range(3)]
        texts = []
        for call, tool in zip(calls, ("the weather", "prices", "the news"), strict=True):
            call.append([{"role": "user", "content": f"Tool {tool}: nothing special."}])
            prompt = call.token_ids
            done = call.generate(sampling)
            assert done.usage.cached_tokens >= 32
            same(plain, prompt, sampling, done)
            texts.append(done.text)
        calls[2].close()  # abandoned
        trunk.hold(30)
        trunk.append([{"role": "user", "content": f"One says {texts[0]}, one {texts[1]}"}])
        prompt = trunk.token_ids
        done = trunk.generate(sampling)
        assert done.usage.cached_tokens >= 32
        same(plain, prompt, sampling, done)
        for call in calls:
            call.close()
        llm.sessions.check()
    assert_nothing_held(llm)


CHOICES = [" positive", " negative", " neither good nor bad", " purple"]
REVIEW = "Review: I loved every minute of it.\nThe review is"


def test_scores_are_the_same_bits_with_a_cache_and_without(llm: LLM, plain: LLM) -> None:
    with llm.session(REVIEW) as session:
        scores = session.score(CHOICES)
        session.append(".")
    alone = plain.score(REVIEW, CHOICES)
    assert [c.logprob for c in alone.choices] == [c.logprob for c in scores.choices]
    assert alone.best == scores.best == 0
    again = llm.score(REVIEW, CHOICES)
    assert [c.logprob for c in again.choices] == [c.logprob for c in scores.choices]
    assert_nothing_held(llm)


def test_a_score_is_the_sum_of_what_each_next_token_was_given(llm: LLM) -> None:
    """Token by token, as generating reports it."""
    tokenizer = llm.runtime.tokenizer
    prompt, choice = tokenizer.encode(REVIEW), tokenizer.encode(CHOICES[2])
    expected = []
    for at, token in enumerate(choice):
        force = SamplingParams(max_tokens=1, logprobs=0, logit_bias=((token, 100.0),))
        (done,) = llm.generate([prompt + choice[:at]], force)
        assert done.token_ids == (token,)
        expected.append(done.logprobs[0].token)
    score = llm.score(REVIEW, [choice, CHOICES[0]]).choices[0]
    assert score.logprob == sum(expected)
    assert score.mean_logprob == sum(expected) / len(choice)
    assert_nothing_held(llm)


def test_a_long_choice_is_not_worse_for_being_long_where_that_is_asked_for(llm: LLM) -> None:
    long = [" positive, and the reviewer loved it"]
    scores = llm.score(REVIEW, [" purple", *long], normalize=True)
    first, second = scores.choices
    assert second.mean_logprob > first.mean_logprob
    assert scores.best == 1
    by_sum = llm.score(REVIEW, [" purple", *long])
    assert by_sum.best == (0 if first.logprob >= second.logprob else 1)
    assert [c.logprob for c in by_sum.choices] == [c.logprob for c in scores.choices]


def test_several_branches_come_as_one_completion_and_each_is_what_fewer_give(llm: LLM) -> None:
    fields = {"max_tokens": 6, "temperature": 1.0, "seed": 5, "logprobs": 0}
    prompts = ["The sea is", "My name is"]
    many = llm.generate(prompts, SamplingParams(**fields, n=3))
    alone = llm.generate(prompts, SamplingParams(**fields))
    for branches, one in zip(many, alone, strict=True):
        assert len(branches.branches) == 3
        assert branches.branches[0] is branches
        assert (branches.token_ids, branches.logprobs) == (one.token_ids, one.logprobs)
        assert len({branch.token_ids for branch in branches.branches}) > 1
        assert all(len(branch.logprobs) == 6 for branch in branches.branches)
        assert all(not branch.others for branch in branches.others)
        assert one.others == ()
    assert_nothing_held(llm)


def test_a_prompts_own_log_probabilities_come_with_the_completion(llm: LLM) -> None:
    prompt = llm.runtime.tokenizer.encode(REVIEW)
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1, prompt_logprobs_from=3)
    (done,) = llm.generate([prompt], sampling)
    assert len(done.prompt_logprobs) == len(prompt) - 3
    assert all(len(entry.top_ids) == 1 for entry in done.prompt_logprobs)
    assert done.logprobs == ()


def test_a_session_holds_its_prefix_against_a_full_pool() -> None:
    llm = LLM(num_blocks=24, max_len=200)
    with llm.session("The quick brown fox jumps over the lazy dog. " * 8) as session:
        session.generate(SamplingParams(max_tokens=4, ignore_eos=True))
        held = session.state.held_tokens
        assert held >= 64
        strangers = [[100 + i, *range(200, 330)] for i in range(6)]
        llm.generate(strangers, SamplingParams(max_tokens=2))
        assert llm.stats().cache.evicted_blocks > 0
        session.append(" Then")
        assert session.generate(SamplingParams(max_tokens=2)).usage.cached_tokens >= held
    assert_nothing_held(llm)
