"""`radixcache doctor`: what it prints and writes, and the exit codes that a CI looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from tests.support.clean_logs import clean_log
from tests.support.request_logs import broken_log


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture
def broken(tmp_path: Path) -> str:
    return write(tmp_path / "log.jsonl", broken_log("uuid", seed=1))


@pytest.mark.parametrize("model", [[], ["--model", "words"]])
def test_a_log_is_looked_at_with_a_models_tokens_or_with_words(
    capsys: pytest.CaptureFixture[str], broken: str, model: list[str]
) -> None:
    code, out, err = run(capsys, broken, *model)
    assert code == 0
    assert "1. a UUID near the top" in out
    assert "replaying the log" in err


def test_json_is_one_object_and_nothing_else(
    capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    code, out, err = run(capsys, broken, "--model", "words", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [reason["reason"] for reason in found["reasons"]] == ["uuid"]
    assert found["num_requests"] == 20


def test_a_page_is_written_beside(
    capsys: pytest.CaptureFixture[str], broken: str, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    code, out, _ = run(capsys, broken, "--model", "words", "--html", str(page))
    assert code == 0
    assert "a UUID near the top" in page.read_text()
    assert "a UUID near the top" in out


def test_a_page_that_cannot_be_written_is_refused_before_the_log_is_replayed(
    capsys: pytest.CaptureFixture[str], broken: str, tmp_path: Path
) -> None:
    for place in ("missing/report.html", "."):
        code, out, err = run(capsys, broken, "--model", "words", "--html", str(tmp_path / place))
        assert (code, out) == (2, "")
        assert "replaying" not in err


def test_the_exit_code_tells_a_ci_whether_enough_is_found(
    capsys: pytest.CaptureFixture[str], broken: str, tmp_path: Path
) -> None:
    words = ["--model", "words", "--fail-below", "0.7"]
    code, _, err = run(capsys, broken, *words)
    assert code == 3
    assert "70.0 % wanted" in err
    clean = write(tmp_path / "clean.jsonl", clean_log("chats", 1))
    code, out, err = run(capsys, clean, *words)
    assert code == 0
    assert "Nothing is amiss" in out
    assert "wanted" not in err


def test_a_small_pool_and_a_rate_are_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = write(tmp_path / "log.jsonl", clean_log("chats", 1))
    flags = ["--num-blocks", "120", "--tokens-per-s", "100"]
    code, out, _ = run(capsys, log, "--model", "words", "--json", *flags)
    found = json.loads(out)
    assert code == 0
    assert [reason["reason"] for reason in found["reasons"]] == ["evicted"]
    assert (found["tokens_per_s"], found["rate_is_assumed"]) == (100.0, False)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["missing.jsonl"], 1, "missing.jsonl"),
        (["bad.jsonl"], 2, "bad.jsonl, line 2: it is not JSON"),
        (["log.jsonl", "--fail-below", "60"], 2, "--fail-below"),
        (["log.jsonl", "--fail-below", "nan"], 2, "--fail-below"),
        (["log.jsonl", "--tokens-per-s", "0"], 2, "--tokens-per-s"),
        (["log.jsonl", "--num-blocks", "3"], 2, "does not fit into 3 blocks"),
        (["log.jsonl", "--num-blocks", "0"], 2, "--num-blocks is 0"),
        (["log.jsonl", "--block-size", "0"], 2, "--block-size is 0"),
        (["log.jsonl", "--html", "no/such/folder.html"], 2, "no folder no/such"),
        (["log.jsonl", "--model", "no/such/model.gguf"], 1, "no model"),
    ],
)
def test_a_mistake_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    word: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = clean_log("plain prompts", 1)
    write(tmp_path / "log.jsonl", lines)
    (tmp_path / "bad.jsonl").write_text(json.dumps(lines[0]) + "\n{nonsense\n")
    found, out, err = run(capsys, "--model", "words", *arguments)
    assert (found, out) == (code, "")
    assert word in err.splitlines()[-1]
