"""`GET /tree`: the page that draws the live tree, as one file without outside assets.

Owns: putting its pieces together, and what a browser may do with it.  Does not know: the feed.
Idea: the page holds no word of anybody's cache, so it needs no key; what it shows comes through the
feed, for which it asks for one.
"""

from __future__ import annotations

import secrets
from functools import cache
from importlib.resources import files

from starlette.responses import Response

SCRIPTS = (
    "words",
    "model",
    "timeline",
    "feed",
    "texts",
    "layout",
    "colours",
    "draw",
    "view",
    "stage",
    "outline",
    "details",
    "charts",
    "panels",
    "main",
)
"""The script's files, in the order in which they stand in the page."""

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""What the page may load and whom it may talk to: this server alone."""


def tree_page() -> Response:
    """Return the page, with a nonce of its own.  Costs two replacements in about 100 kB."""
    nonce = secrets.token_urlsafe(16)
    return Response(
        _page().replace("{{nonce}}", nonce),
        media_type="text/html",
        headers={
            "content-security-policy": POLICY.format(nonce=nonce),
            "cache-control": "no-store",  # a nonce is used once
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        },
    )


@cache
def _page() -> str:
    """The page without its nonce, put together once a process."""
    folder = files("runtime.server") / "pages"
    script = "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    style = (folder / "tree.css").read_text(encoding="utf-8")
    page = (folder / "tree.html").read_text(encoding="utf-8")
    return page.replace("{{style}}", style).replace("{{script}}", script)
