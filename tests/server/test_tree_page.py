"""`GET /tree`: one file that loads nothing else, under a policy that would not let it."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from runtime.server.tenants import Tenant, Tenants
from runtime.server.tree_page import SCRIPTS, tree_page
from tests.support.served import quick_runtime, serving

MAX_LINES = 400
PIECES = sorted((files("runtime.server") / "pages").iterdir(), key=lambda piece: piece.name)


def test_the_page_is_one_file_with_a_nonce_that_is_used_once() -> None:
    first, second = tree_page(), tree_page()
    nonces = [
        re.findall(r' nonce="([^"]+)"', bytes(page.body).decode()) for page in (first, second)
    ]
    assert len(nonces[0]) == 2
    assert set(nonces[0]).isdisjoint(nonces[1])
    for page, (nonce, _) in zip((first, second), nonces, strict=True):
        assert f"script-src 'nonce-{nonce}'" in page.headers["content-security-policy"]
        assert "{{" not in bytes(page.body).decode()


def test_the_page_names_no_other_server_and_makes_no_markup_of_text() -> None:
    text = bytes(tree_page().body).decode()
    addresses = set(re.findall(r"https?://[\w./-]+", text))
    assert addresses == {
        "http://www.w3.org/2000/svg"
    }  # the name of a namespace, which nobody loads
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<[^>]+\s(src|style|on\w+)=", text.partition("<script")[0])


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_the_pieces_of_the_page_stay_short_and_are_all_in_it(piece) -> None:
    text = piece.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    if piece.name.endswith(".js"):
        assert piece.name.removesuffix(".js") in SCRIPTS
        assert text.startswith("// ")
        assert "Owns:" in text
        assert "Does not know:" in text


def test_the_page_is_shown_without_a_key_and_its_feed_is_not() -> None:
    tenants = Tenants({"acme": Tenant(keys=("sk-acme-1234",))}, secret=b"0123456789abcdef")
    with (
        serving(quick_runtime(), tenants=tenants) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        assert http.get("/tree").status_code == 200
        assert http.get("/tree/feed").status_code == 401
