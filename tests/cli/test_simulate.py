"""`radixcache simulate` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli.main import main

MADE = "few-shot:questions=60,preambles=5"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit code and what it printed."""
    code = main(("simulate", *arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_is_a_list_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", "lru", "--policy", "opt", "--blocks", "400", "--blocks", "300"]
    code, out, _ = run(capsys, MADE, *flags, "--block-size", "16", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["policy"], row["num_blocks"]) for row in rows] == [
        ("lru", 300),
        ("lru", 400),
        ("opt", 300),
        ("opt", 400),
    ]
    assert all(
        set(row) == {"policy", "num_blocks", "hit_rate", "hits", "references"} for row in rows
    )
    assert all(row["hit_rate"] == row["hits"] / row["references"] for row in rows)
    assert rows[1]["hits"] < rows[3]["hits"]


def test_text_shows_a_table_beside_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, MADE, "--block-size", "64", "--block-size", "128", "--curve")
    assert code == 0
    assert out.count("hit rate of a cache without bounds") == 2
    assert [line.split()[0] for line in out.splitlines()].count("opt") == 2
    assert "at 2× the memory the hit rate goes from" in out
    assert "opt, " in err  # progress


def test_concurrency_needs_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": "a b c d " * 20}))
    code, _, err = run(capsys, str(log), "--block-size", "4", "--concurrency", "trace")
    assert (code, "--concurrency none" in err) == (2, True)
    flags = ["--concurrency", "trace", "--decode-rate", "5", "--blocks", "300", "--json"]
    code, out, _ = run(capsys, MADE, *flags, "--block-size", "16")
    assert (code, len(json.loads(out))) == (0, 2)


def test_requests_larger_than_the_cache_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, MADE, "--block-size", "16", "--blocks", "30", "--policy", "lru")
    assert "larger than the whole cache" in out


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["no/such/file"], 1, "no/such/file"),
        (["chat:turn=3"], 2, "turns"),
        ([MADE, "--blocks", "0"], 2, "--blocks"),
        ([MADE, "--requests", "0"], 2, "--requests"),
        ([MADE, "--block-size", "0"], 2, "--block-size is 0"),
        ([MADE, "--concurrency", "trace", "--prefill-rate", "0"], 2, "prefill_rate"),
        ([MADE, "--tokenizer", "no/such/folder"], 1, "tokenizer.json"),
    ],
)
def test_a_mistake_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, word: str
) -> None:
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (code, "")
    assert word in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("radixcache: ")


def test_the_console_script_simulates_without_loading_torch() -> None:
    script = (
        "import sys; sys.argv = ['radixcache', 'simulate', 'chat:sessions=2', '--json'];"
        "from runtime.cli.entry import main; code = main();"
        "assert not {'torch', 'triton', 'starlette'} & sys.modules.keys(); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 2 * len(
        {r["num_blocks"] for r in json.loads(done.stdout)}
    )


def test_a_picture_is_drawn_the_same_each_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    files = [tmp_path / name for name in ("one.svg", "two.svg", "three.png")]
    for file in files:
        code, _, _ = run(capsys, MADE, "--block-size", "64", "--plot", str(file))
        assert code == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert MADE.encode() in files[0].read_bytes()
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_refused_before_anything_is_replayed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "runtime.plots", None)
    code, out, err = run(capsys, MADE, "--plot", "picture.svg")
    assert (code, out) == (2, "")
    assert "radixcache[plots]" in err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--plot", "picture.txt"], ".svg or .png"),
        (["--plot", "p.svg", "--block-size", "16", "--block-size", "32"], "one --block-size"),
        (["--plot", "no/such/p.svg"], "no folder no/such"),
        (["--plot", "."], "it is a folder"),
    ],
)
def test_what_can_not_be_drawn_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], word: str
) -> None:
    code, out, err = run(capsys, MADE, *flags)
    assert (code, out, word in err) == (2, "", True)
