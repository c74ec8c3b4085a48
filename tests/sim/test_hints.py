"""Clients that say when they come back no more, replayed through the cache's own verb."""

from __future__ import annotations

import pytest

from radixcache.sim import generate, simulate, traffic_of
from radixcache.sim.informed import ToldClosed
from radixcache.sim.replay import Replay, Speed

TRACE = generate(traffic_of("chat:sessions=40,rate=0.5"), block_size=16)


def test_only_the_last_turn_of_each_session_closes_it() -> None:
    closing = ToldClosed(TRACE).closing
    assert len(closing) == 40
    for place in closing:
        own = TRACE.requests[place].prompt[-1]
        assert all(own not in later.prompt for later in TRACE.requests[place + 1 :])


@pytest.mark.parametrize("speed", [None, Speed(prefill_rate=8000, decode_rate=50)])
def test_hints_lift_the_hit_rate_towards_what_knowing_the_dead_gives(speed: Speed | None) -> None:
    num_blocks = TRACE.num_distinct // 5
    lru, closed, dead = (
        simulate(TRACE, policy, num_blocks, speed=speed).outcome.hits
        for policy in ("lru", "told-closed", "told-dead")
    )
    assert lru < closed <= 1.01 * dead


def test_the_cache_is_whole_after_a_replay_with_hints() -> None:
    replay = Replay(TRACE, ToldClosed(TRACE), num_blocks=TRACE.longest)
    replay.run()
    replay.cache.check()
