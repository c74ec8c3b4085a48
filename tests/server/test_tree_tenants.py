"""The live tree with API keys: who sees which nodes, whose text, and nothing of anybody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.config import ServerConfig
from runtime.server.tenants import Share, Tenant, Tenants
from runtime.server.tree_feed import MAX_OWN_READERS
from tests.support.served import serving
from tests.support.tree_reader import Watcher, events_of, snapshot

KEYS = {name: {"Authorization": f"Bearer sk-{name}-12345"} for name in ("acme", "globex", "ops")}
PUBLIC = list(range(3000, 3032))


def tenants(**shares: Share) -> Tenants:
    return Tenants(
        {
            name: Tenant(
                keys=(KEYS[name]["Authorization"].split()[1],),
                admin=name == "ops",
                quota=shares.get(name),
            )
            for name in KEYS
        },
        secret=b"0123456789abcdef",
    )


@contextmanager
def served(runtime: Runtime, **options: Any) -> Iterator[httpx.Client]:
    options = {"tenants": tenants()} | options
    with serving(runtime, **options) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def complete(http: httpx.Client, name: str, begin: int, **fields: Any) -> None:
    body = {"prompt": list(range(begin, begin + 40)), "max_tokens": 2, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body | fields, headers=KEYS[name])
    assert answer.status_code == 200, answer.text


def node(http: httpx.Client, name: str, number: int) -> Any:
    answer = http.get(f"/tree/nodes/{number}", headers=KEYS[name])
    return answer.json() if answer.status_code == 200 else answer.status_code


def leaf_of(watcher: Watcher, label: str) -> int:
    (leaf,) = (
        row["id"] for row in watcher.rows.values() if row["parent"] and row["namespace"] == label
    )
    return int(leaf)


def test_a_key_is_asked_for_by_all_but_the_page(runtime: Runtime) -> None:
    with served(runtime) as http:
        for path in ("/tree/feed", "/tree/nodes/1", "/tree/history"):
            assert http.get(path).status_code == 401
            assert http.get(path, params={"key": "sk-ops-12345"}).status_code == 401
        assert http.get("/tree").status_code != 401


def test_a_tenant_sees_its_own_nodes_and_what_is_public(runtime: Runtime) -> None:
    with served(runtime, public_prefix=PUBLIC) as http:
        complete(http, "acme", 1000)
        complete(http, "acme", 1200, cache_salt="a team")
        complete(http, "globex", 2000)
        own = snapshot(http, headers=KEYS["acme"])
        other = snapshot(http, headers=KEYS["globex"])
        every = snapshot(http, headers=KEYS["ops"])
        labels = {row["namespace"] for row in own.rows.values()}
        text = str(own.rows) + str(own.samples)
        public = leaf_of(own, "public prefix")
        assert node(http, "acme", public)["pinned_by"][0]["kind"] == "public"
        assert node(http, "acme", public)["token_ids"] == PUBLIC
        assert node(http, "ops", leaf_of(every, "public prefix"))["token_ids"] == PUBLIC
    narrowed = {label for label in labels if label.startswith("acme · salt ")}
    assert len(narrowed) == 1
    assert labels - narrowed == {"acme", "public prefix"}
    assert {row["namespace"] for row in other.rows.values()} == {"globex", "public prefix"}
    assert len(every.rows) == len(own.rows) + len(other.rows) - 2
    assert "globex" not in text
    assert not any(salt in text for salt in tenants().salts), "a salt was shown"


def test_nothing_of_a_tenants_feed_moves_because_another_does_something(runtime: Runtime) -> None:
    with served(runtime) as http:
        complete(http, "acme", 1000)
        watcher = Watcher()
        with http.stream("GET", "/tree/feed", headers=KEYS["acme"]) as answer:
            events = events_of(answer)
            watcher.take(next(events))
            for i in range(4):
                complete(http, "globex", 2000 + 100 * i)
            names = []
            for event in events:
                names.append(event.name)
                watcher.take(event)
                if len(watcher.samples) == 4:
                    break
            complete(http, "acme", 1100)
            watcher.take(next(event for event in events if event.name == "change"))
        history = http.get("/tree/history", headers=KEYS["acme"]).json()["samples"]
        nothing = http.get("/tree/history", headers=KEYS["ops"]).json()["samples"]
    assert names == ["sample"] * 3, "a change of another's was told of"
    told = [{k: v for k, v in sample.items() if k != "time"} for sample in watcher.samples]
    assert told[0] == told[-1]
    assert (told[0]["asked"], told[0]["total"], told[0]["free"]) == (40, 2, 0)
    assert {sample["asked"] for sample in history} <= {40, 80}
    assert max(sample["asked"] for sample in nothing) >= 200
    # Numbers follow one another, whatever nodes others have made between.
    assert sorted(watcher.rows) == [1, 2, 3]


def test_a_tenants_numbers_lead_to_no_node_of_anothers(runtime: Runtime) -> None:
    with served(runtime) as http:
        complete(http, "globex", 2000)
        complete(http, "acme", 1000)
        every = snapshot(http, headers=KEYS["ops"])
        own = snapshot(http, headers=KEYS["acme"])
        mine = leaf_of(own, "acme")
        found = node(http, "acme", mine)
        seen = [node(http, "acme", number) for number in range(1, 12)]
        assert leaf_of(every, "acme") != mine
    assert found["token_ids"] == list(range(1000, 1032))
    assert (found["blocks"], found["num_blocks"], found["tenant"]) == ([], 2, "acme")
    assert {one["tenant"] for one in seen if one != 404} == {"acme"}
    assert sum(one != 404 for one in seen) == 2


def test_a_place_in_the_order_of_eviction_counts_own_leaves(runtime: Runtime) -> None:
    with served(runtime) as http:
        for i in range(3):
            complete(http, "globex", 2000 + 100 * i)
            complete(http, "acme", 1000 + 100 * i)
        own = snapshot(http, headers=KEYS["acme"])
        every = snapshot(http, headers=KEYS["ops"])

        def ranks(name: str, watcher: Watcher) -> list[int]:
            leaves = [row["id"] for row in watcher.rows.values() if row["state"] == "e"]
            return sorted(node(http, name, leaf)["eviction_rank"] for leaf in leaves)

        assert ranks("acme", own) == [0, 1, 2]
        assert ranks("ops", every) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("show_text", [False, True])
def test_an_administrator_reads_others_text_only_where_it_was_asked_for(
    runtime: Runtime, show_text: bool
) -> None:
    with served(runtime, settings=ServerConfig(show_text=show_text)) as http:
        complete(http, "acme", 1000)
        complete(http, "ops", 5000)
        with http.stream("GET", "/tree/feed", headers=KEYS["ops"]) as answer:
            first = next(events_of(answer))
        every = snapshot(http, headers=KEYS["ops"])
        theirs = node(http, "ops", leaf_of(every, "acme"))
        ours = node(http, "ops", leaf_of(every, "ops"))
        with http.stream("GET", "/tree/feed", headers=KEYS["acme"]) as answer:
            own = next(events_of(answer))
    assert first.data["show_text"] is show_text
    assert own.data["show_text"] is True
    assert (theirs["tokens"], theirs["tenant"]) == (32, "acme")
    assert len(theirs["blocks"]) == 2
    if show_text:
        assert theirs["token_ids"] == list(range(1000, 1032))
        assert theirs["text_hidden"] is None
    else:
        assert theirs["token_ids"] is theirs["text"] is None
        assert "--show-text" in theirs["text_hidden"]
    assert ours["token_ids"] == list(range(5000, 5032))


def test_a_tenant_cannot_take_all_feeds(runtime: Runtime) -> None:
    with served(runtime) as http, ExitStack() as feeds:
        reading = []  # a stream that nobody iterates over any more is closed
        for _ in range(MAX_OWN_READERS):
            feed = feeds.enter_context(http.stream("GET", "/tree/feed", headers=KEYS["acme"]))
            reading.append(events_of(feed))
            assert next(reading[-1]).name == "snapshot"
        with http.stream("GET", "/tree/feed", headers=KEYS["acme"]) as refused:
            assert refused.status_code == 429
            assert "close one" in refused.read().decode()
        assert snapshot(http, headers=KEYS["globex"]).rows == {}
        assert snapshot(http, headers=KEYS["ops"]).rows == {}


def test_a_hard_quota_is_a_tenants_whole_pool(runtime: Runtime) -> None:
    shares = {"acme": Share(soft=0.25, hard=0.25)}
    with served(runtime, tenants=tenants(**shares)) as http:
        for i in range(8):
            complete(http, "acme", 1000 + 100 * i)
        own = snapshot(http, headers=KEYS["acme"]).samples[0]
    assert own["free"] + own["cached"] == own["total"] == 16
    assert own["evicted"] > 0
    assert own["nodes"] == 8 - own["evicted"] // 2
