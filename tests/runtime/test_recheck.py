"""One finished request in N is computed again: what differs is found, told, and found no more."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from radixcache import Namespace, PrefixKey
from runtime.recheck import CHUNK_TOKENS, MAX_PENDING, RECHECK, SCRATCH, Recheck, RecheckStats
from runtime.scheduler.public import PUBLIC
from tests.support.engine_bench import EngineBench

PROMPT = list(range(1, 12))


class RecheckBench(EngineBench):
    """An engine bench whose finished requests are checked."""

    def __init__(self, *, every: int = 1, num_blocks: int = 64, **fields: Any) -> None:
        super().__init__(**{"block_size": 4, **fields}, num_blocks=num_blocks)
        self.recheck = Recheck(self.engine, self.executor, every=every)

    def rest(self, max_calls: int = 1000) -> int:
        """Let the engine rest until nothing is left to check; return how often it was called."""
        calls = 0
        while self.recheck.has_work:
            assert calls < max_calls
            self.recheck.advance()
            calls += 1
            self.check_idle()
            assert not self.executor.wrong
        return calls

    def rest_behind_public(self) -> None:
        """Let it rest; a public prefix may be held, and let go."""
        while self.recheck.has_work:
            self.recheck.advance()
            self.engine.check()

    def cached_block(self, tokens: list[int], place: int, **names: Any) -> int:
        """The id of a cached block of these tokens."""
        return self.cache.match(PrefixKey.of(tokens, Namespace(**names))).block_ids[place]

    def counts(self) -> dict[str, int]:
        """What came of the checks, nothing left out but zeros."""
        stats = self.recheck.stats
        return {name: n for name in stats.__struct_fields__ if (n := getattr(stats, name))}


def test_a_healthy_engine_is_found_so():
    bench = RecheckBench()
    for name, namespace in (("a", Namespace()), ("b", Namespace()), ("c", Namespace(salt="s"))):
        bench.submit(name, [*PROMPT, ord(name) - 80], max_tokens=8, namespace=namespace)
    bench.run()
    bench.rest()
    assert bench.counts() == {"same": 3, "tokens": 3 * 20}
    assert bench.num_cached(bench.tokens("a")) == 20


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("slot", [0, 3])
def test_a_block_that_was_spoiled_is_found_told_and_found_no_more(place, slot, caplog):
    bench = RecheckBench()
    bench.submit("a", PROMPT, max_tokens=8)
    bench.submit("other tenant's", PROMPT, max_tokens=8, namespace=Namespace(salt="s"))
    bench.run()
    block = bench.cached_block(bench.tokens("a"), place)
    bench.executor.spoil(block, slot)
    with caplog.at_level(logging.ERROR, "radixcache"):
        bench.rest()
    (line,) = caplog.messages
    assert f"{RECHECK}a: " in line
    assert f"layer 0, block {block} (tokens {4 * place} to {4 * place + 3})" in line
    assert "epoch 1" in line
    assert bench.counts()["kv"] == 1
    assert bench.counts()["same"] == 1
    assert bench.num_cached(bench.tokens("a")) == 0
    assert bench.num_cached(PROMPT, Namespace(salt="s")) == 8
    bench.submit("b", PROMPT, max_tokens=8)
    bench.run()
    assert bench.output("b") == bench.expected("b").tokens
    assert bench.news["b"][-1].usage.cached_tokens == 0
    assert bench.num_cached(PROMPT, Namespace(epoch=1)) == 8


def test_without_a_recheck_a_spoiled_block_is_read():
    bench = RecheckBench(every=2)
    bench.submit("a", PROMPT, max_tokens=8)
    bench.run()
    bench.executor.spoil(bench.cached_block(PROMPT, 0))
    assert not bench.recheck.has_work
    bench.submit("b", PROMPT, max_tokens=1)
    with pytest.raises(AssertionError, match="holds"):
        bench.run()


def test_one_in_n_is_checked():
    bench = RecheckBench(every=3)
    for i in range(10):
        bench.submit(f"r{i}", [*PROMPT, i], max_tokens=2)
    bench.run()
    bench.rest()
    assert bench.counts()["same"] == 3


def test_what_did_not_end_of_itself_is_not_checked():
    bench = RecheckBench()
    bench.submit("a", PROMPT, max_tokens=8)
    bench.step()
    bench.abort("a")
    bench.submit("b", PROMPT, max_tokens=8)
    bench.executor.fail_for.add("b")
    bench.run()
    assert not bench.recheck.has_work


@pytest.mark.parametrize("block_size", [4, 64])
def test_a_long_request_is_checked_in_short_steps_that_may_be_interrupted(block_size):
    bench = RecheckBench(num_blocks=200, block_size=block_size, max_len=400)
    prompt = [i % 90 for i in range(300)]
    bench.submit("long", prompt, max_tokens=5)
    bench.run()
    calls = 0
    while bench.recheck.has_work:
        bench.recheck.advance()
        calls += 1
        (*_, plan) = bench.plans
        assert sum(len(piece.tokens) // 4 for piece in plan.slices) <= CHUNK_TOKENS
        bench.submit(f"short {calls}", [95, calls], max_tokens=1)
        bench.step()
        if calls == 3:
            bench.recheck._every = 10**6
    assert bench.counts()["same"] >= 1
    assert calls >= 300 // CHUNK_TOKENS
    bench.run()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_blocks_of_any_size_are_checked_to_the_last(block_size):
    bench = RecheckBench(num_blocks=1024 // block_size, block_size=block_size, max_len=300)
    bench.submit("a", [i % 90 for i in range(150)], max_tokens=100)
    bench.submit("many", [i % 7 for i in range(40)], max_tokens=30, n=3)
    bench.run()
    bench.rest()
    assert bench.counts()["same"] == 4
    bench = RecheckBench(num_blocks=1024 // block_size, block_size=block_size, max_len=300)
    bench.submit("a", [i % 90 for i in range(150)], max_tokens=100)
    bench.run()
    last = bench.cached_block(bench.tokens("a"), -1)
    bench.executor.spoil(last, block_size - 1)
    bench.rest()
    assert bench.counts()["kv"] == 1


def test_a_token_that_is_drawn_otherwise_is_told_and_nothing_is_quarantined(monkeypatch, caplog):
    bench = RecheckBench()
    bench.submit("a", PROMPT, max_tokens=8)
    bench.run()
    monkeypatch.setattr("tests.support.fake_executor.next_token", lambda *a, **b: 5)
    bench.rest()
    assert bench.counts().keys() == {"sampled", "tokens"}
    assert "token 11 is drawn otherwise" in caplog.text
    assert bench.num_cached(PROMPT) == 8


def test_blocks_that_were_evicted_and_computed_anew_are_compared_from_the_begin():
    bench = RecheckBench(num_blocks=40, max_len=100)
    bench.submit("a", [i % 90 for i in range(80)], max_tokens=5)
    bench.run()
    bench.recheck.advance()
    bench.recheck._every = 10**6
    bench.cache.evict(40)
    bench.submit("again", [i % 90 for i in range(80)], max_tokens=5)
    bench.run()
    bench.executor.spoil(bench.cached_block(bench.tokens("a"), 0))
    bench.rest()
    assert bench.counts()["kv"] == 1


def test_what_is_evicted_before_its_turn_is_given_up():
    bench = RecheckBench()
    for name in "ab":
        bench.submit(name, PROMPT, max_tokens=8)
    bench.run()
    bench.cache.evict(64)
    bench.rest()
    assert bench.counts() == {"abandoned": 2}


def test_a_check_that_is_evicted_under_again_and_again_is_given_up():
    bench = RecheckBench(num_blocks=40, max_len=100)
    bench.submit("a", [i % 90 for i in range(80)], max_tokens=5)
    bench.run()
    bench.recheck._every = 10**6
    for i in range(20):
        if not bench.recheck.has_work:
            break
        bench.recheck.advance()
        bench.submit(f"r{i}", [91, i], max_tokens=3)
        bench.run()
        bench.cache.evict(1)
    assert bench.counts()["abandoned"] == 1


def test_more_than_can_be_kept_up_with_are_forgotten_oldest_first():
    bench = RecheckBench()
    for i in range(MAX_PENDING + 3):
        bench.submit(f"r{i}", [*PROMPT, i], max_tokens=1)
    bench.run()
    assert bench.counts() == {"abandoned": 3}
    bench.rest()
    assert bench.counts()["same"] == MAX_PENDING


def test_a_failed_step_ends_the_check_alone(caplog):
    bench = RecheckBench()
    bench.submit("a", PROMPT, max_tokens=8)
    bench.run()
    bench.executor.fail_at.add(len(bench.plans) + 1)
    bench.recheck.advance()
    assert bench.counts() == {"abandoned": 1}
    assert "recheck of a was given up: plan" in caplog.text
    bench.check_idle()


def test_a_request_of_less_than_a_block_is_no_warning_in_the_log(caplog):
    bench = RecheckBench()
    bench.submit("a", [1], max_tokens=2)
    bench.run()
    bench.rest()
    assert bench.counts() == {"abandoned": 1}
    assert not caplog.messages


def test_without_room_for_a_chunk_a_check_is_given_up_and_nothing_is_evicted():
    bench = RecheckBench(num_blocks=6, max_len=24)
    bench.submit("a", [*PROMPT, *PROMPT[:9]], max_tokens=4)
    bench.run()
    assert bench.cache.stats().num_free == 0
    bench.rest()
    assert bench.counts() == {"abandoned": 1}
    assert bench.num_cached(bench.tokens("a")) == 24


def test_others_pending_in_a_namespace_under_quarantine_are_given_up():
    bench = RecheckBench()
    for name in "ab":
        bench.submit(name, PROMPT, max_tokens=8)
    bench.run()
    bench.executor.spoil(bench.cached_block(PROMPT, 1))
    bench.rest()
    assert bench.counts()["kv"] == bench.counts()["abandoned"] == 1


def test_a_request_that_waits_while_the_epoch_is_raised_goes_on_in_the_next():
    bench = RecheckBench(max_running=1, max_step_tokens=40)
    bench.submit("runs", PROMPT, max_tokens=8)
    bench.submit("waits", PROMPT, max_tokens=8)
    bench.step()
    bench.cache.raise_epoch(Namespace())
    bench.run()
    for name in ("runs", "waits"):
        assert bench.output(name) == bench.expected(name).tokens
    assert bench.num_cached(PROMPT, Namespace(epoch=1)) == 8


def test_a_wrong_copy_of_the_public_prefix_takes_the_public_prefix_out_of_use():
    bench = RecheckBench()
    bench.share_publicly(PROMPT)
    bench.rest_behind_public()
    bench.submit("a", [*PROMPT, 77, 78, 79], max_tokens=3, namespace=Namespace(salt="s"))
    bench.run()
    assert bench.news["a"][-1].usage.cached_tokens == 8
    bench.executor.spoil(bench.cached_block(PROMPT, 1, salt="s"))
    bench.rest_behind_public()
    assert bench.cache.epochs.is_stale(PUBLIC)
    assert bench.cache.epochs.is_stale(Namespace(salt="s"))
    bench.num_public = 0
    bench.submit("b", [*PROMPT, 77, 78, 79], max_tokens=3, namespace=Namespace(salt="t"))
    bench.run()
    assert bench.news["b"][-1].usage.cached_tokens == 0


def test_after_a_wrong_public_prefix_its_copies_are_found_no_more_and_nothing_stays_held():
    bench = RecheckBench()
    bench.share_publicly(PROMPT)
    bench.rest_behind_public()
    for salt in "stu":
        own = [] if salt == "u" else PROMPT
        bench.submit(salt, [*own, 77, 78, 79, 80], max_tokens=3, namespace=Namespace(salt=salt))
    bench.run()
    bench.rest_behind_public()
    assert bench.counts()["same"] == 4
    bench.submit("again", [*PROMPT, 77], max_tokens=3, namespace=Namespace(salt="s"))
    bench.run()
    for salt in "st":  # as if both were copied from a spoiled block
        bench.executor.spoil(bench.cached_block(PROMPT, 1, salt=salt))
    bench.rest_behind_public()
    stale = {salt for salt in "stu" if bench.cache.epochs.is_stale(Namespace(salt=salt))}
    assert stale == {"s", "t"}  # "u" has no copy
    assert bench.cache.epochs.is_stale(PUBLIC)
    bench.num_public = 0
    bench.check_idle()


def test_checking_counts_no_queries_and_leaves_no_namespace_behind():
    bench = RecheckBench()
    bench.submit("a", PROMPT, max_tokens=8)
    bench.run()
    before = bench.cache.stats()
    bench.rest()
    after = bench.cache.stats()
    assert (after.query_tokens, after.hit_tokens) == (before.query_tokens, before.hit_tokens)
    assert SCRATCH not in bench.cache.namespaces()
    assert bench.recheck.stats == RecheckStats(same=1, tokens=16)


def test_what_many_ask_for_after_a_quarantine_is_computed_once():
    bench = RecheckBench(num_blocks=200, max_running=8)
    bench.submit("a", PROMPT, max_tokens=8)
    bench.run()
    bench.executor.spoil(bench.cached_block(PROMPT, 0))
    bench.rest()
    for i in range(4):
        bench.submit(f"r{i}", [*PROMPT[:8], 60 + i], max_tokens=2)
    bench.run()
    assert sum(bench.news[f"r{i}"][-1].usage.cached_tokens for i in range(4)) == 3 * 8
