"""The invariance check of a GPU, on the reference and, dry, in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import invariance, model_invariance
from benchmarks.gpu.history import History, Piece
from benchmarks.gpu.invariance import FEW, compare, row_ways
from benchmarks.gpu_invariance import line
from kernels.roofline import Heads

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUESTIONS = {**invariance.questions(CPU), **model_invariance.questions(CPU)}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_every_way_has_equal_bits_on_the_reference(ask: Callable[[], dict[str, Any]]) -> None:
    answer = ask()
    assert answer["differ"] == []
    assert answer["answer"] is True
    assert answer["compared"] >= 3


def test_an_op_that_looks_at_its_company_is_found_out() -> None:
    answer = compare(row_ways(CPU, FEW, lambda x: x + x.sum(0), 8, torch.float32))
    assert answer["answer"] is False
    assert any("the first 3" in name for name in answer["differ"])
    assert any("one among NaN" in name for name in answer["differ"])
    assert "OTHER" in line({"item": "sum", **answer})


def test_nothing_compared_is_not_an_answer_of_yes() -> None:
    assert compare(iter(()))["answer"] is False


def test_a_history_leaves_no_row_unanswered_and_its_rows_differ() -> None:
    history = History(CPU, [3, 20], heads=Heads(4, 2, 16), dtype=torch.float32)
    stored = history.stored(4)
    rows = stored.in_chunks(7)
    assert rows.isfinite().all()
    assert len(rows.unique(dim=0)) == 23
    last = stored.attend([Piece(1, 19, 20)])
    assert torch.equal(last, rows[-1:])


def dry_run(path: Path, *only: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RADIXCACHE"))}
    command = [sys.executable, "-m", "benchmarks.gpu_invariance", "--dry-run", "--json", str(path)]
    env = inherited | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "--only", *only], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)
def test_a_dry_run_answers_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    asked = ("bfloat16, a window", "linear, qkv, bfloat16", "norm", "captured decode, bfloat16")
    run = dry_run(path, *asked)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 of 4 answered equal" in run.stdout
    answers = json.loads(path.read_text())["answers"]
    assert [answer["answer"] for answer in answers] == [True] * 4
