"""Synthetic traces: the same for the same seed, and of the shape that their parameters say."""

from __future__ import annotations

import pytest

from radixcache import InvalidTrace
from radixcache.sim import KINDS, generate, lru_curve, traffic_of

SMALL = {
    "chat": "chat:sessions=20,turns=4",
    "agents": "agents:tasks=5,depth=3,branching=2",
    "few-shot": "few-shot:questions=40,preambles=4",
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_same_seed_gives_the_same_trace(kind: str) -> None:
    traffic = traffic_of(SMALL[kind])
    assert traffic is not None
    trace = generate(traffic, block_size=16)
    assert trace.requests == generate(traffic, block_size=16).requests
    other = traffic_of(f"{SMALL[kind]},seed=1")
    assert other is not None
    assert trace.requests != generate(other, block_size=16).requests
    times = [request.arrival_s for request in trace.requests]
    assert times == sorted(times)


def test_a_chat_grows_behind_what_was_said() -> None:
    trace = generate(traffic_of("chat:sessions=1,turns=30,system_tokens=0"), block_size=1)
    for before, after in zip(trace.requests, trace.requests[1:], strict=False):
        said = before.prompt + before.answer
        assert after.prompt[: len(said)] == said


def test_an_agent_s_branches_share_all_but_their_last_step() -> None:
    trace = generate(traffic_of("agents:tasks=1,depth=2,branching=3,kept=2"), block_size=1)
    assert len(trace.requests) == 3 + 2 * 3
    first = [request.prompt for request in trace.requests[:3]]
    assert first[0] == first[1] == first[2]
    assert len({request.answer[0] for request in trace.requests}) == 9


def test_popular_preambles_are_asked_for_more_often() -> None:
    even, skewed = (
        lru_curve(generate(traffic_of(f"few-shot:skew={skew}"), block_size=64)).hit_rate(200)
        for skew in (0, 2)
    )
    assert skewed > even + 0.2


def test_files_name_no_kind() -> None:
    assert traffic_of("chat.jsonl") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat:users=3", "unknown field.*chat has .*sessions"),
        ("chat:sessions=many", "Expected `int`"),
        ("chat:rate=0", "rate must be a number above 0"),
        ("agents:step_s=inf", "step_s"),
        ("few-shot:skew=-1", "skew"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidTrace, match=message):
        traffic_of(text)
