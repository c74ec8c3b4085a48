"""A headless Chromium, driven over two pipes by the DevTools protocol.

Owns: starting and ending it, one page in it, and what that page did (requests, console, errors).
Does not know: which page.
Idea: `--remote-debugging-pipe` takes JSON that ends with a zero byte on descriptor 3 and answers on
4, so nothing but the browser itself is needed: no driver, no port, no web socket.
Source: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.weights.pull import cache_folder

ENVIRONMENT_VARIABLE = "RADIXCACHE_BROWSER"
VERSION = "147.0.0"
"""Of the package `@sparticuz/chromium`, which brings the browser of the same number."""

TIMEOUT_S = 60.0
"""How long an answer may take before the browser counts as dead; nothing is measured by it."""

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers, and open only their own pages
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--no-pings",
    "--font-render-hinting=none",
    "--remote-debugging-pipe",
)

KEYS = {
    " ": (" ", "Space", 32),
    "Enter": ("\r", "Enter", 13),
    "Escape": ("", "Escape", 27),
    "Home": ("", "Home", 36),
    "End": ("", "End", 35),
    "Tab": ("", "Tab", 9),
    "ArrowLeft": ("", "ArrowLeft", 37),
    "ArrowUp": ("", "ArrowUp", 38),
    "ArrowRight": ("", "ArrowRight", 39),
    "ArrowDown": ("", "ArrowDown", 40),
}
"""Text, code and number of the keys that tests press."""


def fetched_browser() -> Path:
    """Return where `make browser` puts the browser."""
    return cache_folder(os.environ) / "browser" / VERSION / "chromium"


def find_browser() -> Path | None:
    """Return the browser that the environment names, else the one that was fetched, if any."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(named)
    fetched = fetched_browser()
    return fetched if fetched.exists() else None


class PageFailure(AssertionError):
    """The page raised, or did not come to what a test waits for."""


class Pipe:
    """One connection to a browser: calls with their answers, and events as they come."""

    def __init__(self, reading: int, writing: int) -> None:
        self._writing = writing
        self._reading = os.fdopen(reading, "rb", buffering=0)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, name="devtools", daemon=True)
        self._thread.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of one command; raises PageFailure with the browser's words."""
        self._last_id += 1
        name = self._last_id
        answers = self._answers[name] = queue.Queue()
        message: dict[str, Any] = {"id": name, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._write(json.dumps(message).encode() + b"\0")
        try:
            answer = answers.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise PageFailure(f"the browser did not answer {method}") from None
        del self._answers[name]
        if "error" in answer:
            raise PageFailure(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _write(self, message: bytes) -> None:
        while message:
            message = message[os.write(self._writing, message) :]

    def _read(self) -> None:
        kept = b""
        while piece := self._reading.read(1 << 16):
            *whole, kept = (kept + piece).split(b"\0")
            for text in whole:
                message = json.loads(text)
                if "id" in message:
                    self._answers[message["id"]].put(message)
                else:
                    self.events.append(message)

    def close(self) -> None:
        """Close both ends; the browser ends when its own is closed."""
        os.close(self._writing)
        self._thread.join(timeout=TIMEOUT_S)
        self._reading.close()


class Page:
    """One tab, with everything that it asked for and complained of."""

    def __init__(self, pipe: Pipe, session: str) -> None:
        self._pipe = pipe
        self._session = session
        self._first_event = 0
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._pipe.call(method, self._session, **params)

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._pipe.events[self._first_event :]
            if event["method"] == method and event.get("sessionId") == self._session
        ]

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page's script has run."""
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && window.radixcacheTree")

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description") or details["text"]
            raise PageFailure(f"{script}\n{text}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Return the first true value of an expression, looked at in each frame."""
        return self.run(
            f"""new Promise((resolve, reject) => {{
              const end = Date.now() + {TIMEOUT_S * 900};
              const look = () => {{
                let value = null;
                try {{ value = ({condition}); }} catch (error) {{ value = null; }}
                if (value) resolve(value);
                else if (Date.now() > end) reject(new Error("never came true"));
                else setTimeout(look, 20);
              }};
              look();
            }})"""
        )

    def text(self, selector: str) -> str:
        """Return the text of the first element that a selector finds."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, x: float, y: float, *, count: int = 1) -> None:
        """Press and release the mouse at a place of the window, in pixels."""
        self.mouse("mouseMoved", x, y)
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, button="left", clickCount=number)
            self.mouse("mouseReleased", x, y, button="left", clickCount=number)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send one event of the mouse."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        """Send one event of so many fingers."""
        fingers = [{"x": x, "y": y, "id": at} for at, (x, y) in enumerate(points)]
        self._call("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text, code, number = KEYS.get(key, (key, f"Key{key.upper()}", ord(key.upper()[0])))
        event: dict[str, Any] = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        down = {"text": text} if text else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **event, **down)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def show_as(
        self, *, width: int, height: int, is_phone: bool = False, scheme: str = "light"
    ) -> None:
        """Give the window a size, and the system a colour scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        self._call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def accessible(self, role: str) -> list[dict[str, Any]]:
        """Return what a screen reader finds of one role: name, and properties by their names."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            {"name": node.get("name", {}).get("value", "")}
            | {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
            for node in nodes
            if not node["ignored"] and node["role"]["value"] == role
        ]

    def picture(self, path: Path) -> None:
        """Write what is seen as a PNG file."""
        answer = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def requests(self) -> list[dict[str, Any]]:
        """Return every request that the page made: url, method, headers."""
        return [event["request"] for event in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Return what the console shows: errors, warnings, and exceptions that nobody caught."""
        logged = [event["entry"] for event in self._events("Log.entryAdded")]
        said = self._events("Runtime.consoleAPICalled")
        thrown = [event["exceptionDetails"] for event in self._events("Runtime.exceptionThrown")]
        return [
            *(f"{e['text']} {e.get('url', '')}" for e in logged if e["level"] != "verbose"),
            *(str(event["args"]) for event in said),
            *(str(details.get("exception", details)) for details in thrown),
        ]

    def leave(self) -> list[str]:
        """Go away from the page; return its complaints, which count no more."""
        self._call("Page.navigate", url="about:blank")
        found = self.complaints()
        self._first_event = len(self._pipe.events)
        return found


@contextmanager
def chromium(executable: Path) -> Iterator[Pipe]:
    """Run a browser with a profile of its own, which is thrown away."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Away from 3 and 4, which the browser's ends become.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
    os.close(theirs_in)
    os.close(theirs_out)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pid = os.posix_spawn(
            executable,
            [str(executable), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": profile, **_libraries(executable)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, theirs[0], 3),
                (os.POSIX_SPAWN_DUP2, theirs[1], 4),
            ],
            setpgroup=0,
        )
        for end in theirs:
            os.close(end)
        pipe = Pipe(ours_in, ours_out)
        try:
            yield pipe
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.close()


def _libraries(executable: Path) -> dict[str, str]:
    """What the fetched browser needs where the system lacks it."""
    folder = executable.parent / "lib"
    return {"LD_LIBRARY_PATH": str(folder)} if folder.is_dir() else {}


@contextmanager
def new_page(pipe: Pipe) -> Iterator[Page]:
    """Open a tab that shares nothing with others, and close it."""
    context = pipe.call("Target.createBrowserContext")["browserContextId"]
    target = pipe.call("Target.createTarget", url="about:blank", browserContextId=context)
    name = target["targetId"]
    session = pipe.call("Target.attachToTarget", targetId=name, flatten=True)["sessionId"]
    try:
        yield Page(pipe, session)
    finally:
        pipe.call("Target.disposeBrowserContext", browserContextId=context)
