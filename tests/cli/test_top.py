"""`radixcache top` against a real server: once, as JSON, and in a terminal with keys pressed."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from runtime.cli import quick
from runtime.cli.asking import Server
from runtime.server.tenants import load_tenants
from runtime.top.feed import FeedThread, Lost, Refused
from runtime.top.model import Snapshot
from tests.support.served import quick_runtime, serving

QUICK = "import sys; from runtime.cli import quick; sys.exit(quick.main())"
LIMIT_S = 60.0
ESCAPES = re.compile(rb"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\([AB])")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with a few prompts cached."""
    with serving(quick_runtime(num_blocks=128)) as url:
        for place in range(4):
            body = {"prompt": f"{'Once upon a time. ' * 20}{place} {'x ' * 40}", "max_tokens": 2}
            assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        yield url


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = quick.run(tuple(quick.COMMANDS.values()), ["top", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_one_frame_is_printed_in_words(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = printed(capsys, url, "--once")
    assert code == 0
    assert out.startswith(f"radixcache top  {url}  live\n")
    assert re.search(r"tree of \d+ nodes by size, \d+ lines shown", out)
    assert re.search(r"\n  namespace default: \d+ blocks \(\d+%\), ", out)
    assert re.search(r"\n    node \d+, tokens 0–\d+: .* used \d+ s ago, inner", out)
    assert re.search(r"\n      node \d+, tokens \d+–\d+: .* used \d+ s ago, evictable", out)
    assert "\x1b" not in out
    code, short, _ = printed(capsys, url + "/v1/", "--once", "--lines", "1")
    assert code == 0
    assert "1 lines shown" in short
    assert "nodes below" in short


def test_json_is_one_sample(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = printed(capsys, url, "--json")
    assert code == 0
    sample = json.loads(out)
    assert sample["asked"] > sample["hit"] > 0
    assert sample["total"] == 128


def test_without_a_terminal_it_prints_once(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUICK, "top", url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert "namespace default" in done.stdout


def test_who_can_not_be_asked_is_named_and_the_exit_code_says_whose_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = printed(capsys, "http://127.0.0.1:9", "--once")
    assert code == 1
    assert "does a server run there?" in err
    assert printed(capsys, "nowhere", "--once")[0] == 2
    assert printed(capsys, "http://127.0.0.1:9", "--once", "--lines", "0")[0] == 2


def test_a_key_is_needed_where_there_are_tenants(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.acme]\nkeys = ["sk-acme-1234"]\n')
    tenants = load_tenants(file, random_secret=b"s" * 32)
    with serving(quick_runtime(), tenants=tenants) as url:
        code, _, err = printed(capsys, url, "--once")
        assert code == 2
        assert "401" in err
        assert printed(capsys, url, "--once", "--api-key", "sk-acme-1234")[0] == 0
        monkeypatch.setenv("RADIXCACHE_API_KEY", "sk-acme-1234")
        assert printed(capsys, url, "--json")[0] == 0
        feed = FeedThread(Server(url, "wrong"))
        feed.start()
        assert isinstance(feed.events.get(timeout=LIMIT_S), Refused)


def test_a_connection_that_is_lost_is_told_and_taken_up_again() -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        time.sleep(0.01)
        return False

    with serving(quick_runtime(), drain_s=0.1) as url:
        feed = FeedThread(Server(url), wait=wait)
        feed.start()
        assert isinstance(feed.events.get(timeout=LIMIT_S), Snapshot)
        feed.reconnect()
        while not isinstance(feed.events.get(timeout=LIMIT_S), Snapshot):
            pass
        assert not waits
    event = feed.events.get(timeout=LIMIT_S)
    while not (isinstance(event, Lost) and event.wait_s == 8.0):
        event = feed.events.get(timeout=LIMIT_S)
    assert waits[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    feed.close()


class Terminal:
    """A program in a terminal of 100 columns and 30 lines, and what it has written so far."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.written = b""

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def wait_for(self, pattern: str) -> str:
        """Read on until a frame shows what is expected; forget what was shown before."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            text = ESCAPES.sub(b"", self.written).decode(errors="replace")
            if found := re.search(pattern, text):
                self.written = b""
                return found[0]
            if select.select([self._fd], [], [], 0.2)[0]:
                self.written += os.read(self._fd, 65536)
        raise AssertionError(f"{pattern!r} is not in {text[-3000:]!r}")


@contextmanager
def terminal(url: str, **variables: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run the command in a terminal of its own."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    environment = os.environ | {"TERM": "xterm-256color"} | variables
    environment.pop("COLUMNS", None)
    environment.pop("LINES", None)
    with subprocess.Popen(
        [sys.executable, "-c", QUICK, "top", url],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours), process
        finally:
            process.kill()
            os.close(ours)


def test_keys_open_sort_pause_and_quit(url: str) -> None:
    with terminal(url) as (screen, process):
        screen.wait_for("live[^$]*by size, [2-9] lines")
        screen.press(b"h")
        screen.wait_for("by size, 1 lines shown")
        screen.press(b"\x1b[C")
        screen.wait_for("by size, [2-9] lines")
        screen.press(b"s")
        screen.wait_for("by heat")
        screen.press(b"jd")
        screen.wait_for("node \\d+ of [^$]*text '")
        screen.press(b"\x1b")
        screen.press(b"p")
        screen.wait_for("paused")
        body = {"prompt": "Something else. " * 30, "max_tokens": 2}
        httpx.post(url + "/v1/completions", json=body)
        screen.press(b"p")
        screen.wait_for(r"live\s+hit rate")
        screen.press(b"q")
        assert exit_code(screen, process) == 0
        assert b"\x1b[?1049l" in drained(screen)  # the screen of before is back


def drained(screen: Terminal) -> bytes:
    """All that a program that has ended wrote and nobody read."""
    with suppress(OSError):
        while select.select([screen._fd], [], [], 0)[0]:
            screen.written += os.read(screen._fd, 65536)
    return screen.written


def exit_code(screen: Terminal, process: subprocess.Popen[bytes]) -> int:
    """Wait for the end, reading on: who writes to a terminal that nobody reads waits for it."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        drained(screen)
        time.sleep(0.02)
    return process.wait(timeout=1)


def test_no_color_is_respected(url: str) -> None:
    colour = re.compile(rb"\x1b\[[0-9;]*3[0-9][;m]")
    for variables, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with terminal(url, **variables) as (screen, process):
            seen = b""
            while b"by size" not in seen or b"live" not in seen:
                assert select.select([screen._fd], [], [], LIMIT_S)[0]
                seen += os.read(screen._fd, 65536)
            screen.press(b"q")
            exit_code(screen, process)
            assert bool(colour.search(seen)) == is_coloured


def test_an_interrupt_ends_it_and_leaves_the_terminal_as_it_was(url: str) -> None:
    with terminal(url) as (screen, process):
        screen.wait_for("live")
        process.send_signal(2)
        assert exit_code(screen, process) in (0, 130)
        assert b"\x1b[?25h" in drained(screen)  # the cursor is shown again
