"""A public prefix: every namespace gets it by copy, and nothing else crosses."""

from __future__ import annotations

import pytest

from radixcache import Namespace
from runtime.llm import LLM
from runtime.request import Request, SamplingParams, pack_prompt
from tests.support.engine_bench import EngineBench

SYSTEM = list(range(10))
ACME, EVIL = Namespace(salt="acme"), Namespace(salt="evil")


@pytest.mark.parametrize(("block_size", "whole"), [(1, 10), (2, 10), (4, 8), (16, 0)])
def test_each_tenant_finds_the_public_prefix_at_its_first_request(block_size: int, whole: int):
    bench = EngineBench(num_blocks=128 // block_size, block_size=block_size)
    bench.share_publicly(SYSTEM)
    for name, namespace in (("a", ACME), ("b", EVIL), ("c", Namespace())):
        bench.submit(name, [*SYSTEM, 50, 51, 52], namespace=namespace, max_tokens=3)
        bench.run()
        assert bench.news[name][-1].usage.cached_tokens == whole
        assert bench.output(name) == bench.expected(name).tokens
        assert len(bench.plans[-3].copies) <= 10


def test_what_was_copied_is_the_tenants_own_from_then_on():
    bench = EngineBench(num_blocks=128, block_size=2)
    bench.share_publicly(SYSTEM)
    for name, first in (("a", 50), ("b", 60)):
        bench.submit(name, [*SYSTEM, first, 51], namespace=ACME, max_tokens=1)
        bench.run()
    assert bench.num_cached([*SYSTEM, 50], ACME) == 10
    copies = [len(plan.copies) for plan in bench.plans]
    assert sum(copies) == 5  # for the first request alone


def test_nothing_beyond_the_public_prefix_crosses():
    bench = EngineBench(num_blocks=128)
    bench.share_publicly(SYSTEM)
    for name, namespace in (("a", ACME), ("b", EVIL)):
        bench.submit(name, [*SYSTEM, 50, 51, 52], namespace=namespace, max_tokens=1)
        bench.run()
        assert bench.news[name][-1].usage.cached_tokens == len(SYSTEM)


def test_a_prompt_that_is_the_public_prefix_computes_its_last_token():
    bench = EngineBench(num_blocks=128, block_size=2)
    bench.share_publicly(SYSTEM)
    bench.submit("a", SYSTEM, namespace=ACME, max_tokens=2)
    bench.run()
    usage = bench.news["a"][-1].usage
    assert (usage.cached_tokens, usage.computed_tokens) == (9, 1)
    assert bench.output("a") == bench.expected("a").tokens


def test_a_prompt_that_leaves_the_public_prefix_uses_it_up_to_there():
    bench = EngineBench(num_blocks=128, block_size=2)
    bench.share_publicly(SYSTEM)
    bench.submit("a", [*SYSTEM[:5], 90, 91], namespace=ACME, max_tokens=2)
    bench.run()
    assert bench.news["a"][-1].usage.cached_tokens == 4
    assert bench.output("a") == bench.expected("a").tokens


def test_a_public_prefix_is_held_however_full_the_pool_gets():
    bench = EngineBench(num_blocks=24, block_size=1)
    bench.share_publicly(SYSTEM)
    for count in range(6):
        bench.submit(f"r{count}", range(14 * count + 11, 14 * count + 21), max_tokens=2)
    bench.run()
    bench.submit("a", [*SYSTEM, 50], namespace=ACME, max_tokens=1)
    bench.run()
    assert bench.news["a"][-1].usage.cached_tokens == len(SYSTEM)


def test_the_real_models_answers_are_the_same_bits_with_a_public_prefix():
    llm = LLM(num_blocks=64, dtype="float32")
    engine = llm.runtime.engine
    tokens = llm.runtime.prompt_tokens("You are a helpful assistant who answers briefly. " * 4)
    prompt = [*tokens, *llm.runtime.prompt_tokens(" What is the capital of France?")]

    def answer() -> tuple[list[int], list[float], int]:
        sampling = SamplingParams(max_tokens=8, logprobs=0, temperature=1.0, seed=3)
        request = Request(
            request_id="it", prompt=pack_prompt(prompt), sampling=sampling, namespace=ACME
        )
        engine.submit(request)
        news = []
        while engine.has_work:
            news += engine.step()
        engine.check()
        told = [told.token for output in news for told in output.logprobs]
        return [t for n in news for t in n.token_ids], told, news[-1].usage.cached_tokens

    cold = answer()
    engine.cache.drop(ACME)
    engine.submit(engine.share_publicly(pack_prompt(tokens)))
    while engine.has_work:
        engine.step()
    held = engine.hold_public()
    assert held == len(tokens) // 16 * 16
    warm = answer()
    assert (cold[2], warm[2]) == (0, held)
    assert warm[:2] == cold[:2]
