"""After the last token: its K/V is computed too where that fills a block, so a turn is a hit."""

from __future__ import annotations

import pytest

from tests.support.engine_bench import EngineBench
from tests.support.fake_executor import LetterTokenizer, next_token

NUM_OUTPUT = 3
ENDS = ("length", "eos", "stop-id", "stop-string", "max-len")


def finished_turn(end: str, block_size: int, num_tokens: int, **settings: object) -> EngineBench:
    """A bench in which "a" has ended after `num_tokens` tokens, by the end that is named."""
    prompt = list(range(1, num_tokens - NUM_OUTPUT + 1))
    tokens = list(prompt)
    for _ in range(NUM_OUTPUT):
        tokens.append(next_token(tokens, 997))
    assert tokens[-1] not in tokens[:-1]
    bench = EngineBench(
        num_blocks=4 * num_tokens,
        block_size=block_size,
        vocab_size=997,
        eos_ids=frozenset({tokens[-1]}) if end == "eos" else frozenset(),
        tokenizer=LetterTokenizer(),
        max_len=num_tokens if end == "max-len" else 4 * num_tokens,
        **settings,
    )
    sampling = {
        "length": {"max_tokens": NUM_OUTPUT},
        "stop-id": {"stop_token_ids": (tokens[-1],)},
        "stop-string": {"stop": (LetterTokenizer().bytes_of(tokens[-1:]).decode(),)},
    }
    bench.submit("a", prompt, **sampling.get(end, {}))
    while bench.reason("a") is None:
        bench.step()
    assert bench.tokens("a") == tokens
    assert bench.reason("a") == ("length" if end in ("length", "max-len") else "stop")
    return bench


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("block_size", "num_tokens"), [(1, 7), (1, 8), (4, 8), (4, 12), (16, 32)])
def test_a_turn_that_fills_its_blocks_is_cached_to_its_last_token(end, block_size, num_tokens):
    bench = finished_turn(end, block_size, num_tokens)
    assert bench.run() == 1
    assert bench.num_cached(bench.tokens("a")) == num_tokens
    if end != "max-len":
        bench.submit("next", [*bench.tokens("a"), 5], max_tokens=1)
        bench.run()
        assert bench.news["next"][-1].usage.cached_tokens == num_tokens


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("block_size", "num_tokens"), [(4, 9), (4, 11), (16, 33), (16, 47)])
def test_a_turn_that_ends_within_a_block_is_over_at_once(end, block_size, num_tokens):
    bench = finished_turn(end, block_size, num_tokens)
    assert not bench.engine.has_work
    bench.check_idle()
    assert bench.num_cached(bench.tokens("a")) == num_tokens - num_tokens % block_size


def test_without_prefix_cache_the_last_token_is_not_computed():
    bench = finished_turn("length", 1, 8, enable_prefix_cache=False)
    assert not bench.engine.has_work
    bench.check_idle()


def test_computing_the_last_token_is_no_news_and_draws_nothing():
    bench = finished_turn("length", 4, 8)
    assert bench.step() == []
    (piece,) = bench.plans[-1].slices
    assert (piece.start, piece.draws) == (7, ())
    assert bench.engine.stats().completion_tokens == NUM_OUTPUT


@pytest.mark.parametrize("num_blocks", [4, 5, 6])
def test_a_finished_sequence_gives_way_before_a_running_one(num_blocks):
    bench = EngineBench(num_blocks=num_blocks, max_len=4)
    bench.submit("a", [7], max_tokens=3)
    bench.submit("b", [1, 2, 3], max_tokens=1)
    bench.step()
    assert bench.reason("b") == "length"
    bench.step()
    assert len(bench.output("a")) == 2
    assert bench.engine.stats().preemptions == 0
    assert bench.num_cached(bench.tokens("b")) == {4: 2, 5: 3, 6: 4}[num_blocks]
    bench.run()
    assert bench.output("a") == bench.expected("a").tokens


def test_many_that_finish_together_are_all_cached():
    bench = EngineBench(num_blocks=60, block_size=2, max_running=4, max_step_tokens=5)
    for first in range(8):
        bench.submit(f"r{first}", [first, 1, 1], max_tokens=3)
    bench.run()
    for first in range(8):
        assert bench.num_cached(bench.tokens(f"r{first}")) == 6
