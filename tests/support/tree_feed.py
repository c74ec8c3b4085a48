"""A synthetic feed of the tree over HTTP, as large as wanted.

Owns: a tree of many prompts that grows, is split and shrinks, told in the feed's words.  Does not
know: caches, engines.
Idea: a page meets sizes here that a small server can't hold.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from runtime.server.tree_page import tree_page

BLOCK_SIZE = 16
COLUMNS = (
    "id",
    "parent",
    "tokens",
    "blocks",
    "hits",
    "used",
    "pins",
    "state",
    "tier",
    "namespace",
)


class SyntheticTree:
    """A forest of system prompts, chats and turns, drawn at random from a seed."""

    def __init__(self, *, num_nodes: int, seed: int, now: float) -> None:
        self.now = now
        self._random = random.Random(seed)
        self.rows: dict[int, dict[str, Any]] = {}
        self._leaves: list[int] = []
        self._last_id = 0
        self._trunks: list[int] = []
        for namespace in range(3):
            root = self._add(0, 0, namespace)
            self._trunks += [self._add(root, 16 * self._random.randint(8, 60), namespace)] + [
                self._add(root, 16 * self._random.randint(2, 12), namespace) for _ in range(3)
            ]
        while len(self.rows) < num_nodes:
            self.grow()

    def _add(self, parent: int, tokens: int, namespace: int) -> int:
        self._last_id += 1
        name, draw = self._last_id, self._random
        self.rows[name] = {
            "id": name,
            "parent": parent,
            "tokens": tokens,
            "blocks": tokens // BLOCK_SIZE,
            "hits": int(draw.paretovariate(0.9)) - 1,
            "used": round(self.now - draw.expovariate(1 / 400), 3),
            "pins": 0,
            "state": "i" if parent == 0 else "e",
            "tier": "cpu" if draw.random() < 0.05 else "gpu",
            "namespace": namespace,
        }
        if parent:
            self.rows[parent]["state"] = "i"
        return name

    def grow(self) -> set[int]:
        """Add a chat, or a turn to one; returns the ids of the rows that changed."""
        draw = self._random
        parent = draw.choice(self._trunks)
        if self._leaves and draw.random() < 0.5:
            parent = draw.choice(self._leaves)
        name = self._add(parent, 16 * draw.randint(1, 24), self.rows[parent]["namespace"])
        self._leaves.append(name)
        return {parent, name}

    def split(self) -> set[int]:
        """Put a node above one that is longer than a block, with a part of its edge."""
        name = self._random.choice(self._leaves)
        row = self.rows[name]
        if row["tokens"] < 2 * BLOCK_SIZE:
            return set()
        upper = self._add(row["parent"], BLOCK_SIZE, row["namespace"])
        self.rows[upper] |= {"state": "i", "hits": row["hits"], "used": row["used"]}
        row |= {"parent": upper, "tokens": row["tokens"] - BLOCK_SIZE}
        return {upper, name}

    def evict(self) -> list[int]:
        """Give up a leaf; returns its id."""
        parents = {row["parent"] for row in self.rows.values()}
        leaves = [name for name in self._leaves if name not in parents]
        name = self._random.choice(leaves)
        self._leaves.remove(name)
        del self.rows[name]
        return [name]

    def columns(self, names: Sequence[int]) -> dict[str, Any]:
        """Rows as the feed has them."""
        rows = [self.rows[name] for name in names]
        columns: dict[str, Any] = {key: [row[key] for row in rows] for key in COLUMNS}
        columns["namespaces"] = [
            {"label": label, "tenant": tenant}
            for label, tenant in (("base", "alice"), ("base", "bob"), ("sql", "bob"))
        ]
        return columns


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/tree":
            page = tree_page()
            self.send_response(200)
            for key, value in page.headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(bytes(page.body))
        elif path == "/tree/feed":
            self._stream()
        elif path.startswith("/tree/nodes/"):
            self.send_error(404)
        else:
            self._json({"samples": []})

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for kind, message in self.server.events():
                self.wfile.write(f"event: {kind}\ndata: {json.dumps(message)}\n\n".encode())
                self.wfile.flush()
        except OSError:
            return  # the page left


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, tree: SyntheticTree, changes: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.tree = tree
        self.cut = threading.Event()
        self.is_closing = False
        self._changes = changes

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """A snapshot, then changes twice a second, until the feed is cut."""
        if not self.is_closing:  # or a page that comes back just now would be served for ever
            self.cut.clear()
        tree = self.tree
        nodes = tree.columns(list(tree.rows))
        yield (
            "snapshot",
            {"seq": 1, "time": tree.now, "nodes": nodes, "sample": self._sample(0)},
        )
        for seq in range(2, 1 << 30):
            if self.cut.wait(0.5):
                return
            tree.now += 0.5
            names = {name for _ in range(self._changes) for name in tree.grow()} | tree.split()
            removed = tree.evict()
            nodes = tree.columns(sorted(names - set(removed)))
            yield "change", {"seq": seq, "time": tree.now, "nodes": nodes, "removed": removed}
            yield "sample", self._sample(seq)

    def _sample(self, seq: int) -> dict[str, Any]:
        counters = {"asked": 900 * seq, "hit": 600 * seq, "computed": 300 * seq}
        pool = {"free": 1000, "cached": 5000, "pinned": 100, "total": 6100, "evicted": 3 * seq}
        queue = {"waiting": seq % 5, "running": [], "running_total": 0, "generated": 40 * seq}
        first_token = {"ttft_warm": 0.05, "ttft_cold": 0.4}
        size = {"time": self.tree.now, "nodes": len(self.tree.rows)}
        return {**counters, **pool, **queue, **first_token, **size}


@contextmanager
def synthetic_feed(
    *, num_nodes: int, changes: int = 20, seed: int = 0
) -> Iterator[tuple[str, threading.Event]]:
    """Serve page and feed of a tree of so many nodes; yields the base URL, and what cuts the feed.

    changes  chats or turns that are added twice a second
    """
    server = _Server(SyntheticTree(num_nodes=num_nodes, seed=seed, now=time.time()), changes)
    thread = threading.Thread(target=server.serve_forever, name="feed")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.cut
    finally:
        server.is_closing = True
        server.cut.set()
        server.shutdown()
        thread.join()
        server.server_close()
