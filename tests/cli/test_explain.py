"""`radixcache explain`: from files and from a server, in words and as JSON, and its errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from tests.server.test_tenants import three_tenants
from tests.support.served import NAME, quick_runtime, serving

SYSTEM = "You are a patient assistant for questions about geography. Today is {}."


def body(day: str = "Monday", asked: str = "Where is Rome?", **fields: Any) -> dict[str, Any]:
    system = {"role": "system", "content": SYSTEM.format(day)}
    return {"messages": [system, {"role": "user", "content": asked}], **fields}


def write(path: Path, *bodies: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, bodies)))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explain", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("model", [NAME, "words"])
def test_two_bodies_are_compared_without_a_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    first, second = write(tmp_path / "1.json", body()), write(tmp_path / "2.json", body("Friday"))
    code, out, _ = run(capsys, second, "--after", first, "--model", model)
    assert code == 0
    assert "in messages[0] (system), the prompt goes on ' Friday." in out
    assert "cached  ' Monday." in out
    code, out, _ = run(capsys, second, "--after", first, "--model", model, "--json")
    assert json.loads(out)["cause"] == "diverged"


def test_a_body_is_compared_with_all_that_a_log_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = write(tmp_path / "log.jsonl", *(body(day) for day in ("Monday", "Friday", "Sunday")))
    asked = write(tmp_path / "2.json", body("Friday", "Where is Paris?"))
    code, out, _ = run(capsys, asked, "--after", log, "--model", "words", "--json")
    assert code == 0
    assert json.loads(out)["place"]["part"] == "messages[1]"


def test_other_salts_and_plain_prompts_are_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(tmp_path / "1.json", body(cache_salt="a"))
    code, out, _ = run(
        capsys, write(tmp_path / "2.json", body()), "--after", first, "--model", "words", "--json"
    )
    assert (code, json.loads(out)["differs_in"]) == (0, ["salt"])
    text = "Once upon a time there was a cat that lived by the sea and had no name at all."
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    first = write(tmp_path / "1.json", {"prompt": text})
    code, out, _ = run(capsys, "--text", "--after", first, "--model", "words")
    assert code == 0
    assert "nothing is missing" in out or "fills no block" in out


def test_a_server_is_asked_with_a_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = write(tmp_path / "1.json", body())
    with serving(quick_runtime(), tenants=three_tenants()) as url:
        code, _, err = run(capsys, asked, "--url", url)
        assert (code, "401" in err) == (2, True)
        code, out, _ = run(capsys, asked, "--url", f"{url}/v1", "--api-key", "sk-acme-1234")
        assert code == 0
        assert "nothing that is cached here begins so" in out
        monkeypatch.setenv("RADIXCACHE_API_KEY", "sk-acme-1234")
        other = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "system": "Be x."}
        path = write(tmp_path / "2.json", other)
        code, out, _ = run(capsys, path, "--url", url, "--anthropic", "--json")
        assert (code, json.loads(out)["cached_tokens"]) == (0, 0)
        code, _, err = run(capsys, write(tmp_path / "3.json", {"prompt": 1}), "--url", url)
        assert (code, "answers 400" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "--url"),
        (["--url", "http://x", "--after", "1.json"], 2, "--after"),
        (["--url", "ftp://x"], 2, "no URL"),
        (["--url", "http://127.0.0.1:9"], 1, "does a server run there"),
        (["--after", "missing.json"], 1, "missing.json"),
        (["--after", "bad.jsonl"], 2, "bad.jsonl, line 2: it is not JSON"),
        (["--after", "list.json"], 2, "list.json holds no body"),
        (["--after", "none.json"], 2, "messages"),
        (["--after", "1.json", "--block-size", "0"], 2, "--block-size is 0"),
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
    write(tmp_path / "1.json", body())
    (tmp_path / "bad.jsonl").write_text(json.dumps(body()) + "\n{nonsense\n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "none.json").write_text('{"model": "x"}')
    found, out, err = run(capsys, "1.json", "--model", "words", *arguments)
    assert (found, out) == (code, "")
    assert word in err
    assert err.count("\n") == 1
