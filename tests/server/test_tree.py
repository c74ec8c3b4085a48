"""The live tree over HTTP: the feed, one node, and the samples of the last minutes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from runtime.tree.records import NodeAnswer, Sample
from tests.support.served import HashExecutor
from tests.support.tree_reader import Watcher, events_of, snapshot

FIRST = list(range(1000, 1080))


def complete(http: httpx.Client, prompt: list[int] = FIRST, **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True} | fields
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is bound to come."""
    for _ in range(3000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_a_feed_begins_with_the_tree_as_it_is(http: httpx.Client) -> None:
    complete(http)
    with http.stream("GET", "/tree/feed") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        first = next(events_of(answer))
    data = first.data
    assert (first.name, first.seq) == ("snapshot", data["seq"])
    assert (data["block_size"], data["num_blocks"], data["show_text"]) == (16, 64, True)
    assert abs(data["time"] - time.time()) < 60
    nodes = data["nodes"]
    assert nodes.pop("namespaces") == [{"label": "default", "tenant": None}]
    assert {len(column) for column in nodes.values()} == {2}
    rows = [dict(zip(nodes, values, strict=True)) for values in zip(*nodes.values(), strict=True)]
    root, leaf = sorted(rows, key=lambda row: int(row["tokens"]))
    assert leaf["parent"] == root["id"]
    assert (root["parent"], root["tokens"], root["state"]) == (0, 0, "i")
    assert (leaf["tokens"], leaf["blocks"], leaf["state"], leaf["pins"]) == (80, 5, "e", 0)
    assert leaf["tier"] == "gpu"
    assert abs(leaf["used"] - time.time()) < 60
    assert data["sample"].keys() == set(Sample.__struct_fields__)
    assert data["sample"]["nodes"] == 1


def test_what_changes_is_told_and_leads_to_what_a_new_reader_sees(http: httpx.Client) -> None:
    complete(http)
    watcher = Watcher()
    with http.stream("GET", "/tree/feed") as answer:
        events = events_of(answer)
        watcher.take(next(events))
        before = set(watcher.rows)
        complete(http, FIRST[:48] + [2000] * 40)  # cuts the edge
        for event in events:
            watcher.take(event)
            if watcher.edges() == [0, 32, 32, 48]:
                break
        http.post("/reset_prefix_cache")
        complete(http, [3000] * 20)
        for event in events:
            watcher.take(event)
            if watcher.edges() == [0, 16]:
                break
    assert not before & set(watcher.rows), "an id was given again"
    again = snapshot(http)
    assert again.rows == watcher.rows


def test_samples_come_each_second_and_are_kept_whether_anybody_reads_or_not(
    http: httpx.Client,
) -> None:
    complete(http)
    complete(http)

    def told() -> list[Any]:
        kept: list[Any] = http.get("/tree/history").json()["samples"]
        return kept

    until(lambda: told()[-1]["asked"] == 160)
    watcher = Watcher()
    with http.stream("GET", "/tree/feed") as answer:
        for event in events_of(answer):
            watcher.take(event)
            if len(watcher.samples) == 3:
                break
    last = watcher.samples[-1]
    assert (last["asked"], last["hit"], last["computed"]) == (160, 79, 81)
    assert (last["generated"], last["evicted"], last["waiting"]) == (8, 0, 0)
    assert (last["total"], last["pinned"], last["free"] + last["cached"]) == (64, 0, 64)
    assert last["ttft_cold"] > 0
    assert last["ttft_warm"] > 0
    times = [sample["time"] for sample in told()]
    assert times == sorted(times)
    assert http.get("/tree/history").json()["interval_s"] == 1.0


def test_a_node_is_told_in_full(http: httpx.Client, runtime: Runtime) -> None:
    text = "The chain of a bicycle wears out, and it squeaks when it is dry in winter and rain."
    ids = runtime.tokenizer.encode(text)[:16]
    complete(http, ids * 3)
    complete(http, ids * 2 + [7] * 20)
    rows = snapshot(http).rows
    shared = next(row for row in rows.values() if row["tokens"] == 32)
    node = http.get(f"/tree/nodes/{shared['id']}").json()
    assert node.keys() == set(NodeAnswer.__struct_fields__)
    assert node["token_ids"] == ids * 2
    assert node["text"] == runtime.tokenizer.decode(ids * 2)
    assert node["text_hidden"] is None
    assert (node["path_tokens"], node["children"], node["num_blocks"]) == (32, 2, 2)
    assert len(node["blocks"]) == 2
    assert node["eviction_rank"] is None
    assert {node[name] == shared[name] for name in ("hits", "state", "pins", "tier", "parent")}
    assert node["created"] <= node["used"]
    leaves = [row["id"] for row in rows.values() if row["state"] == "e"]
    ranks = [http.get(f"/tree/nodes/{leaf}").json()["eviction_rank"] for leaf in leaves]
    assert sorted(ranks) == [0, 1]


def test_a_node_that_has_gone_is_not_found(http: httpx.Client) -> None:
    complete(http)
    leaf = max(snapshot(http).rows)
    assert http.get(f"/tree/nodes/{leaf}").status_code == 200
    http.post("/reset_prefix_cache")
    gone = http.get(f"/tree/nodes/{leaf}")
    assert gone.status_code == 404
    assert "any more" in gone.json()["error"]["message"]


@pytest.mark.parametrize("name", ["0", "-1", "x", "1.5", "9" * 40, "%E0%A5%A7"])
def test_a_name_that_is_no_node_is_not_found(http: httpx.Client, name: str) -> None:
    assert http.get(f"/tree/nodes/{name}").status_code == 404


def test_who_stands_on_a_node_is_named(http: httpx.Client, runtime: Runtime) -> None:
    assert isinstance(runtime.executor, HashExecutor)
    session = http.post("/v1/sessions", json={"prompt": "a word " * 40}).json()["id"]
    body = {"max_tokens": 1, "ignore_eos": True}
    assert http.post(f"/v1/sessions/{session}/generate", json=body).status_code == 200
    runtime.executor.step_s = 0.02
    running = threading.Thread(target=complete, args=(http, FIRST), kwargs={"max_tokens": 200})
    running.start()
    with http.stream("GET", "/tree/feed") as answer:
        watcher = Watcher()
        for event in events_of(answer):
            watcher.take(event)
            if watcher.samples[-1]["running"] and len(watcher.rows) > 2:
                break
    (shown,) = watcher.samples[-1]["running"]
    assert (shown["prompt"], shown["cached"], shown["tenant"]) == (80, 0, None)
    assert shown["blocks"] * 16 >= shown["computed"] >= 80
    pins = {}
    for row in watcher.rows.values():
        if row["parent"]:
            node = http.get(f"/tree/nodes/{row['id']}").json()
            assert (row["state"], node["pins"]) == ("p", 1)
            pins |= {pin["kind"]: pin["id"] for pin in node["pinned_by"]}
    assert pins.keys() == {"request", "session"}
    assert pins["request"] == shown["id"]
    assert session.startswith(pins["session"].removesuffix("…"))
    assert len(pins["session"]) < len(session), "an id that opens a session was shown whole"
    runtime.executor.step_s = 0.0
    http.delete(f"/v1/sessions/{session}")
    running.join()


def test_a_head_of_the_feed_ends(http: httpx.Client) -> None:
    answer = http.head("/tree/feed")
    assert (answer.status_code, answer.content) == (200, b"")
