"""Those that decode, in rows: the same plans and outputs, and next to nothing done for each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixcache import CallerError, RadixCache
from runtime.errors import EngineFailure
from runtime.plan import Rows, StepPlan
from runtime.scheduler.rows import DecodeRows
from runtime.scheduler.scheduler import Scheduler
from tests.support.engine_bench import EngineBench
from tests.support.planted import PlantedBug


def decoding(num_requests: int, **sizes: Any) -> EngineBench:
    """An engine in which so many requests have just drawn their first token."""
    bench = EngineBench(**{"num_blocks": 400, "block_size": 4} | sizes)
    for index in range(num_requests):
        bench.submit(f"r{index}", [index + 1] * (5 + index), max_tokens=20 + index)
    bench.step()
    return bench


def test_a_step_in_which_all_decode_is_planned_as_rows() -> None:
    bench = decoding(3)
    bench.step()
    plan = bench.plans[-1]
    assert plan.rows is not None
    assert (len(plan.rows), plan.pieces, plan.num_slices) == (3, (), 3)
    assert [piece.start for piece in plan.slices] == [5, 6, 7]
    assert [piece.draws[0].position for piece in plan.slices] == [6, 7, 8]


def test_a_prompt_is_planned_beside_rows_and_joins_them() -> None:
    bench = decoding(2)
    bench.submit("late", [9] * 6, max_tokens=3)
    bench.step()
    plan = bench.plans[-1]
    assert plan.rows is not None
    assert plan.rows.request_ids == ("r0", "r1")
    assert [piece.request_id for piece in plan.pieces] == ["late"]
    bench.step()
    rows = bench.plans[-1].rows
    assert rows is not None
    assert rows.request_ids == ("r0", "r1", "late")
    bench.run()
    assert bench.output("late") == bench.expected("late").tokens


def test_the_cache_is_asked_only_at_the_edges_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"append": 0, "commit": 0}
    for name in calls:
        own = getattr(RadixCache, name)

        def counted(*args: Any, own: Any = own, name: str = name) -> Any:
            calls[name] += 1
            return own(*args)

        monkeypatch.setattr(RadixCache, name, counted)
    bench = decoding(4, block_size=8)
    bench.step()
    calls.update(append=0, commit=0)
    for _ in range(8):
        bench.step()
    assert calls == {"append": 2 * 4, "commit": 4}


@pytest.mark.parametrize(
    "asks",
    [{"logprobs": 0}, {"presence_penalty": 1.0}, {"logit_bias": ((1, 1.0),)}],
    ids=lambda asks: next(iter(asks)),
)
def test_who_asks_for_more_than_a_token_stays_a_slice(asks: dict[str, Any]) -> None:
    bench = EngineBench(num_blocks=40, block_size=4)
    bench.submit("plain", [1, 2, 3], max_tokens=5)
    bench.submit("more", [4, 5, 6], max_tokens=5, **asks)
    bench.step()
    bench.step()
    rows = bench.plans[-1].rows
    assert rows is not None
    assert rows.request_ids == ("plain",)
    bench.run()


def test_rows_draw_at_random_with_the_noise_of_their_place() -> None:
    bench = EngineBench(num_blocks=40, block_size=4)
    bench.submit("cold", [1, 2, 3], max_tokens=5)
    bench.submit("hot", [4, 5, 6], max_tokens=5, temperature=1.0, seed=7)
    bench.step()
    bench.step()
    rows = bench.plans[-1].rows
    assert rows is not None
    assert rows.drawn_at_random == (1,)
    assert (rows.draw(1).seed, rows.draw(1).position) == (7, 4)
    assert rows.draw(1) == bench.plans[-1].slices[1].draws[0]


def test_a_step_that_fails_is_computed_again_as_slices_and_goes_on_in_rows() -> None:
    bench = decoding(3)
    bench.step()
    bench.executor.fail_at = {len(bench.plans) + 1}
    bench.executor.fail_for = {"r1"}
    bench.step()
    bench.step()
    rows = bench.plans[-1].rows
    assert rows is not None
    assert set(rows.request_ids) == {"r0", "r2"}
    assert bench.reason("r1") == "error"
    bench.run()
    for name in ("r0", "r2"):
        assert bench.output(name) == bench.expected(name).tokens


def test_a_settled_sequence_has_its_computed_tokens_on_its_lease_and_can_be_forked() -> None:
    bench = decoding(2, block_size=8)
    bench.step()
    bench.step()
    scheduler = bench.engine.scheduler
    sequence = scheduler.running[0]
    assert sequence.lease is not None
    assert sequence.lease.num_tokens < sequence.num_computed
    scheduler.settle(sequence)
    assert sequence.lease.num_tokens == sequence.num_computed
    fork = bench.cache.fork(sequence.lease)
    while bench.engine.has_work:
        bench.engine.step()  # the bench's own would find that the fork has no sequence
        bench.cache.check()
    assert not bench.executor.wrong
    assert any(copy.src == fork.block_table[-1] for plan in bench.plans for copy in plan.copies)
    bench.cache.release(fork)


def test_a_plan_with_rows_survives_a_file() -> None:
    bench = decoding(3)
    bench.step()
    plan = bench.plans[-1]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
    assert again == plan
    assert again.slices == plan.slices


@given(
    block_size=st.sampled_from((1, 2, 3, 8)),
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=12),
    num_blocks=st.integers(24, 60),
)
@settings(max_examples=60, deadline=None)
def test_sequences_that_come_and_go_give_what_each_gives_alone(
    block_size: int, lengths: list[tuple[int, int]], num_blocks: int
) -> None:
    bench = EngineBench(num_blocks=num_blocks, block_size=block_size, max_running=6)
    for index, (prompt_len, max_tokens) in enumerate(lengths):
        bench.submit(f"r{index}", [index % 3] * prompt_len, max_tokens=max_tokens)
        if index % 2:
            bench.step()
    bench.run()
    for index in range(len(lengths)):
        assert bench.output(f"r{index}") == bench.expected(f"r{index}").tokens


def test_a_row_that_is_not_its_sequences_is_found() -> None:
    bench = decoding(3)
    bench.step()
    bench.engine.scheduler.running[1].output[-1] += 1
    with pytest.raises(EngineFailure, match="token"):
        bench.engine.check()


BUGS = (
    PlantedBug(
        "whoever takes an empty row keeps the table of its old one",
        (DecodeRows, "leave"),
        edit=("self._tables[row] = self._tables[last]", "pass"),
        seen_by="check",
    ),
    PlantedBug(
        "a row's new block is not noted",
        (DecodeRows, "add_block"),
        edit=("= table[-1]", "= table[0]"),
        seen_by="check content",
    ),
    PlantedBug(
        "a row's lease lacks the token that fills a block",
        (Scheduler, "_write_newest"),
        edit=("(*starting, *filling)", "(*starting, *filling[1:])"),
        seen_by="commit",
    ),
    PlantedBug(
        "what many have computed alike is read from blocks that were given up",
        (Scheduler, "apply"),
        edit=(
            "if self.cache.commit(sequence.lease, sequence.num_tokens).num_twins:",
            "if self.cache.commit(sequence.lease, sequence.num_tokens).num_twins > 9:",
        ),
        seen_by="check content",
    ),
    PlantedBug(
        "a row's noise is that of the token before",
        (Rows, "draw"),
        edit=("position=position + 1", "position=position"),
        seen_by="a test of draws",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_rows_is_seen(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    with pytest.raises((AssertionError, CallerError, EngineFailure)):
        play_all()


def play_all() -> None:
    """What between them sees each of the bugs."""
    test_rows_draw_at_random_with_the_noise_of_their_place()
    test_those_that_decode_alike_share_the_blocks_that_one_of_them_publishes()
    bench = decoding(4)
    bench.run()


def test_those_that_decode_alike_share_the_blocks_that_one_of_them_publishes() -> None:
    bench = EngineBench(num_blocks=40, block_size=4)
    for name in "ab":
        bench.submit(name, [1, 2, 3], max_tokens=12)
    bench.run()
    assert bench.output("a") == bench.output("b") == bench.expected("a").tokens
    assert bench.engine.stats().cache.twin_blocks


def test_the_bugs_are_none_without_an_edit() -> None:
    play_all()
