"""The tree in a terminal, without one: what is kept, chosen and drawn."""

from __future__ import annotations

import random
from io import BytesIO
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from runtime.errors import InvalidRequest, NoAnswer
from runtime.top.feed import Lost, Refused, events_of
from runtime.top.frame import HEAT, STATES, View, age_text, frame, sparkline, tree_room
from runtime.top.gauges import Gauges
from runtime.top.keys import keys_of
from runtime.top.listing import FEW, Listing
from runtime.top.model import Change, Columns, Label, Node, Snapshot, TreeModel
from runtime.top.screen import MAX_HELD, Screen
from runtime.tree.records import NodeAnswer, Pin, Running, Sample

NOW = 1000.0
SIZES = [(120, 40), (80, 24), (60, 20), (40, 15), (20, 8), (200, 60)]


def sample(time: float = NOW, **fields: Any) -> Sample:
    names = Sample.__struct_fields__[1:12]
    counts = dict.fromkeys(names, 0)
    others = {"running_total": 0, "ttft_warm": None, "ttft_cold": None}
    return Sample(**counts | others | {"time": time} | fields)


def columns(*rows: tuple[Any, ...]) -> Columns:
    """Rows of (id, parent, blocks, hits, used, state)."""
    ids, parents, blocks, hits, used, states = (
        (list(c) for c in zip(*rows, strict=True)) if rows else ([],) * 6
    )
    return Columns(
        id=ids,
        parent=parents,
        tokens=[16 * count for count in blocks],
        blocks=blocks,
        hits=hits,
        used=used,
        pins=[int(state == "p") for state in states],
        state=states,
        tier=["gpu"] * len(ids),
        namespace=[0] * len(ids),
        namespaces=[Label("acme", "acme")],
    )


def snapshot(*rows: tuple[Any, ...], seq: int = 1, **fields: Any) -> Snapshot:
    return Snapshot(
        seq=seq,
        time=NOW,
        block_size=16,
        num_blocks=100,
        nodes=columns(*rows),
        sample=sample(**fields),
        show_text=True,
    )


def change(seq: int, *rows: tuple[Any, ...], removed: tuple[int, ...] = ()) -> Change:
    return Change(seq=seq, time=NOW, nodes=columns(*rows), removed=list(removed))


SMALL = (
    (1, 0, 0, 0, 0.0, "i"),
    (2, 1, 10, 1, 900.0, "p"),
    (3, 2, 4, 2, 999.0, "e"),
    (4, 2, 6, 0, 100.0, "r"),
    (5, 1, 1, 7, 980.0, "e"),
)


def screen_of(*rows: tuple[Any, ...], **fields: Any) -> Screen:
    asked: list[int] = []
    screen = Screen("http://x", details=lambda node: b"", reconnect=lambda: asked.append(1))
    screen.asked = asked  # type: ignore[attr-defined]
    screen.take(snapshot(*rows, **fields))
    screen.lay_out(100, 30)
    return screen


def shown(screen: Screen, width: int = 100, height: int = 30) -> str:
    screen.lay_out(width, height)
    return "\n".join(line.plain for line in frame(screen.view, width, height))


def test_sums_go_up_the_tree_and_ends_of_prefixes_down() -> None:
    model = TreeModel()
    model.start(snapshot(*SMALL))
    (root,) = model.roots.values()
    assert (root.num_below, root.all_blocks, root.all_hits, root.used) == (4, 21, 10, 999.0)
    assert [(child.node_id, child.end) for child in root.children.values()] == [(2, 160), (5, 16)]
    assert model.nodes[4].end == 160 + 96


def sums(node: Node) -> tuple[Any, ...]:
    children = sorted(node.children)
    return node.num_below, node.all_blocks, node.all_hits, node.end, node.used, children


def test_changes_lead_to_the_same_tree_as_a_new_snapshot() -> None:
    draw = random.Random(1)
    model, rows, seq = TreeModel(), {1: (1, 0, 0, 0, 0.0, "i")}, 1
    model.start(snapshot(*rows.values()))
    for _ in range(60):
        leaves = [i for i in rows if i != 1 and all(row[1] != i for row in rows.values())]
        gone = tuple(draw.sample(leaves, min(len(leaves), draw.randrange(2))))
        for node_id in gone:
            del rows[node_id]
        new = {
            node_id: (node_id, draw.choice(list(rows)), draw.randrange(1, 9), 0, 1.0, "e")
            for node_id in range(10 * seq, 10 * seq + draw.randrange(4))
        }
        inner = [node_id for node_id in rows if node_id != 1]
        if inner and draw.random() < 0.5:  # an edge is cut: the lower part keeps the number
            lower, upper = draw.choice(inner), 10 * seq + 9
            new[upper] = (upper, rows[lower][1], 2, 1, 1.0, "i")
            new[lower] = (lower, upper, draw.randrange(1, 5), 3, 1.0, "e")
        rows |= new
        seq += 1
        assert model.apply(change(seq, *reversed(new.values()), removed=gone))
        fresh = TreeModel()
        fresh.start(snapshot(*rows.values()))
        for node_id, node in fresh.nodes.items():
            kept = model.nodes[node_id]
            assert sums(kept) == sums(node)
        assert model.nodes.keys() == fresh.nodes.keys()


def test_a_change_that_is_missing_is_noticed_and_the_feed_begun_anew() -> None:
    screen = screen_of(*SMALL)
    screen.take(change(4, (6, 1, 1, 0, 1.0, "e")))
    assert screen.asked == [1]  # type: ignore[attr-defined]
    assert 6 not in screen.view.model.nodes


def test_a_large_tree_is_opened_by_size_as_far_as_it_fits_and_says_what_it_leaves_out() -> None:
    wide = [(100 + i, 2, 1 + i % 3, 0, 1.0, "e") for i in range(5000)]
    model, listing = TreeModel(), Listing()
    model.start(snapshot(SMALL[0], SMALL[1], *wide, (9, 1, 2, 0, 1.0, "e")))
    lines = listing.lines(model, 30)
    assert len(lines) <= 30
    assert [line.node.node_id for line in lines[:2]] == [1, 2]
    (left_out,) = (line for line in lines if line.num_left_out)
    assert left_out.num_left_out == 5000 - FEW
    total = sum(row[2] for row in wide)
    told = sum(line.node.all_blocks for line in lines if line.node.parent == 2)
    assert told + left_out.blocks_left_out == total
    listing.open(left_out)
    assert sum(line.node.parent == 2 for line in listing.lines(model, 30)) == 2 * FEW


def test_what_is_opened_or_closed_by_hand_stays_so_until_it_is_forgotten() -> None:
    screen = screen_of(*SMALL)
    lines = screen.view.lines
    assert [line.node.node_id for line in lines] == [1, 2, 4, 3, 5]
    screen.press("down")
    screen.press("left")
    assert [line.node.node_id for line in screen.view.lines] == [1, 2, 5]
    screen.press("right")
    assert len(screen.view.lines) == 5
    screen.press("h")
    screen.press("a")
    assert len(screen.view.lines) == 5


def test_left_of_what_is_closed_goes_to_its_parent() -> None:
    screen = screen_of(*SMALL)
    for key in ("down", "down", "left"):
        screen.press(key)
    assert screen.view.lines[screen.view.cursor or 0].node.node_id == 2


@pytest.mark.parametrize(("order", "ids"), [("size", [2, 5]), ("heat", [2, 5]), ("hits", [5, 2])])
def test_siblings_are_ordered_by_what_was_chosen(order: str, ids: list[int]) -> None:
    screen = screen_of(*SMALL)
    while screen.view.listing.order != order:
        screen.press("s")
    found = [line.node.node_id for line in screen.view.lines if line.node.parent == 1]
    assert found == ids
    assert f"by {order}" in shown(screen)


def test_the_chosen_line_stays_the_same_node_when_others_come() -> None:
    screen = screen_of(*SMALL)
    screen.press("end")
    assert screen.view.lines[screen.view.cursor or 0].node.node_id == 5
    screen.take(change(2, (6, 1, 90, 0, 1.0, "e")))
    screen.lay_out(100, 30)
    assert screen.view.lines[screen.view.cursor or 0].node.node_id == 5
    screen.take(change(3, removed=(5,)))
    screen.lay_out(100, 30)
    assert 0 <= (screen.view.cursor or 0) < len(screen.view.lines)


def test_while_paused_nothing_moves_and_then_everything_comes() -> None:
    screen = screen_of(*SMALL)
    screen.press("p")
    screen.take(change(2, (6, 1, 1, 0, 1.0, "e")))
    assert "paused" in shown(screen)
    assert 6 not in screen.view.model.nodes
    screen.press("space")
    assert 6 in screen.view.model.nodes
    assert "paused" not in shown(screen)


def test_a_connection_that_is_lost_while_paused_is_told_at_once() -> None:
    screen = screen_of(*SMALL)
    screen.press("p")
    screen.take(change(2, (6, 1, 1, 0, 1.0, "e")))
    screen.take(Lost("gone", 1.0))
    assert "connection lost" in shown(screen)
    screen.take(snapshot(*SMALL, seq=9))
    screen.take(change(10, (7, 1, 1, 0, 1.0, "e")))
    assert "live  paused" in shown(screen)
    screen.press("p")
    assert 7 in screen.view.model.nodes
    assert 6 not in screen.view.model.nodes


def test_a_long_pause_keeps_a_bounded_number_of_events_and_begins_anew() -> None:
    screen = screen_of(*SMALL)
    screen.press("p")
    for _ in range(MAX_HELD + 10):
        screen.take(sample())
    screen.press("p")
    assert screen.asked  # type: ignore[attr-defined]


def test_a_lost_connection_is_told_and_a_refused_one_ends_it() -> None:
    screen = screen_of(*SMALL)
    screen.take(Lost("it is gone", 2.0))
    assert "connection lost, trying again in 2 s: it is gone" in shown(screen)
    screen.take(snapshot(*SMALL, seq=7))
    assert "live" in shown(screen)
    with pytest.raises(InvalidRequest, match="no key"):
        screen.take(Refused("no key"))


def test_heat_and_state_have_a_sign_each_beside_their_colour() -> None:
    assert len({sign for _, sign, _, _ in HEAT}) == len(HEAT)
    assert len({sign for sign, _, _ in STATES.values()}) == len(STATES)
    lines = shown(screen_of(*SMALL), 120, 40).split("\n")
    rows = {
        name: line for line in lines for name in ("0–160", "160–224", "160–256") if name in line
    }
    assert rows["160–224"].startswith("█ ○")
    assert rows["160–256"].startswith("░ ◆")
    assert rows["0–160"].startswith("█ ●")  # as warm as the warmest below


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_has_the_size_that_is_asked_for(width: int, height: int) -> None:
    running = tuple(
        Running(id=f"cmpl-{i}", prompt=9, cached=3, computed=9, output=i, blocks=2, tenant="acme")
        for i in range(9)
    )
    many = [(100 + i, 2, 1, 0, 1.0, "e") for i in range(400)]
    screen = screen_of(*SMALL, *many, running=running, running_total=70, total=100, free=20)
    for key in ("right", "end"):
        screen.press(key)
        screen.lay_out(width, height)
        drawn = frame(screen.view, width, height)
        assert len(drawn) <= height
        assert max(line.cell_len for line in drawn) <= width
    if height > 20:
        text = shown(screen, width, height)
        assert "running: 65 more" in text
        assert any(line.spans for line in drawn)
        chosen = screen.view.lines[screen.view.cursor or 0]
        assert f"{chosen.node.end:,}" in text or str(chosen.num_left_out) in text


def test_plain_text_says_everything_in_words() -> None:
    screen = screen_of(*SMALL, asked=100, hit=61, total=100, free=79, cached=11, pinned=10)
    screen.view.is_plain = True
    screen.view.cursor = None
    text = "\n".join(line.plain for line in frame(screen.view, 100, None))
    assert "hit rate 61%" in text
    assert "blocks 100   pinned 10   private 0   evictable 11   free 79" in text
    assert "node 3, tokens 160–224: 4 blocks (4%), 2 hits, hot, used 1 s ago, evictable" in text
    assert "1 pins" in text
    assert not set(text) & set("█▓▒░●○◆├└│▸▾")


def test_rates_are_of_the_last_seconds_and_begin_anew_with_another_server() -> None:
    gauges = Gauges(sample(NOW + i, generated=10 * i, asked=4 * i, hit=i) for i in range(100))
    assert gauges.rate("generated") == 10.0
    assert gauges.hit_rate() == gauges.hit_rate(60.0) == 0.25
    assert gauges.hit_rates(4, 40.0) == [0.25] * 4
    gauges.add(sample(NOW + 50))  # older than the last, and of another life
    assert gauges.rate("generated") == 0.0
    assert gauges.hit_rate() is None
    assert gauges.hit_rates(2) == [None, None]


def test_without_samples_there_are_no_numbers() -> None:
    gauges = Gauges()
    assert (gauges.now, gauges.hit_rate(), gauges.rate("evicted")) == (None, None, 0.0)
    view = View(url="u", model=TreeModel(), gauges=gauges, listing=Listing(), cursor=0)
    assert "waiting for the first sample" in frame(view, 80, 24)[1].plain
    assert tree_room(view, 80, 2) == 1


NODE = NodeAnswer(
    id=3,
    parent=2,
    path_tokens=224,
    tokens=64,
    token_ids=[1],
    text="a\x1b[2J",
    text_hidden=None,
    blocks=[7],
    num_blocks=4,
    hits=2,
    used=1.0,
    created=1.0,
    pins=1,
    pinned_by=[Pin("session", "sess-1")],
    eviction_rank=3,
    children=0,
    state="e",
    tier="gpu",
    namespace="acme",
    tenant="acme",
)


def test_a_node_is_told_in_full_and_what_it_can_not_be_is_told_too() -> None:
    answers: list[Any] = [NODE, NoAnswer("it is gone"), {"id": 3}]

    def details(node_id: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return msgspec.json.encode(answer)

    screen = Screen("http://x", details=details, reconnect=lambda: None)
    screen.take(snapshot(*SMALL))
    screen.lay_out(100, 30)
    screen.press("enter")
    text = shown(screen)
    assert "tokens 160–224, 4 blocks" in text
    assert "evicted after 3 others; pinned by session sess-1" in text
    assert "\x1b" not in text
    screen.press("escape")
    assert not screen.has_quit
    for _ in range(2):
        screen.press("d")
        assert "node 1: " in shown(screen)
    screen.press("q")
    assert screen.has_quit


def test_events_are_read_whatever_stands_between_them() -> None:
    wire = (
        b": a comment\n\nevent: other\ndata: {}\n\nevent: sample\nid: 3\ndata: "
        + msgspec.json.encode(sample())
        + b"\r\n\r\ndata: {}\n\nevent: change\ndata: "
        + msgspec.json.encode(change(2))
        + b"\n\nevent: change\ndata: cut off"
    )
    first, second = events_of(BytesIO(wire))
    assert isinstance(first, Sample)
    assert isinstance(second, Change)
    with pytest.raises(msgspec.DecodeError):
        list(events_of(BytesIO(b"event: change\ndata: {\n\n")))


def test_keys_are_told_apart_however_they_arrive() -> None:
    assert keys_of(b"\x1b[A\x1bOBjq\r \x03") == ["up", "down", "j", "q", "enter", "space", "q"]
    assert keys_of(b"\x1b") == ["escape"]
    assert keys_of(b"\xff\x00") == []


def test_unknown_keys_and_an_empty_tree_do_no_harm() -> None:
    screen = Screen("u", details=lambda node: b"", reconnect=lambda: None)
    for key in ("x", "down", "end", "left", "right", "enter", "s", "a", "page down", "home"):
        screen.press(key)
    assert shown(screen)
    assert not screen.has_quit


def test_times_and_bars_are_short() -> None:
    assert [age_text(s) for s in (-1, 59, 60, 3600, 200_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h",
        "2 d",
    ]
    assert sparkline([None, 0.0, 0.5, 1.0, 2.0]) == " ▁▅██"
    assert all(a[0] < b[0] for a, b in pairwise(HEAT))
