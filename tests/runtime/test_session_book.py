"""The book of sessions over a fake model: what is kept, for how long, and who may touch it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from radixcache import Namespace, Quota
from radixcache.tokens import pack_tokens
from runtime.errors import (
    InvalidRequest,
    InvalidSetting,
    PromptTooLong,
    ServerBusy,
    SessionBusy,
    SessionNotFound,
)
from runtime.sessions.book import SessionBook
from runtime.sessions.records import SessionLimits
from tests.support.engine_bench import EngineBench
from tests.support.session_bench import PREFIX, SessionBench


def test_what_a_session_computed_survives_a_stranger_and_the_next_turn_finds_it() -> None:
    bench = SessionBench()
    session = bench.create()
    assert bench.generate(session) == 0
    state = bench.book.state(session)
    assert state.held_tokens == 16  # 12 + 4, in blocks of 2
    bench.press()
    bench.append(session, [5, 6, 7])
    assert bench.generate(session) == 16
    bench.check_idle()


def test_what_is_not_held_may_go_and_is_computed_again_to_the_same_tokens() -> None:
    bench = SessionBench(max_held_share=0.0)
    session = bench.create()
    bench.generate(session)
    assert bench.book.state(session).held_tokens == 0
    bench.press()
    bench.append(session, [5, 6, 7])
    bench.generate(session)  # compared with what an empty cache gives
    bench.check_idle()


def test_a_tree_of_forks_gives_what_each_branch_gives_alone_and_holds_the_trunk_once() -> None:
    bench = SessionBench(num_blocks=64)
    trunk = bench.create()
    bench.generate(trunk)
    before = bench.tokens(trunk)
    calls = [bench.book.fork(trunk).session_id for _ in range(3)]
    for tool, call in enumerate(calls):
        bench.append(call, [30 + tool, 31])
        assert bench.generate(call, 6) == 16
    assert bench.tokens(trunk) == before
    each = [bench.book.state(s).held_tokens for s in (trunk, *calls)]
    assert each == [16, 24, 24, 24]
    assert bench.book.held_tokens == 16 + 3 * 8
    bench.book.close(calls[0])  # abandoned
    assert bench.book.held_tokens == 16 + 2 * 8
    results = [bench.tokens(call)[18:] for call in calls[1:]]
    bench.append(trunk, [*results[0], *results[1]])  # joined
    assert bench.generate(trunk) == 16
    bench.check_idle()


def test_a_fork_keeps_the_trunk_when_its_parent_is_closed() -> None:
    bench = SessionBench()
    parent = bench.create()
    bench.generate(parent)
    child = bench.book.fork(parent)
    bench.book.close(parent)
    assert (child.parent, child.held_tokens) == (parent, 16)
    bench.press()
    assert bench.generate(child.session_id) >= 15
    bench.check_idle()


def test_a_cancelled_turn_leaves_the_branch_as_it_was() -> None:
    bench = SessionBench()
    session = bench.create()
    bench.generate(session)
    before = bench.book.state(session)
    turn = bench.begin(session, 20)
    for _ in range(4):
        bench.engine.step()
    bench.engine.abort(turn.name)
    bench.book.cancel(turn)
    after = bench.book.state(session)
    assert (after.tokens, after.revision, after.is_busy) == (before.tokens, before.revision, False)
    bench.book.cancel(turn)  # a second time
    bench.book.finish(turn, pack_tokens([1]))  # too late
    assert bench.book.state(session).tokens == before.tokens
    bench.check_idle()


def test_closing_in_the_middle_of_a_turn_says_which_request_is_to_end() -> None:
    bench = SessionBench()
    session = bench.create()
    turn = bench.begin(session, 20)
    bench.engine.step()
    assert bench.book.close(session) == turn
    bench.engine.abort(turn.name)
    bench.book.finish(turn, pack_tokens([1]))
    assert len(bench.book) == 0
    bench.check_idle()


CALLS: list[tuple[str, Callable[[SessionBook, str, str], Any]]] = [
    ("state", lambda book, name, owner: book.state(name, owner=owner)),
    ("replace", lambda book, name, owner: book.replace(name, b"", revision=0, owner=owner)),
    ("fork", lambda book, name, owner: book.fork(name, owner=owner)),
    ("begin", lambda book, name, owner: book.begin(name, "x", owner=owner)),
    ("hold", lambda book, name, owner: book.hold(name, 1, owner=owner)),
    ("close", lambda book, name, owner: book.close(name, owner=owner)),
]


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[name for name, _ in CALLS])
def test_who_does_not_own_a_session_or_comes_too_late_finds_none(call: Any) -> None:
    bench = SessionBench(idle_s=10.0)
    theirs = bench.create(owner="them")
    closed = bench.create()
    bench.book.close(closed)
    expired = bench.create()
    bench.now = 9.9
    bench.book.hold(theirs, 5, owner="them")
    bench.now = 10.1
    for name in (theirs, closed, expired, "", "s99"):
        with pytest.raises(SessionNotFound, match="closed or has expired") as caught:
            call(bench.book, name, "")
        assert "them" not in str(caught.value)
    assert bench.book.state(theirs, owner="them").num_tokens == len(PREFIX)
    bench.check_idle()


def test_a_session_ends_when_it_is_idle_and_every_use_begins_its_time_anew() -> None:
    bench = SessionBench(idle_s=10.0)
    session = bench.create()
    for moment in (9.0, 18.0):
        bench.now = moment
        bench.append(session, [1])
    bench.now = 27.9
    assert bench.book.state(session).expires_in_s == pytest.approx(0.1)
    bench.now = 28.0
    with pytest.raises(SessionNotFound):
        bench.book.state(session)
    bench.check_idle()


def test_a_turn_outlasts_any_time() -> None:
    bench = SessionBench(idle_s=10.0)
    session = bench.create()
    turn = bench.begin(session, 4)
    bench.now = 1000.0
    assert bench.book.state(session).is_busy
    bench.run()
    bench.book.finish(turn, pack_tokens(bench.engine.output(turn.name)))
    assert bench.book.state(session).expires_in_s == 10.0
    bench.now = 1010.0
    bench.book.expire()
    assert len(bench.book) == 0
    bench.check_idle()


@pytest.mark.parametrize("tokens", [[], PREFIX])
def test_holding_what_was_never_computed_holds_nothing(tokens: list[int]) -> None:
    bench = SessionBench()
    session = bench.create(tokens)
    assert bench.book.hold(session, 5).held_tokens == 0
    assert bench.engine.cache.stats().num_holds == 0
    bench.check_idle()


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 3601, True, "5", None])
def test_a_time_that_is_none_is_refused_and_changes_no_hold(seconds: Any) -> None:
    bench = SessionBench()
    session = bench.create()
    bench.generate(session)
    before = bench.book.state(session)
    with pytest.raises(InvalidRequest) as caught:
        bench.book.hold(session, seconds)
    assert caught.value.param == "seconds"
    assert bench.book.state(session) == before
    bench.check_idle()


def test_beyond_the_share_a_branch_works_but_is_not_held_until_another_lets_go() -> None:
    bench = SessionBench(num_blocks=32, max_held_share=0.25)  # 8 blocks: 16 tokens
    first, second = bench.create(), bench.create([7, *PREFIX])
    bench.generate(first)
    bench.generate(second)
    assert bench.book.state(first).held_tokens == 16
    assert bench.book.state(second).held_tokens == 0
    bench.append(first, [1, 2, 3])
    bench.generate(first)  # holds what it held, as there is no room for more
    assert bench.book.state(first).held_tokens == 16
    bench.book.close(first)
    assert bench.book.hold(second, 60).held_tokens == 16
    bench.check_idle()


def test_sessions_leave_room_within_the_quota_of_their_namespace() -> None:
    bench = SessionBench(num_blocks=32, max_held_share=0.5)
    mine, free = Namespace(salt="mine"), Namespace(salt="free")
    bench.engine.cache.set_quota(mine, Quota(hard_limit=20))
    sessions = [bench.create([n, *PREFIX[1:]], namespace=mine) for n in (1, 2)]
    for session in sessions:
        bench.generate(session, 2)
    assert [bench.book.state(session).held_tokens for session in sessions] == [14, 0]
    bench.generate(other := bench.create(namespace=free), 2)
    assert bench.book.state(other).held_tokens == 14
    bench.engine.cache.set_quota(mine, None)
    bench.check_idle()


def test_forks_of_one_trunk_do_not_use_up_the_share() -> None:
    bench = SessionBench(num_blocks=32, max_held_share=0.25)
    trunk = bench.create()
    bench.generate(trunk)
    twins = [bench.book.fork(trunk) for _ in range(10)]
    assert {twin.held_tokens for twin in twins} == {16}
    bench.check_idle()


def test_sessions_are_counted_in_all_and_for_each_owner() -> None:
    bench = SessionBench(max_sessions=3, max_sessions_each=2)
    first = bench.create(owner="a")
    bench.create(owner="a")
    for refused in (lambda: bench.create(owner="a"), lambda: bench.book.fork(first, owner="a")):
        with pytest.raises(ServerBusy, match="2 sessions of yours"):
            refused()
    bench.create(owner="b")
    with pytest.raises(ServerBusy, match="3 sessions are open"):
        bench.create(owner="c")
    bench.book.close(first, owner="a")
    bench.create(owner="c")
    bench.check_idle()


def test_a_request_that_needs_the_whole_pool_is_served_although_sessions_hold_half() -> None:
    bench = SessionBench(num_blocks=32, max_len=64, max_held_share=0.5)
    names = [Namespace(salt=salt) for salt in "abc"]
    sessions = [bench.create(namespace=name) for name in names[:2]]
    for session in sessions:
        bench.generate(session)
    assert bench.book.held_tokens == 32
    bench.append(sessions[0], [1])  # the other was used longer ago
    bench.engine.submit("half", [1] * 44, namespace=names[2], max_tokens=1)
    bench.run()
    assert bench.engine.reason("half") == "length"
    assert [bench.book.state(s).held_tokens for s in sessions] == [16, 0]
    bench.engine.submit("whole", [2] * 60, namespace=names[2], max_tokens=1)
    bench.run()
    assert bench.engine.reason("whole") == "length"
    assert bench.book.held_tokens == 0
    for session in sessions:
        bench.generate(session)
    bench.check_idle()


def test_room_is_made_by_sessions_of_the_requests_own_namespace_first() -> None:
    bench = SessionBench(num_blocks=32, max_len=64)
    names = [Namespace(salt=salt) for salt in "ab"]
    sessions = [bench.create(namespace=name) for name in names]
    for session in sessions:
        bench.generate(session)
    bench.append(sessions[1], [1])
    bench.engine.submit("half", [1] * 44, namespace=names[1], max_tokens=1)
    bench.run()
    assert bench.engine.reason("half") == "length"
    assert [bench.book.state(s).held_tokens for s in sessions] == [16, 0]
    bench.check_idle()


def test_one_turn_at_a_time_and_no_change_from_an_old_state() -> None:
    bench = SessionBench()
    session = bench.create()
    old = bench.book.state(session)
    turn = bench.begin(session, 4)
    for refused in (lambda: bench.begin(session, 1), lambda: bench.append(session, [1])):
        with pytest.raises(SessionBusy, match="at the moment"):
            refused()
    twin = bench.book.fork(session)  # what was before the turn
    assert (twin.tokens, twin.is_busy) == (old.tokens, False)
    bench.run()
    bench.book.finish(turn, pack_tokens(bench.engine.output(turn.name)))
    with pytest.raises(SessionBusy, match="changed meanwhile"):
        bench.book.replace(session, b"", revision=old.revision)
    assert bench.book.state(session).num_tokens == len(PREFIX) + 4
    bench.check_idle()


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (pack_tokens([97]), InvalidRequest),
        (b"\xff\xff\xff\xff", InvalidRequest),  # -1
        (pack_tokens([1] * 40), PromptTooLong),
    ],
)
def test_tokens_that_no_request_could_have_are_refused_at_once(
    tokens: bytes, error: type[Exception]
) -> None:
    bench = SessionBench()
    session, book = bench.create([]), bench.book
    for refused in (
        lambda: book.create(tokens),
        lambda: book.replace(session, tokens, revision=0),
    ):
        with pytest.raises(error):
            refused()
    assert len(bench.book) == 1
    assert bench.tokens(session) == []
    bench.check_idle()


def test_a_session_goes_on_in_the_next_epoch_of_its_namespace() -> None:
    bench = SessionBench()
    name = Namespace(salt="a")
    session = bench.create(namespace=name)
    bench.generate(session)
    turn = bench.begin(session, 2)
    bench.run()
    following = bench.engine.cache.raise_epoch(name)
    bench.book.finish(turn, pack_tokens(bench.engine.output(turn.name)))
    state = bench.book.state(session)
    assert (state.namespace, state.held_tokens) == (following, 0)
    assert bench.generate(session) == 0
    assert bench.book.state(session).held_tokens == 22
    bench.check_idle()


def test_without_a_prefix_cache_sessions_work_and_hold_nothing() -> None:
    bench = SessionBench()
    engine = EngineBench(num_blocks=16, enable_prefix_cache=False)
    bench.book = SessionBook(engine.engine, new_id=lambda: "only")
    bench.engine = engine
    session = bench.create()
    for _ in range(2):
        assert bench.generate(session, 1) == 0
    assert bench.book.held_tokens == 0
    bench.check_idle()


@pytest.mark.parametrize(
    "limits",
    [
        {"max_sessions": 0},
        {"max_sessions_each": 0},
        {"max_held_share": 1.5},
        {"max_held_share": -0.1},
        {"idle_s": 0},
        {"max_hold_s": math.inf},
        {"idle_s": math.nan},
    ],
)
def test_limits_that_cant_be_are_named(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(limits))):
        SessionLimits(**limits)
