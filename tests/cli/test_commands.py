"""The commands as a user runs them: what they print, and how they fail."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.cli.main import main
from runtime.config import DEFAULT_MODEL

SMALL = ["--num-blocks", "64"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code and what it printed."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_info_works_out_how_many_tokens_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--kv-memory", "1GiB", "--dtype", "float32")
    assert code == 0
    assert "2 (K and V) × 30 layers × 3 kv heads × 64 head dim × 4 bytes = 46,080 bytes" in out
    assert "1,456 blocks = 23,296 tokens" in out
    code, out, _ = run(capsys, "info", "--json", "--dtype", "bfloat16", "--block-size", "1")
    memory = json.loads(out)["memory"]
    assert (memory["bytes_per_token"], memory["num_tokens"]) == (23_040, (1 << 30) // 23_040)


def test_pull_says_where_the_model_lies(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "pull", "--json")
    assert code == 0
    assert json.loads(out)["bytes"] == 98_362_432
    code, out, _ = run(capsys, "pull")
    assert Path(out.strip()).exists()


def test_generate_prints_text_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "The capital of France is"
    flags = [*SMALL, "--max-tokens", "2"]
    code, out, _ = run(capsys, "generate", prompt, *flags)
    assert (code, out) == (0, " Paris.\n")
    code, out, _ = run(capsys, "generate", prompt, prompt + " the city of", *flags, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["usage"]["completion_tokens"] for line in lines] == [2, 2]


def test_chat_shows_cached_tokens_and_time_to_first_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there!\n\nAnd again?\n"))
    code, out, _ = run(capsys, "chat", *SMALL, "--max-tokens", "3")
    assert code == 0
    footers = re.findall(
        r"\[(\d+) of (\d+) prompt tokens cached · first token after [\d,]+ ms", out
    )
    assert len(footers) == 2
    assert int(footers[0][0]) == 0 < int(footers[1][0])
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there!\nAnd again?\n"))
    code, out, _ = run(capsys, "chat", *SMALL, "--max-tokens", "3", "--json")
    turns = [json.loads(line) for line in out.splitlines()]
    assert turns[1]["usage"]["cached_tokens"] >= 16
    assert all(turn["time_to_first_token_s"] > 0 for turn in turns)


def test_a_chat_that_grows_too_long_says_so_and_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 100 + "\nHi\n"))
    code, out, err = run(capsys, "chat", "--num-blocks", "4", "--max-tokens", "2")
    assert code == 0
    assert "at most 63" in err
    assert out.count("prompt tokens cached") == 1


WRONG: list[tuple[list[str], int, str]] = [
    (["info", "--model", "no/such/file.gguf"], 1, "no model"),
    (["info", "--kv-memory", "1k"], 2, "not even one block"),
    (["info", "--block-size", "0"], 2, "block_size"),
    (["info", "--max-running", "600"], 2, "max_step_tokens"),
    (["info", "--device", "toaster"], 2, "toaster"),
    (["info", "--device", "cuda"], 2, "CUDA"),
    (["generate", "x", "--temperature", "nan"], 2, "temperature"),
    (["generate", "x", "--top-p", "2"], 2, "top_p"),
    (["generate", "x", "--max-tokens", "-1"], 2, "max_tokens"),
    (["generate", ""], 2, "empty"),
    (["generate", "word " * 100, "--num-blocks", "4"], 2, "at most 63"),
    (["generate", "x", "--max-len", "100000"], 2, "8192"),
    (["pull", "gpt-4"], 1, "gpt-4"),
    (["serve", "--port", "70000"], 2, "65535"),
    (["serve", "--model", "no/such.gguf", "--trace-log", "no/such/trace.jsonl"], 2, "trace.jsonl"),
    (["serve", "--model", "no/such.gguf", "--public-prefix", "no/such.txt"], 2, "no/such.txt"),
    (["serve", "--host", "no.such.host.invalid"], 1, "no.such.host.invalid"),
    (["serve", "--port", "0", "--trace-log", "/no/such/folder"], 2, "--trace-log /no/such/folder"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "word"), WRONG, ids=[" ".join(w[0])[:40] for w in WRONG]
)
def test_a_mistake_is_one_clear_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, word: str
) -> None:
    found, out, err = run(capsys, *arguments)
    line = err.splitlines()[-1]
    assert (found, out) == (code, "")
    assert line.startswith("radixcache: ")
    assert word in line
    found, out, _ = run(capsys, *arguments, "--json")
    assert found == code
    assert word in json.loads(out)["error"]["message"]


@pytest.mark.parametrize("damage", ["cut short", "wrong magic", "empty"])
def test_a_broken_model_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, damage: str
) -> None:
    whole = Path(json.loads(run(capsys, "pull", "--json")[1])["path"])
    broken = tmp_path / "broken.gguf"
    with whole.open("rb") as file:
        head = file.read(5 << 20)
    broken.write_bytes({"cut short": head, "wrong magic": b"NOPE" + head, "empty": b""}[damage])
    code, _, err = run(capsys, "generate", "x", "--model", str(broken))
    assert code == 1
    assert "broken.gguf" in err


def test_a_taken_port_is_said_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run(capsys, "serve", "--port", str(port))
    assert code == 1
    assert f"port {port}" in err
    assert "reading weights" not in err


def test_serve_announces_itself_answers_and_stops_on_a_signal() -> None:
    script = "from runtime.cli.entry import main; raise SystemExit(main())"  # the console script
    command = [sys.executable, "-c", script, "serve", "--port", "0", "--json", *SMALL]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
        try:
            assert server.stdout is not None
            ready: dict[str, Any] = json.loads(server.stdout.readline())
            assert ready["model"] == DEFAULT_MODEL
            # At once: what is announced takes connections.
            answer = httpx.get(ready["url"] + "/health", timeout=60)
            assert answer.json() == {"status": "ok"}
            body = {"prompt": "1, 2, 3,", "max_tokens": 2, "temperature": 0}
            answer = httpx.post(ready["url"] + "/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] == " 4"
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait(timeout=30)
    assert code == 0


@pytest.mark.parametrize(("drain_s", "signals"), [("1", 1), ("60", 2)])
def test_a_stream_that_outlives_the_drain_time_or_a_second_signal_is_ended_in_order(
    drain_s: str, signals: int
) -> None:
    command = [sys.executable, "-m", "runtime.cli.main", "serve", "--port", "0"]
    command += ["--log-format", "json", "--drain", drain_s]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            told = json.loads(server.stderr.readline())["message"]  # JSON from the first line on
            url = told.partition(" on ")[2].partition("/v1")[0]
            time.sleep(1)
            body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
                lines = (line for line in answer.iter_lines() if line)
                for _ in range(signals):
                    next(lines)
                    server.send_signal(signal.SIGTERM)
                last = list(lines)[-2:]
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=30)
        logged = [json.loads(line) for line in server.stderr]
    assert [line["finish"] for line in logged if line["message"] == "request"] == ["abort"]
    assert "ended by the server" in last[0]
    assert last[1] == "data: [DONE]"
    assert code == 0
