"""How long what a session computed is held, and what ends a hold before its time."""

from __future__ import annotations

import pytest

from radixcache import Namespace, Quota
from radixcache.tokens import pack_tokens
from runtime.errors import SessionNotFound
from tests.support.session_bench import PREFIX, SessionBench


def test_a_use_does_not_shorten_a_long_hold() -> None:
    bench = SessionBench(idle_s=10.0)
    session = bench.create()
    bench.generate(session)
    bench.book.hold(session, 60)
    bench.now = 5.0
    bench.append(session, [1])
    assert bench.book.state(session).held_for_s == 55.0
    bench.check_idle()


def test_a_use_does_not_bring_back_a_hold_whose_time_was_over() -> None:
    bench = SessionBench(idle_s=100.0)
    session = bench.create()
    state = bench.book.state(session)
    bench.generate(session)
    bench.book.hold(session, 5)
    bench.now = 6.0
    more = bench.book.replace(session, state.tokens, revision=state.revision + 1)
    assert more.held_tokens == 0
    assert bench.engine.cache.stats().num_holds == 0
    bench.check_idle()


def test_raising_the_epoch_ends_what_was_held_in_the_old_one_at_the_next_look() -> None:
    bench = SessionBench()
    session = bench.create(namespace=Namespace(salt="a"))
    bench.generate(session)
    bench.engine.cache.raise_epoch(Namespace(salt="a"))
    state = bench.book.state(session)
    assert (state.held_tokens, state.namespace.epoch) == (0, 1)
    assert bench.engine.cache.stats().num_pinned == 0
    bench.check_idle()


def test_an_old_turn_ends_no_later_one() -> None:
    bench = SessionBench()
    session = bench.create()
    old = bench.begin(session, 4)
    bench.run()
    bench.book.cancel(old)
    later = bench.begin(session, 4)
    bench.book.cancel(old)
    bench.book.finish(old, pack_tokens([1]))
    assert bench.book.state(session).is_busy
    bench.run()
    output = pack_tokens(bench.engine.output(later.name))
    bench.book.finish(later, output)
    assert bench.book.state(session).tokens.endswith(output)
    bench.check_idle()


def test_a_hold_outlives_the_idle_time_and_ends_by_the_caches_clock_alone() -> None:
    bench = SessionBench(idle_s=10.0)
    session = bench.create()
    bench.generate(session)
    state = bench.book.hold(session, 60)
    assert (state.held_tokens, state.held_for_s, state.expires_in_s) == (16, 60.0, 60.0)
    bench.now = 59.0
    bench.press()
    assert bench.engine.num_cached(bench.tokens(session)) == 16
    bench.now = 60.0
    bench.press()  # nobody asks the book
    assert bench.engine.cache.stats().num_holds == 0
    with pytest.raises(SessionNotFound):
        bench.book.state(session)
    bench.check_idle()


def test_a_shorter_hold_lets_go_earlier_and_zero_at_once() -> None:
    bench = SessionBench(idle_s=100.0)
    session = bench.create()
    bench.generate(session)
    assert bench.book.hold(session, 5).held_tokens == 16
    bench.now = 5.0
    state = bench.book.state(session)
    assert (state.held_tokens, state.held_for_s, state.num_tokens) == (0, 0.0, 16)
    bench.append(session, [1, 2])
    assert bench.book.state(session).held_tokens == 0
    bench.generate(session)
    assert bench.book.state(session).held_tokens == 22
    assert bench.book.hold(session, 0).held_tokens == 0
    bench.check_idle()


def test_a_request_beyond_its_own_quota_ends_holds_of_its_own_while_others_run() -> None:
    """Not only once nobody runs: under steady traffic of others that would be never."""
    bench = SessionBench(num_blocks=64, max_len=40)
    mine, other = Namespace(salt="mine"), Namespace(salt="other")
    bench.engine.cache.set_quota(mine, Quota(hard_limit=20))
    session = bench.create(namespace=mine)
    foreign = bench.create(namespace=other)
    for each in (session, foreign):
        bench.generate(each)
    held = bench.book.state(session).held_tokens
    assert held
    assert bench.book.state(foreign).held_tokens
    bench.engine.submit("busy", [1, 2], namespace=other, max_tokens=30)
    bench.engine.step()
    bench.engine.submit("big", range(50, 80), namespace=mine, max_tokens=1)
    for _ in range(3):
        bench.engine.step()
    assert bench.engine.reason("busy") is None
    assert bench.engine.reason("big") == "length"
    assert bench.book.state(session).held_tokens == 0
    assert bench.book.state(foreign).held_tokens
    bench.run()
    bench.check_idle()


def test_a_hold_that_is_all_there_is_to_a_session_takes_it_along() -> None:
    bench = SessionBench(idle_s=100.0)
    bench.ask(PREFIX)
    both = [bench.book.retain(pack_tokens(PREFIX), 2) for _ in range(2)]
    kept, used = [state.session_id for state in both if state is not None]
    assert bench.book.state(kept).held_tokens
    bench.append(used, [1])  # somebody goes on with it after all
    bench.now = 3.0
    with pytest.raises(SessionNotFound):
        bench.book.state(kept)
    assert bench.book.state(used).session_id == used
    assert len(bench.book) == 1
    bench.check_idle()


class TickingBench(SessionBench):
    """Its time goes on whenever somebody looks, as real time does."""

    @property
    def now(self) -> float:
        """A little later than at the last look."""
        self._now += 0.001
        return self._now

    @now.setter
    def now(self, value: float) -> None:
        self._now = value


def test_no_session_ends_before_its_hold_while_time_goes_on() -> None:
    bench = TickingBench()
    session = bench.create()
    bench.generate(session)
    twin = bench.book.fork(session).session_id
    bench.book.check()
    bench.book.hold(twin, 60)
    bench.append(session, [1])
    bench.book.check()
    bench.generate(twin)
    bench.check_idle()
