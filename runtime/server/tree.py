"""The live tree over HTTP: the page, its feed, one node, and the samples of the last minutes.

Owns: from a request to the feed and back.  Does not know: how the tree is watched, how it is drawn.
Idea: the page is a file without a word of anybody's, so it is served to whoever asks; everything
that it shows comes by the feed, with the key that its reader types in.
"""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from radixcache.tokens import unpack_tokens
from runtime.server.context import Served, caller_of
from runtime.server.disconnect import EventStream
from runtime.server.errors import json_response
from runtime.server.openapi import Endpoint
from runtime.server.tree_feed import TreeFeed
from runtime.server.tree_page import tree_page
from runtime.tree.records import TIER, History, NodeAnswer

MAX_PINS = 64
"""Pins of a node that are told one by one."""

INTERVAL_S = 1.0
"""Seconds between two samples."""

_HIDDEN = (
    "the text is its tenant's alone: use that tenant's key, or start the server with --show-text"
)


class TreeEndpoints:
    """The endpoints of the live tree, over one feed."""

    def __init__(self, served: Served, feed: TreeFeed) -> None:
        self._served = served
        self._feed = feed

    def endpoints(self) -> list[Endpoint]:
        """Return what is served, as it is routed and documented."""
        return [
            Endpoint(
                "GET",
                "/tree",
                self.page,
                "A page that shows the live tree",
                media_type="text/html",
            ),
            Endpoint(
                "GET",
                "/tree/feed",
                self.feed,
                "The tree as it is, and then each change, as server-sent events",
                media_type=EventStream.media_type,
            ),
            Endpoint(
                "GET",
                "/tree/nodes/{node}",
                self.node,
                "What one node of the tree is",
                answer=NodeAnswer,
            ),
            Endpoint(
                "GET",
                "/tree/history",
                self.history,
                "The samples of the last 15 minutes",
                answer=History,
            ),
        ]

    async def page(self, request: HttpRequest) -> Response:
        """`GET /tree`: the page; nothing but its own script and style runs in it."""
        return tree_page()

    async def feed(self, request: HttpRequest) -> Response:
        """`GET /tree/feed`: a snapshot, then changes and samples, until somebody goes away."""
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        events = await self._feed.open(caller_of(request))
        return EventStream(events, is_framed=True)

    async def node(self, request: HttpRequest) -> Response:
        """`GET /tree/nodes/{id}`: that node in full, or 404."""
        caller, feed = caller_of(request), self._feed
        name = request.path_params["node"]
        is_number = name.isascii() and name.isdigit() and len(name) < 16
        found = await feed.node(caller, int(name)) if is_number else None
        if found is None:
            raise HTTPException(404, f"there is no node {name!r} any more, or never was")
        row, label = found.row, feed.label(found.row.namespace)
        token_ids = text = None
        if shown := feed.shows_text(caller, row.namespace):
            token_ids = unpack_tokens(found.tokens)
            tokenizer = self._served.runtime.tokenizer
            text = await run_in_threadpool(tokenizer.decode, token_ids, skip_special=False)
        return json_response(
            NodeAnswer(
                id=row.node_id,
                parent=row.parent,
                path_tokens=found.path_tokens,
                tokens=row.num_tokens,
                token_ids=token_ids,
                text=text,
                text_hidden=None if shown else _HIDDEN,
                blocks=found.block_ids if caller.is_admin else [],
                num_blocks=row.num_blocks,
                hits=row.num_hits,
                used=feed.when(row.last_access),
                created=feed.when(found.created),
                pins=len(found.pins),
                pinned_by=found.pins[:MAX_PINS],
                eviction_rank=found.rank,
                children=found.num_children,
                state=row.state,
                tier=TIER,
                namespace=label.label,
                tenant=label.tenant,
            )
        )

    async def history(self, request: HttpRequest) -> Response:
        """`GET /tree/history`: what the caller may see of the last 15 minutes, oldest first."""
        samples = self._feed.history(caller_of(request))
        return json_response(History(interval_s=INTERVAL_S, samples=samples))
