"""What the end of a session tells the cache: what it alone computed goes first."""

from __future__ import annotations

import pytest

from radixcache import PrefixKey
from radixcache.tokens import pack_tokens, unpack_tokens
from tests.support.session_bench import PREFIX, SessionBench


def evicted_first(bench: SessionBench) -> list[int]:
    """The tokens that go next, as a whole prefix."""
    cache = bench.engine.engine.cache
    nodes = {node.node_id: node for node in cache.view().nodes}
    node = next(node for node in nodes.values() if node.evict_order == 0)
    path: list[int] = []
    above: int | None = node.node_id
    while above is not None:
        path[:0] = unpack_tokens(nodes[above].tokens)
        above = nodes[above].parent
    return path


def test_what_a_closed_session_alone_computed_goes_first() -> None:
    bench = SessionBench()
    bench.ask([*PREFIX, 7, 7])
    bench.ask([8] * 6)
    session = bench.create([*PREFIX, 50, 51, 52, 53])
    bench.generate(session)
    branch = bench.tokens(session)
    bench.book.close(session)
    assert evicted_first(bench) == branch[: len(branch) - len(branch) % 2]
    bench.engine.engine.cache.evict(3)
    assert bench.engine.engine.cache.match_len(PrefixKey.of(branch)) == len(PREFIX) + 2
    bench.engine.engine.cache.evict(1)
    assert bench.engine.engine.cache.match_len(PrefixKey.of(branch)) == len(PREFIX)
    assert evicted_first(bench) == [*PREFIX, 7, 7]


def test_what_it_found_when_it_began_is_not_abandoned_with_it() -> None:
    bench = SessionBench()
    bench.ask(PREFIX)
    bench.ask([8] * 6)
    session = bench.create([*PREFIX, 50, 51])
    bench.generate(session)
    bench.book.close(session)
    bench.engine.engine.cache.evict(3)
    assert bench.engine.engine.cache.match_len(PrefixKey.of(PREFIX)) == len(PREFIX)
    assert evicted_first(bench) == [8] * 6


def test_what_it_found_when_it_began_anew_is_not_abandoned_with_it() -> None:
    bench = SessionBench()
    session = bench.create([9] * 6)
    bench.generate(session)
    bench.ask(PREFIX)
    bench.ask([8] * 6)
    revision = bench.book.state(session).revision
    bench.book.replace(session, pack_tokens([*PREFIX, 50, 51]), revision=revision)
    bench.generate(session)
    bench.book.close(session)
    marked = [node for node in bench.engine.engine.cache.tree.walk() if node.is_abandoned]
    assert min(node.start for node in marked) == len(PREFIX)
    bench.check_idle()


def test_a_branch_that_is_closed_leaves_what_its_trunk_and_twins_go_on_from() -> None:
    bench = SessionBench(num_blocks=64)
    trunk = bench.create()
    bench.generate(trunk)
    twin, other = bench.book.fork(trunk).session_id, bench.book.fork(trunk).session_id
    for session, first in ((twin, 30), (other, 40)):
        bench.append(session, [first, 61])
        bench.generate(session)
        bench.book.hold(session, 0)
    bench.book.hold(trunk, 0)
    shared, branch = bench.tokens(trunk), bench.tokens(twin)
    bench.book.close(twin)  # nothing is held: only the book knows who goes on
    assert evicted_first(bench)[: len(shared)] == shared
    while bench.engine.engine.cache.match_len(PrefixKey.of(branch)) > len(shared):
        assert evicted_first(bench) == branch[: len(evicted_first(bench))]
        bench.engine.engine.cache.evict(1)
    assert bench.engine.engine.cache.match_len(PrefixKey.of(bench.tokens(other))) > len(shared)


def test_a_session_that_expires_says_nothing_of_whether_anybody_comes_back() -> None:
    bench = SessionBench(idle_s=10)
    bench.ask([8] * 6)
    session = bench.create()
    bench.generate(session)
    bench.now = 11.0
    bench.book.expire()
    assert len(bench.book) == 0
    assert evicted_first(bench) == [8] * 6


@pytest.mark.parametrize("closes", [True, False])
def test_what_came_of_a_turn_that_was_left_goes_first(closes: bool) -> None:
    bench = SessionBench()
    bench.ask([8] * 6)
    session = bench.create()
    turn = bench.begin(session, 20)
    for _ in range(9):
        bench.engine.step()
    came = bench.engine.output(turn.name)
    assert len(came) >= 8
    if closes:
        assert bench.book.close(session) is not None
    bench.engine.abort(turn.name)
    bench.book.cancel(turn, pack_tokens(came))
    bench.book.check()
    left = [*PREFIX, *came]
    published = bench.engine.cache.match_len(PrefixKey.of(left))
    assert evicted_first(bench) == left[:published]
    bench.engine.cache.evict((published - len(PREFIX)) // 2)
    assert bench.engine.cache.match_len(PrefixKey.of(left)) == len(PREFIX)
    assert evicted_first(bench) == (PREFIX if closes else [8] * 6)
    bench.check_idle()


def test_what_a_twin_goes_on_from_is_not_abandoned_with_a_turn_that_was_left() -> None:
    bench = SessionBench()
    session = bench.create()
    twin = bench.book.fork(session).session_id
    bench.generate(twin, 4)  # the same tokens: nothing is drawn by chance
    bench.book.hold(twin, 0)
    turn = bench.begin(session, 20)
    while len(bench.engine.output(turn.name)) < 4:
        bench.engine.step()
    came = bench.engine.output(turn.name)
    bench.engine.abort(turn.name)
    bench.book.cancel(turn, pack_tokens(came))
    assert [*PREFIX, *came] == bench.tokens(twin)
    nodes = bench.engine.cache.tree.walk()
    assert not any(node.is_abandoned for node in nodes)
    bench.check_idle()
