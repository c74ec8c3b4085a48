"""The page of the live tree in a real browser, against a real server under load."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from runtime.loading import Runtime
from runtime.server.tenants import Tenant, Tenants
from tests.browser.chromium import Page
from tests.support.served import quick_runtime, serving

TREE = "radixcacheTree"
SYSTEM = "You are careful with <img src=x onerror=alert(1)> and other markup. " * 4
KEYS = {name: f"sk-{name}-12345" for name in ("acme", "globex", "ops")}


def chat(url: str, words: str, *, key: str | None = None, system: str = SYSTEM) -> None:
    """One conversation of one turn."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": words}]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"messages": messages, "max_tokens": 24, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200


@contextmanager
def load(url: str) -> Iterator[threading.Event]:
    """Four clients that chat until they are told to stop."""
    ended = threading.Event()

    def client(number: int) -> None:
        for turn in itertools.count():
            if ended.is_set():
                return
            with suppress(httpx.HTTPError):
                chat(url, f"client {number} asks for the {turn}th time " + "about it " * 12)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def served(page: Page, runtime: Runtime, *, complaint: str = "", **more: Any) -> Iterator[str]:
    """A server that the page has left before it stops; the page complains of nothing else."""
    with serving(runtime, **more) as url:
        yield url
        assert all(complaint and complaint in words for words in page.leave())


@pytest.fixture
def runtime() -> Runtime:
    runtime = quick_runtime(num_blocks=600)
    runtime.executor.step_s = 0.004  # type: ignore[attr-defined]
    return runtime


def size_of(page: Page) -> int:
    return int(page.run(f"{TREE}.model.size"))


def test_a_tree_without_nodes_says_so(page: Page, runtime: Runtime) -> None:
    with served(page, runtime) as url:
        page.open(f"{url}/tree")
        page.wait(
            "document.querySelector('#empty-title').textContent.includes('Nothing is cached')"
        )
        assert page.text("#state") == "live"


def test_the_tree_grows_while_requests_run_and_panels_follow(page: Page, runtime: Runtime) -> None:
    with served(page, runtime) as url:
        page.open(f"{url}/tree")
        page.wait("document.querySelector('#state').dataset.state === 'live'")
        with load(url):
            page.wait(f"{TREE}.model.size > 4")
            before = size_of(page)
            page.wait(f"{TREE}.model.size > {before + 3}")
            page.wait("document.querySelectorAll('#running tbody tr td:nth-child(7)').length > 0")
            page.wait(f"{TREE}.timeline.samples.filter((one) => one.asked > 0).length > 2")
            # The first system prompt is shared, so most tokens that are asked for are hit.
            page.wait("parseFloat(document.querySelector('#chart-hits .now').textContent) > 30")
        panels = page.run("[...document.querySelectorAll('.chart h3')].map((h) => h.textContent)")
        titles = ["Prompt tokens", "Hit rate", "Pool", "Evictions", "Queue", "Generated tokens"]
        assert panels[:6] == titles
        assert "Now: hit " in page.text("#chart-hits-words")
        table = "document.querySelector('#chart-pool details')"
        page.run(f"{table}.open = true")
        page.wait(f"{table}.querySelectorAll('td').length >= 5")


def test_the_page_ends_with_what_the_cache_holds(page: Page, runtime: Runtime) -> None:
    with served(page, runtime) as url:
        page.open(f"{url}/tree")
        with load(url):
            page.wait(f"{TREE}.model.size > 20")
        page.wait(f"[...{TREE}.model.nodes.values()].every((node) => node.row.pins === 0)")
        nodes = len(runtime.engine.cache.view().nodes)
        page.wait(
            f"[...{TREE}.model.nodes.values()].filter((n) => n.row.parent).length === {nodes}"
        )
        parents = page.run(
            f"[...{TREE}.model.nodes.values()].every((n) => !n.row.parent"
            f" || {TREE}.model.nodes.has(n.row.parent))"
        )
        assert parents


def test_a_click_shows_the_text_as_text(page: Page, runtime: Runtime) -> None:
    with served(page, runtime) as url:
        chat(url, "hello")
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.stage.drawing && {TREE}.stage.drawing.shown.length > 0")
        page.wait(f"{TREE}.stage.view.isPlaced")
        box = page.run(
            f"""(() => {{ const box = {TREE}.stage.drawing.shown[0];
            const at = document.querySelector('#stage').getBoundingClientRect();
            return [at.left + box.x + 5, at.top + box.y + box.h / 2]; }})()"""
        )
        page.click(*box)
        page.wait("document.querySelector('#details pre')")
        assert "<img src=x onerror=alert(1)>" in page.text("#details pre")
        assert page.run("document.querySelectorAll('img').length") == 0
        facts = page.text("#details .facts")
        for name in ("Hits", "Last use", "Pinned by", "Evicted", "Blocks", "Prefix up to its end"):
            assert name in facts
        assert "nobody" in facts


def test_the_keyboard_walks_the_tree_and_a_screen_reader_is_told(
    page: Page, runtime: Runtime
) -> None:
    with served(page, runtime) as url:
        for number in range(3):
            chat(url, f"question {number} " * 20)
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.model.size > 3")
        page.run("document.querySelector('#stage').focus()")
        for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown"):
            page.press(key)
        name = page.run("document.querySelector('#stage').getAttribute('aria-activedescendant')")
        chosen = page.run(f"document.getElementById('{name}').textContent")
        (item,) = [item for item in page.accessible("treeitem") if item.get("selected")]
        assert item["name"] == chosen
        assert item["level"] == 3
        assert "tokens" in chosen
        assert "evictable leaf" in chosen
        page.press("ArrowLeft")
        (item,) = [item for item in page.accessible("treeitem") if item.get("selected")]
        assert (item["level"], item["expanded"]) == (2, True)
        page.press("Enter")
        page.wait(f"!{TREE}.stage.view.follows")
        page.press("Escape")
        page.wait(f"{TREE}.stage.view.follows && {TREE}.selected === null")
        (tree,) = page.accessible("tree")
        assert tree["name"] == "Cached prefixes"
        assert all(chart["name"] for chart in page.accessible("image"))
        assert all(button["name"] for button in page.accessible("button"))


def test_what_is_paused_stands_still_and_goes_live_again(page: Page, runtime: Runtime) -> None:
    with served(page, runtime) as url:
        page.open(f"{url}/tree")
        page.wait("document.querySelector('#state').dataset.state === 'live'")
        with load(url):
            page.wait(f"{TREE}.model.size > 6")
            page.run("document.querySelector('#stage').focus()")
            page.press(" ")
            page.wait("document.querySelector('#state').dataset.state === 'paused'")
            before = size_of(page)
            page.wait(f"{TREE}.timeline.log.length - {TREE}.timeline.place > 3")
            assert size_of(page) == before
            page.run(
                "(() => { const slider = document.querySelector('#scrub');"
                "slider.value = slider.min; slider.dispatchEvent(new Event('input')); })()"
            )
            assert size_of(page) < before
            assert "goes back" in page.text("#scrub-text")
            page.press(" ")
            page.wait(f"{TREE}.model.size > {before}")
            assert page.text("#state") == "live"


def test_colours_follow_the_system_and_the_switch(page: Page, runtime: Runtime) -> None:
    ground = "getComputedStyle(document.body.parentElement).backgroundColor"
    with served(page, runtime) as url:
        page.open(f"{url}/tree")
        light = page.run(ground)
        page.show_as(width=1280, height=900, scheme="dark")
        page.wait(f"{ground} !== '{light}'")
        dark = page.run(ground)
        page.run("document.querySelector('#theme').click()")
        assert page.run(ground) == light
        page.run("document.querySelector('#theme').click()")
        page.show_as(width=1280, height=900, scheme="light")
        assert page.run(ground) == dark


def test_a_phone_has_no_room_beside_and_two_fingers_zoom(page: Page, runtime: Runtime) -> None:
    page.show_as(width=390, height=844, is_phone=True)
    with served(page, runtime) as url:
        chat(url, "hello")
        page.open(f"{url}/tree")
        page.wait(f"{TREE}.stage.view.isPlaced")
        assert page.run("document.documentElement.scrollWidth") <= 390
        small = page.run(
            "[...document.querySelectorAll('button')].filter((button) => button.offsetWidth"
            " && button.offsetHeight < 36).length"
        )
        assert small == 0
        top = page.run("document.querySelector('#stage').getBoundingClientRect().top")
        before = page.run(f"{TREE}.stage.view.kx")
        page.touch("touchStart", (120, top + 150), (180, top + 150))
        page.touch("touchMove", (80, top + 150), (260, top + 150))
        page.touch("touchEnd")
        page.wait(f"{TREE}.stage.view.kx > {before * 1.5}")


def three_tenants() -> Tenants:
    return Tenants(
        {name: Tenant(keys=(key,), admin=name == "ops") for name, key in KEYS.items()},
        secret=b"0123456789abcdef",
    )


def give(page: Page, key: str) -> None:
    """Type a key into the page's dialog and send it off."""
    page.wait("document.querySelector('#key-dialog').open")
    page.run("document.querySelector('#key').focus()")
    page.write(key)
    page.press("Enter")


def test_a_tenant_sees_its_own_tree_and_an_operator_lengths(page: Page, runtime: Runtime) -> None:
    with served(page, runtime, complaint="401", tenants=three_tenants()) as url:
        chat(url, "of acme", key=KEYS["acme"], system="Acme's own system prompt. " * 12)
        chat(url, "of globex", key=KEYS["globex"], system="What globex alone may read. " * 12)
        page.open(f"{url}/tree")
        give(page, "sk-wrong-12345")
        page.wait("document.querySelector('#key-error').textContent")
        give(page, KEYS["acme"])
        page.wait(f"{TREE}.model.size > 1")
        assert page.run(f"{TREE}.model.namespaces.length") == 1
        page.run("document.querySelector('#stage').focus()")
        for key in ("ArrowDown", "ArrowRight"):
            page.press(key)
        page.wait("document.querySelector('#details pre')")
        assert "Acme's own system prompt." in page.text("#details pre")
        page.run("document.querySelector('#key-open').click()")
        give(page, KEYS["ops"])
        page.wait(f"{TREE}.model.namespaces.length === 2")
        page.run("document.querySelector('#stage').focus()")
        for key in ("ArrowDown", "ArrowRight"):
            page.press(key)
        page.wait("document.querySelector('#details .hidden-text')")
        assert "system prompt" not in page.text("#details")
        assert not any("sk-" in request["url"] for request in page.requests())
