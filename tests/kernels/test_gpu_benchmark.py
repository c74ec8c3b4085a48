"""The benchmark of a GPU, as far as a CPU can take it: predictions, dry runs, lost children."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import clock, public_peers
from benchmarks.gpu.bits import classes, library_questions, tile_questions
from benchmarks.gpu.case import EXACTNESS, OURS, Case, Goal
from benchmarks.gpu.children import Collection
from benchmarks.gpu.items import all_cases, questions_of
from benchmarks.gpu.report import goal_line, goals_of, rows_of, table
from benchmarks.gpu.steps import TINY
from kernels.roofline import Ceilings, Work

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUESTIONS = {
    name: ask
    for name, ask in questions_of("questions").items()
    if name not in tile_questions()  # those ask Triton
}
CEILINGS = Ceilings(bytes_s=1e12, flop_s=1e15)


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RADIXCACHE"))}
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", *arguments]
    env = inherited | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("gpu") / "predictions.json"
    run = benchmark("--predict", "--json", str(path))
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(path.read_text())


def test_without_a_gpu_the_benchmark_predicts_and_says_so(
    predictions: tuple[str, dict[str, Any]],
) -> None:
    printed, found = predictions
    assert "not measured" in printed
    assert found["measured"] is False
    assert len(found["cases"]) > 100
    for row in found["cases"]:
        assert row["measured_us"] is None
        assert row["least_us"] > 0
        assert row["case"] in printed
    assert {goal["met"] for goal in found["goals"]} == {None}


def test_the_prediction_of_a_decode_step_is_its_bytes_over_the_bandwidth(
    predictions: tuple[str, dict[str, Any]],
) -> None:
    rows = {(row["case"], row["variant"]): row for row in predictions[1]["cases"]}
    read = 2 * 32 * 4096 * 8 * 128 * 2  # K and V, 32 sequences of 4,096 keys, 8 heads of 128
    least = rows["decode 32 x 4k", OURS]["least_us"]
    assert least == pytest.approx(read / 4.3e12 * 1e6, rel=0.01)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)
def test_a_dry_run_goes_through_every_stage_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "dry.json"
    subjects = ["extend ragged", "decode 32 x 4k fp8", "decode 256 x 1k | 16 x 64"]
    subjects += ["cascade 64 behind 128", "store 16k"]
    subjects += ["linear 64 rows", "norm 32", "over float8", "tiles by a float32 product"]
    run = benchmark("--dry-run", "--json", str(path), "--only", *subjects)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(path.read_text())
    assert found["measured"] is False
    lost = [row for row in found["cases"] if not {"us", "absent"} & row.keys()]
    assert lost == []
    assert {row["kind"] for row in found["cases"] if "us" in row} >= {"ours", "torch", "free"}
    right, tiles = found["questions"]["questions"]
    assert right["answer"] is True
    assert tiles["answer"].startswith("16x1 = 16x4")
    assert found["questions"]["compile 0"]


@pytest.mark.parametrize("question", QUESTIONS.items(), ids=lambda pair: pair[0])
def test_each_question_is_answered_yes_by_the_reference(question: Any) -> None:
    name, ask = question
    if name.startswith("extend captured"):
        pytest.skip("the torch backend takes no rows of no sequence")
    assert ask(CPU) is True


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case", [c for c in all_cases(TINY) if c.kind != "free"], ids=lambda case: case.name
)
def test_each_case_runs_on_the_reference(case: Case) -> None:
    try:
        calls = case.build(CPU)
    except public_peers.Absent:
        assert case.kind == "public"
        return
    assert calls
    for call in calls:
        call()


def test_settings_of_equal_bits_are_named_together() -> None:
    one, other, lost = torch.ones(2), torch.zeros(2), torch.full((2,), float("nan"))
    assert classes({"a": one, "b": other, "c": one.clone()}) == "a = c | b"
    assert classes({"a": lost, "b": lost}) == "a | b"


def test_the_library_on_this_cpu_shows_its_classes_of_row_counts() -> None:
    ask = library_questions()["linear float32 K 4096 N 4096"]
    assert "8" in ask(CPU)


def clock_with(
    monkeypatch: pytest.MonkeyPatch, capture: Any
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Measure two calls by the device's clock, its CUDA calls replaced; and what it timed."""
    timed: list[list[Any]] = []

    def percentiles(runs: list[Any], repeat_ms: int) -> tuple[float, float, float]:
        timed.append([run() for run in runs])
        return 3.0, 2.0, 4.0

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock, "captured", capture)
    monkeypatch.setattr(clock, "_percentiles", percentiles)
    row = clock.DeviceClock().measure([lambda: "a", lambda: "b"], eager=True)
    return row, timed


def test_the_clock_times_replays_and_then_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    row, timed = clock_with(monkeypatch, lambda call: lambda: f"replay of {call()}")
    assert timed == [["replay of a", "replay of b"], ["a", "b"]]
    assert row == {"graph": True, "us": 3.0, "low_us": 2.0, "high_us": 4.0, "eager_us": 3.0}


def test_what_cannot_be_captured_is_timed_as_launched_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(call: Any) -> Any:
        raise RuntimeError("not permitted when stream is capturing\nmore")

    row, timed = clock_with(monkeypatch, refuse)
    assert timed == [["a", "b"]]
    assert row["graph"] is False
    assert row["not_captured"] == "not permitted when stream is capturing"
    assert row["eager_us"] == 3.0


CHILD = """
import json, os, subprocess, sys, time
from benchmarks.gpu.children import names_from_parent, run_items
lost = []
def run(name):
    if name == "dies":
        os._exit(9)
    if name == "leaves a worker":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if name == "hangs":
        time.sleep(600)
    if name == "raises":
        raise ValueError("wrong\\nmore")
    if name == "poisons":
        lost.append(name)
        raise RuntimeError("no device")
    return {"answer": name}
def settle():
    if lost:
        raise RuntimeError("no device")
print("noise of a library")
sys.exit(run_items(names_from_parent(), run, settle=settle, deadline=float(sys.argv[1])))
"""


def collected(names: list[str], *, seconds: float = 120.0, limit: float = 60.0) -> dict[str, Any]:
    deadline = time.time() + seconds
    command = [sys.executable, "-c", CHILD, str(deadline)]
    return Collection(command, {"PYTHONPATH": str(ROOT)}, deadline, limit).collect(names)


def test_a_child_that_dies_loses_one_item_and_no_other() -> None:
    rows = collected(["a", "dies", "b", "raises", "poisons", "c"])
    assert [rows[name].get("answer") for name in "abc"] == ["a", "b", "c"]
    assert rows["dies"]["error"] == "the process ended with 9"
    assert rows["raises"]["error"] == "ValueError: wrong"
    assert "no device" in rows["poisons"]["error"]


def test_a_worker_that_outlives_its_child_keeps_nobody_waiting() -> None:
    rows = collected(["leaves a worker"], limit=10.0)  # and holds the child's output for longer
    assert rows["leaves a worker"]["answer"]


def test_an_item_that_hangs_is_given_up_and_the_rest_goes_on() -> None:
    rows = collected(["hangs", "a"], limit=5.0)
    assert rows["hangs"]["error"] == "it took longer than 5 s"
    assert rows["a"]["answer"] == "a"


def test_when_the_time_is_up_the_rest_is_named_as_skipped() -> None:
    rows = collected(["a", "b"], seconds=-1.0)
    assert [rows[name]["skipped"] for name in "ab"] == ["no time left", "no time left"]


def test_a_child_that_never_starts_is_not_started_for_ever() -> None:
    rows = Collection([sys.executable, "-c", "1 / 0"], {}, time.time() + 60, 60.0).collect(["a"])
    assert "the process ended with 1" in rows["a"]["error"]
    assert "ZeroDivisionError" in rows["a"]["trace"]


def case_of(variant: str, kind: Any, *goals: Goal) -> Case:
    return Case("op", variant, kind, Work(bytes=8e7, flop=0), lambda device: [], goals)


def test_goals_are_held_against_what_was_measured() -> None:
    cases = [
        case_of(OURS, "ours", Goal("share of bandwidth", 0.85), EXACTNESS),
        case_of("peer", "torch"),
        case_of("small", "free"),
        case_of("large", "free"),
    ]
    cases[0] = case_of(OURS, "ours", *cases[0].goals, Goal("times faster than", 2, "op | peer"))
    times = {"op | ours": 100.0, "op | peer": 150.0, "op | small": 80.0, "op | large": 120.0}
    rows = rows_of(cases, {name: {"item": name, "us": us} for name, us in times.items()}, CEILINGS)
    share, costs, faster = goals_of(cases, rows, CEILINGS)
    assert (share["value"], share["met"]) == (pytest.approx(0.8), False)
    assert (costs["value"], costs["met"]) == (pytest.approx(0.25), False)
    assert (faster["value"], faster["met"]) == (pytest.approx(1.5), False)
    assert "MISSED" in goal_line(share)
    shown = table(rows)
    assert "150.0 peer = 1.50 x ours" in shown
    assert "25.0%" in shown


def test_a_failed_case_is_shown_as_failed_and_its_goals_as_not_measured() -> None:
    cases = [case_of(OURS, "ours", Goal("share of bandwidth", 0.85))]
    rows = rows_of(cases, {"op | ours": {"item": "op | ours", "error": "lost"}}, CEILINGS)
    (goal,) = goals_of(cases, rows, CEILINGS)
    assert goal["met"] is None
    assert "failed" in table(rows)


@pytest.mark.parametrize(
    ("peer", "function"),
    [
        ("flash_attn", "flash_attn_with_kvcache"),
        ("vllm", "flash_attn_varlen_func"),
        ("sgl_kernel", "flash_attn_with_kvcache"),
    ],
)
def test_a_public_peer_gets_our_tensors_and_must_agree(
    peer: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.update(options, keys=k)
        return torch.full_like(q, 9.0)

    found = SimpleNamespace(**{function: attend})
    monkeypatch.setattr(public_peers, "public", lambda name: found)
    with pytest.raises(AssertionError, match="from ours"):
        public_peers.DECODE[peer](CPU, shapes=TINY, sizes=(2, 40))
    lens = seen.get("cache_seqlens", seen.get("seqused_k"))
    assert lens.tolist() == [40, 40]
    paged = peer != "flash_attn"
    assert seen["keys"].shape == ((6, 16, 2, 64) if paged else (2, 40, 2, 64))
    table = seen.get("block_table", seen.get("page_table"))
    assert (table is not None) is paged
