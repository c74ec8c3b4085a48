"""Log-probabilities, biases and masks on real tensors, and on the real model cold and warm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.decoding.logprobs import drawn_logprobs, token_logprobs
from runtime.decoding.sampler import choose_tokens
from runtime.llm import LLM
from runtime.plan import Draw
from runtime.request import Request, RequestOutput, SamplingParams, pack_prompt

SAMPLE = json.loads((Path(__file__).parent / "samples" / "logits.json").read_text())[0]


def draw(**fields: object) -> Draw:
    neutral = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    return Draw(**(neutral | fields))


def mask(ids: list[int], vocab_size: int) -> bytes:
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").tobytes()


def random_logits(rows: int = 5, vocab_size: int = 70) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 3


def test_logprobs_are_those_of_float64_and_the_likeliest_come_first():
    logits = random_logits()
    ids = torch.tensor([3, 0, 69, 7, 7])
    found = token_logprobs(logits, ids, [0, 3, 20, 1, 70])
    exact = logits.double().log_softmax(-1)
    for row, logprobs in enumerate(found):
        assert logprobs.token == pytest.approx(float(exact[row, ids[row]]), abs=1e-5)
        best = exact[row].sort(descending=True)
        count = [0, 3, 20, 1, 70][row]
        assert logprobs.top_ids == tuple(best.indices[:count].tolist())
        assert logprobs.top == pytest.approx(best.values[:count].tolist(), abs=1e-5)


def test_of_equally_likely_tokens_the_lower_id_comes_first():
    (found,) = token_logprobs(torch.zeros(1, 6), torch.tensor([5]), [6])
    assert found.top_ids == (0, 1, 2, 3, 4, 5)


def test_a_row_is_scored_alike_in_any_company():
    logits = random_logits()
    ids = torch.tensor([1, 2, 3, 4, 5])
    together = token_logprobs(logits, ids, [4] * 5)
    alone = [token_logprobs(logits[r : r + 1], ids[r : r + 1], [4])[0] for r in range(5)]
    assert together == alone


def test_only_draws_that_ask_are_told():
    logits = random_logits(rows=3)
    told = drawn_logprobs(logits, [1, 2, 3], [draw(), draw(num_logprobs=2), draw()])
    assert [logprobs is not None for logprobs in told] == [False, True, False]
    assert told[1] == token_logprobs(logits[1:2], torch.tensor([2]), [2])[0]
    assert drawn_logprobs(logits, [1, 2, 3], [draw()] * 3) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_what_is_not_allowed_is_never_drawn(temperature: float):
    logits = random_logits(rows=1)
    for position in range(50):
        asked = draw(temperature=temperature, position=position, allowed=mask([4, 66], 70))
        assert choose_tokens(logits, [asked])[0] in (4, 66)


def test_a_mask_shorter_than_the_vocabulary_allows_nothing_beyond_it():
    logits = torch.arange(70.0)[None]
    assert choose_tokens(logits, [draw(allowed=mask([3, 9], 32))]) == [9]


def test_a_bias_is_added_to_its_row_alone():
    logits = torch.zeros(2, 70)
    ids = np.array([8, 60], np.int32).tobytes()
    biased = draw(bias_ids=ids, bias=np.array([1.5, 2.5], np.float32).tobytes())
    assert choose_tokens(logits, [biased, draw()]) == [60, 0]
    assert torch.equal(logits, torch.zeros(2, 70))  # the caller's logits are left as they were


def test_a_bias_beats_a_mask_in_nothing():
    bias = {"bias_ids": np.int32([5]).tobytes(), "bias": np.float32([100]).tobytes()}
    assert choose_tokens(torch.zeros(1, 70), [draw(**bias, allowed=mask([9], 70))]) == [9]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=64, dtype="float32", max_step_tokens=65)


def news_of(llm: LLM, ids: list[int], sampling: SamplingParams) -> list[RequestOutput]:
    engine = llm.runtime.engine
    engine.submit(Request(request_id="it", prompt=pack_prompt(ids), sampling=sampling))
    news = []
    while engine.has_work:
        news += engine.step()
    engine.check()
    return news


def test_a_prompt_scores_the_same_bits_cold_warm_and_from_any_place(llm: LLM) -> None:
    ids = SAMPLE["ids"][:150]
    llm.runtime.engine.cache.evict(64)

    def scored(first: int) -> list[tuple[float, tuple[int, ...], tuple[float, ...]]]:
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=2, prompt_logprobs_from=first)
        news = news_of(llm, ids, sampling)
        return [(t.token, t.top_ids, t.top) for output in news for t in output.prompt_logprobs]

    cold = scored(1)
    assert len(cold) == len(ids) - 1
    assert scored(1) == cold
    assert scored(100) == cold[99:]
    for row in SAMPLE["rows"]:
        at = row["position"]
        if at + 1 < len(ids):  # transformers' likeliest token is ours
            best = max(zip(row["logits"], row["tokens"], strict=True))[1]
            assert cold[at][1][0] == best


def test_generated_tokens_are_reported_as_the_prompt_that_they_become(llm: LLM) -> None:
    ids = SAMPLE["ids"][:40]
    sampling = SamplingParams(max_tokens=12, logprobs=1, temperature=1.2, seed=5)
    news = news_of(llm, ids, sampling)
    tokens = [token for output in news for token in output.token_ids]
    given = [logprobs for output in news for logprobs in output.logprobs]
    asked = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=len(ids))
    again = news_of(llm, [*ids, *tokens], asked)
    assert [t for output in again for t in output.prompt_logprobs] == given


def test_branches_are_those_of_separate_runs_bit_for_bit(llm: LLM) -> None:
    ids = SAMPLE["ids"][:60]
    sampling = SamplingParams(n=3, max_tokens=10, temperature=1.0, seed=7, logprobs=0)
    together = news_of(llm, ids, sampling)
    llm.runtime.engine.cache.evict(64)
    again = news_of(llm, ids, sampling)
    for index in range(3):
        first, second = (
            [(o.token_ids, o.logprobs) for o in news if o.index == index and o.token_ids]
            for news in (together, again)
        )
        assert first == second
    drawn = {tuple(t for o in together if o.index == i for t in o.token_ids) for i in range(3)}
    assert len(drawn) == 3


def test_a_penalty_keeps_the_model_from_repeating_itself(llm: LLM) -> None:
    ids = llm.runtime.prompt_tokens("la la la la la la la la")
    plain = news_of(llm, ids, SamplingParams(max_tokens=12))
    costly = news_of(llm, ids, SamplingParams(max_tokens=12, frequency_penalty=2.0))

    def most_frequent(news: list[RequestOutput]) -> int:
        tokens = [token for output in news for token in output.token_ids]
        return max(map(tokens.count, tokens))

    assert most_frequent(costly) < most_frequent(plain)


def test_which_of_equally_likely_tokens_are_told_depends_on_no_neighbour() -> None:
    logits = (torch.randn(40, 1000, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    rows, ids = logits.float(), torch.zeros(40, dtype=torch.int64)
    tops = [3, 20, 0, 1, 7] * 8
    together = token_logprobs(rows, ids, tops)
    for row, top in enumerate(tops):
        alone = token_logprobs(rows[row : row + 1], ids[:1], [top])[0]
        assert alone == together[row]
        assert len(alone.top_ids) == top
        order = rows[row].sort(descending=True, stable=True).indices.tolist()
        assert list(alone.top_ids) == order[:top]
