"""`python -m tests.browser.pictures URL FOLDER`: the pictures of docs/tree.md, of a running server.

Made with `radixcache serve --num-blocks 200`, so that something is evicted, too.

Owns: chats that make a lively tree, and the three pictures.  Does not know: what they should show.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
from PIL import Image

from tests.browser.chromium import Page, chromium, find_browser, new_page

SYSTEMS = (
    "You are the support assistant of a bicycle shop. Answer in two short sentences. Never promise "
    "a delivery date. If a customer is angry, say that you are sorry once and go on. Prices are in "
    "euros and include tax. The shop repairs on Tuesdays and Thursdays, from nine to six.",
    "You translate technical documents from German into plain English. Keep numbers, units and the "
    "names of parts as they are. Keep headings. Where a sentence is not clear, give both readings "
    "and say which of them is the likelier one. Never leave a sentence out.",
    "You review Python code. Name the most serious fault first, with its line. Say what input "
    "makes it fail. Propose the smallest change that mends it, and a test that fails without it.",
)
QUESTIONS = (
    "My chain slips when I stand up. What should I look at first?",
    "How often does the chain need oil if I ride in the rain every day?",
    "Can I put wider tyres on a frame from 1998?",
    "What does a brake service cost, and how long does it take?",
    "Das Ventil ist vor dem Ausbau zu schliessen und gegen Wiedereinschalten zu sichern.",
    "Anzugsmoment der Schrauben M8: 25 Nm, ueber Kreuz in zwei Stufen.",
    "def mean(xs): return sum(xs) / len(xs)",
    "for key in cache: if cache[key] < now: del cache[key]",
)
FOLLOWING = ("And what if that does not help?", "Say it in one sentence.", "Why is that so?")
SECONDS = 75.0


def chat(url: str, seed: int, ended: threading.Event) -> None:
    """Conversations of some turns, one after the other."""
    draw = random.Random(seed)
    with httpx.Client(base_url=url, timeout=120) as http, suppress(httpx.HTTPError):
        while not ended.is_set():
            messages = [{"role": "system", "content": draw.choice(SYSTEMS)}]
            for turn in range(draw.randint(1, 4)):
                words = draw.choice(FOLLOWING if turn else QUESTIONS)
                messages.append({"role": "user", "content": words})
                body = {"messages": messages, "max_tokens": draw.randint(16, 60)}
                answer = http.post("/v1/chat/completions", json=body).json()
                messages.append(answer["choices"][0]["message"])
                if ended.is_set():
                    return


def take(page: Page, folder: Path) -> None:
    """Choose a node, and take the page in light, in dark and on a phone."""
    page.run("document.querySelector('#stage').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "0"):
        page.press(key)
    page.run("document.activeElement.blur()")
    for name, scheme in (("tree-light", "light"), ("tree-dark", "dark")):
        page.show_as(width=1440, height=1660, scheme=scheme)
        time.sleep(2)
        page.picture(folder / f"{name}.png")
    page.show_as(width=390, height=844, is_phone=True, scheme="light")
    time.sleep(2)
    page.picture(folder / "tree-phone.png")
    for path in folder.glob("tree-*.png"):
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(256).save(path, optimize=True)


def main(url: str, folder: Path) -> None:
    """Chat with a server for a while, and take the pictures while it goes on."""
    executable = find_browser()
    if executable is None:
        raise SystemExit("no browser: `make browser` fetches one")
    ended = threading.Event()
    clients = [threading.Thread(target=chat, args=(url, seed, ended)) for seed in range(5)]
    with chromium(executable) as pipe, new_page(pipe) as page:
        page.show_as(width=1440, height=1660)
        page.open(f"{url}/tree")
        for client in clients:
            client.start()
        time.sleep(SECONDS)
        take(page, folder)
        ended.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
