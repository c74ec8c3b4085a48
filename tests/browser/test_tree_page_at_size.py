"""The page of the live tree with a tree larger than a test's server holds, and without a server."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.browser.chromium import Page
from tests.support.tree_feed import synthetic_feed

TREE = "radixcacheTree"
NODES = f"[...{TREE}.model.nodes.values()]"
ROWS = f"JSON.stringify({NODES}.map((node) => node.row).sort((a, b) => a.id - b.id))"
MANY = 100_000
MAX_VISITS = 5_000
"""Nodes that a frame may look at: what a window of some hundred pixels shows, not what there is."""


def work_of(page: Page) -> dict[str, Any]:
    work: dict[str, Any] = page.run(f"({{...{TREE}.work}})")
    return work


def test_a_hundred_thousand_nodes_cost_what_the_window_shows(page: Page) -> None:
    with synthetic_feed(num_nodes=MANY) as (url, _):
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.model.size >= {MANY} && {TREE}.work.aggregates > 0")
        # Nothing is left out in silence: each node is drawn, or counted in an aggregate.
        page.wait(f"{TREE}.work.drawn + {TREE}.work.inAggregates === {TREE}.stage.layout.numNodes")
        assert "more in" in page.text("#drawn")
        top = page.run("document.querySelector('#stage').getBoundingClientRect().top")
        for step in range(24):
            before = work_of(page)["frames"]
            turn = -240 if step < 16 else 240
            page.mouse("mouseWheel", 200, top + 120, deltaX=0, deltaY=turn)
            page.wait(f"{TREE}.work.frames > {before}")
            if step == 15:
                near = work_of(page)
        assert near["drawn"] > 20
        assert work_of(page)["most"] < MAX_VISITS
        assert work_of(page)["refreshes"] + work_of(page)["layouts"] < work_of(page)["frames"]


PLACES = """((layout) => JSON.stringify([
  layout.lanes, layout.reachAll, layout.roots,
  Array.from({ length: layout.size }, (_, at) => [
    layout.node(at).row.id, layout.below(at)?.map((node) => layout.placeOf(node)),
    ...["x0", "x1", "lane0", "lane1", "reach", "end", "parent", "warm", "sumHits", "sumPinned"]
      .map((name) => layout[name][at]) ])]))"""


def test_a_tree_laid_out_change_by_change_is_as_one_laid_out_anew(page: Page) -> None:
    """Back and forth in time nodes go and come again, and take the slots of others."""
    with synthetic_feed(num_nodes=150, changes=40) as (url, _):
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.timeline.log.length > 6")
        different = page.run(
            f"""(() => {{ const {{ timeline, stage, model }} = {TREE}, {{ layout }} = stage;
            const last = timeline.newest, different = [];
            for (const back of [0, 3, 1, 2.5, 0.5, 2, 0, 1.5, 3, 0]) {{
              timeline.show(last - back);
              layout.rebuild(model);
              const step = {PLACES}(layout);
              if (step !== {PLACES}(new layout.constructor(model))) different.push(back);
            }}
            timeline.show(null);
            return different; }})()"""
        )
        assert different == []
        assert page.run(f"{TREE}.model.freeSlots.length") > 0
        assert page.run(
            f"{TREE}.model.slots - {TREE}.model.freeSlots.length === {TREE}.model.size + 1"
        )


def test_a_click_on_an_aggregate_comes_nearer(page: Page) -> None:
    with synthetic_feed(num_nodes=20_000, changes=0) as (url, _):
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.work.aggregates > 0 && {TREE}.stage.view.isPlaced")
        before = page.run(f"{TREE}.stage.view.ky")
        place = page.run(
            f"""(() => {{ const many = {TREE}.stage.drawing.aggregates[0];
            const at = document.querySelector('#stage').getBoundingClientRect();
            return [at.left + many.x + 4, at.top + many.y + many.h / 2]; }})()"""
        )
        page.mouse("mouseMoved", *place)
        page.wait("document.querySelector('#tip').textContent.includes('too small to draw apart')")
        page.click(*place)
        page.wait(f"{TREE}.stage.view.ky > {before}")


def test_what_was_shown_before_is_shown_again_row_by_row(page: Page) -> None:
    with synthetic_feed(num_nodes=300, changes=3) as (url, _):
        page.open(f"{url}/tree")
        page.run(
            f"""window.seen = []; new Promise((resolve) => {{ const look = setInterval(() => {{
              const at = {TREE}.timeline.place;
              if (!seen.some((one) => one.at === at))
                seen.push({{ at, time: {TREE}.timeline.newest, rows: {ROWS} }});
              if (seen.length > 6) {{ clearInterval(look); resolve(); }} }}, 20); }})"""
        )
        assert page.run("new Set(seen.map((one) => one.rows)).size") > 5
        for order in ("[...seen].reverse()", "seen", "[seen[3], seen[0], seen[5]]"):
            same = page.run(
                f"{order}.every((one) => {{ {TREE}.timeline.show(one.time);"
                f" return one.rows === {ROWS}; }})"
            )
            assert same
        page.run(f"{TREE}.timeline.show(null)")
        assert page.run(f"{TREE}.timeline.place === {TREE}.timeline.log.length")


def test_a_snapshot_of_another_tree_takes_the_place_of_the_first_and_can_be_taken_back(
    page: Page,
) -> None:
    """As after a restart: the same ids stand for other nodes, under other parents."""
    with (
        synthetic_feed(num_nodes=200, changes=0) as (url, _),
        synthetic_feed(num_nodes=90, seed=1) as (other, _),
    ):
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.model.size > 100")
        with httpx.stream("GET", f"{other}/tree/feed") as answer:
            lines = answer.iter_lines()
            snapshot = json.loads(next(line for line in lines if line.startswith("data:"))[5:])
        after, before, again = page.run(  # in one go, as the feed goes on
            f"""(() => {{ const {{ timeline }} = {TREE}, before = {ROWS}, then = timeline.newest;
            timeline.snapshot({{ ...{json.dumps(snapshot)}, time: then + 0.001 }});
            const after = {ROWS};
            timeline.show(then);
            const again = {ROWS};
            timeline.show(null);
            return [after, before, again]; }})()"""
        )
        parents = {row["id"]: row["parent"] for row in json.loads(after)}
        ids, above = snapshot["nodes"]["id"], snapshot["nodes"]["parent"]
        assert parents == dict(zip(ids, above, strict=True))
        assert before == again != after


def test_the_log_is_bounded_and_says_how_far_it_goes_back(page: Page) -> None:
    with synthetic_feed(num_nodes=50, changes=1) as (url, _):
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.model.size > 50")
        page.run(
            f"""(() => {{ const {{ timeline }} = {TREE}, nodes = {{ id: [] }};
            for (let step = 1; step < 3000; step++)
              timeline.change({{ time: timeline.newest + 1, nodes, removed: [] }}); }})()"""
        )
        assert 500 <= page.run(f"{TREE}.timeline.log.length") <= 601
        assert 590 <= page.run(f"{TREE}.timeline.reach") <= 610


def test_a_lost_connection_is_shown_and_made_again(page: Page) -> None:
    with synthetic_feed(num_nodes=50, changes=1) as (url, cut):
        page.open(f"{url}/tree")
        page.wait("document.querySelector('#state').dataset.state === 'live'")
        page.run(
            "window.states = []; new MutationObserver(() => states.push("
            "document.querySelector('#state').innerText)).observe("
            "document.querySelector('#state'),"
            "{ childList: true, subtree: true, characterData: true })"
        )
        cut.set()
        page.wait("states.some((words) => words.includes('next try in'))")
        page.wait("states[states.length - 1] === 'live'")
        reach = page.run(f"{TREE}.timeline.log.length")
        assert reach > 0  # what was seen before can still be shown
    page.wait("states[states.length - 1].includes('no connection; next try in')")
    # Refused as a rule; reset where the listening socket closed under a connection just made.
    assert all("net::ERR_" in words for words in page.leave())
