"""The longest sequence of a namespace, beside a public prefix and within a quota."""

from __future__ import annotations

import pytest

from radixcache import Namespace, Quota
from radixcache.tokens import pack_tokens
from runtime.errors import PromptTooLong
from runtime.scheduler.ordering import ORDERINGS
from tests.support.engine_bench import EngineBench
from tests.support.session_bench import SessionBench

SYSTEM = list(range(8))
ACME, EVIL = Namespace(salt="acme"), Namespace(salt="evil")


def bench_of(*, block_size: int, public: bool, hard: int | None) -> EngineBench:
    bench = EngineBench(num_blocks=32 // block_size, block_size=block_size)
    if hard is not None:
        bench.cache.set_quota(ACME, Quota(hard_limit=hard // block_size))
    if public:
        bench.share_publicly(SYSTEM)
    return bench


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(("hard", "most"), [(None, 32), (16, 16), (28, 28)])
def test_what_is_accepted_is_served_to_its_end_whatever_its_length(
    block_size: int, public: bool, hard: int | None, most: int
) -> None:
    if public:
        most = min(most, 32 - len(SYSTEM))
    bench = bench_of(block_size=block_size, public=public, hard=hard)
    assert bench.engine.longest_of(ACME) == most
    bench.submit("other", [40, 41, 42], namespace=EVIL, max_tokens=12)
    for length in range(1, 33):
        prompt = [*SYSTEM, *range(10, 34)][:length]
        if length >= most:
            with pytest.raises(PromptTooLong, match=f"at most {most - 1} "):
                bench.submit(f"a{length}", prompt, namespace=ACME)
            continue
        bench.submit(f"a{length}", prompt, namespace=ACME, max_tokens=None)
        bench.run()
        assert bench.engine.stats().finished.get("error") is None
        assert len(prompt) + len(bench.output(f"a{length}")) == most
    bench.check_idle()


def test_a_limit_that_is_the_tenants_own_is_told_as_such() -> None:
    bench = bench_of(block_size=2, public=False, hard=16)
    with pytest.raises(PromptTooLong, match=r"quotas leave you.*ask the operator"):
        bench.submit("a", [5] * 16, namespace=ACME)
    with pytest.raises(PromptTooLong, match=r"max_len 32.*K/V memory"):
        bench.submit("a", [5] * 32, namespace=EVIL)


def test_a_tenant_without_any_block_may_have_prompts_of_no_token() -> None:
    bench = bench_of(block_size=2, public=False, hard=0)
    with pytest.raises(PromptTooLong, match=r"at most 0 \(the 0 that") as caught:
        bench.submit("a", [5], namespace=ACME)
    assert caught.value.max_tokens == 0


def test_what_others_shares_leave_no_room_for_says_so() -> None:
    bench = EngineBench(num_blocks=16)
    bench.cache.set_quota(EVIL, Quota(soft_limit=8))
    bench.submit("theirs", [5] * 7, namespace=EVIL, max_tokens=1)
    bench.run()
    bench.submit("mine", [6] * 12, namespace=ACME, max_tokens=1)
    bench.run()
    news = bench.news["mine"][-1]
    assert news.finish_reason == "error"
    assert news.error is not None
    assert news.error.startswith("the pool has no room for the request: ")
    bench.check_idle()


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_who_finds_no_room_ends_and_not_who_waits_beside_it(ordering: str) -> None:
    """An ordering may try the large one first, though the small one came first."""
    bench = EngineBench(num_blocks=16, ordering=ordering)
    bench.cache.set_quota(EVIL, Quota(soft_limit=8))
    bench.submit("theirs", [5] * 7, namespace=EVIL, max_tokens=1)
    bench.submit("head", [6] * 3, namespace=ACME, max_tokens=1)
    bench.run()
    bench.submit("small", [7, 8], namespace=ACME, max_tokens=1, priority=1)
    bench.submit("large", [6] * 12, namespace=ACME, max_tokens=1)
    bench.run()
    assert [bench.reason(name) for name in ("small", "large")] == ["length", "error"]
    bench.check_idle()


def test_a_session_is_as_long_as_its_tenant_may_generate_from() -> None:
    bench = SessionBench(num_blocks=32, max_len=40)
    bench.engine.cache.set_quota(ACME, Quota(hard_limit=8))
    session = bench.create([5] * 15, namespace=ACME)
    bench.generate(session, 1)
    with pytest.raises(PromptTooLong, match="would have 17 tokens, and at most 15 leave room"):
        bench.append(session, [6])
    for too_long in (bench.book.create, lambda *a, **k: bench.book.retain(*a, 5.0, **k)):
        with pytest.raises(PromptTooLong, match="at most 15 "):
            too_long(pack_tokens([7] * 16), namespace=ACME)
    bench.create([7] * 39)  # whose quota is nobody else's
