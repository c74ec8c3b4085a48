"""The serving benchmark of a GPU, as far as a CPU can take it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.case import Case
from benchmarks.gpu.engine_steps import step_seconds
from benchmarks.gpu.serving import FEW, SHAPES, num_weights, serving_cases, step_work
from benchmarks.gpu.small_llama import Shape
from kernels.roofline import Heads

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def serving(*arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RADIXCACHE"))}
    command = [sys.executable, "-m", "benchmarks.gpu_serving", *arguments]
    env = inherited | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_the_shapes_have_as_many_weights_as_their_names_say() -> None:
    billions = {
        name: num_weights(s) + 2 * s.vocab * s.hidden for name, s in SHAPES.items() if name != "1B"
    }
    assert billions["8B"] == pytest.approx(8.03e9, rel=0.01)
    assert billions["135M"] == pytest.approx(135e6 + 49152 * 576, rel=0.01)  # its head is its own
    one = SHAPES["1B"]
    assert num_weights(one) + one.vocab * one.hidden == pytest.approx(1.24e9, rel=0.01)


def test_a_step_reads_weights_once_and_multiplies_them_for_each_token() -> None:
    shape = Shape(Heads(2, 1, 4), hidden=8, ffn=16, vocab=10, num_layers=3, max_len=99)
    weights = 3 * (8 * (16 + 8) + 3 * 8 * 16)  # q, k, v and out; gate, up and down
    assert num_weights(shape) == weights
    work = step_work(shape, [1, 1], [5, 7])
    keys, queries = 2 * 12 * 4 * 2, 2 * 2 * 2 * 4 * 2
    assert work.bytes == 2 * (weights + 80) + 3 * (keys + queries)
    assert work.flop == 2 * 2 * (weights + 80) + 3 * 4 * 12 * 2 * 4


@pytest.mark.parametrize("case", list(serving_cases(tiny=True)), ids=lambda case: case.name)
def test_each_step_runs_on_the_reference(case: Case) -> None:
    (call,) = case.build(CPU)
    logits = call()
    assert isinstance(logits, torch.Tensor)
    assert logits.isfinite().all()
    assert logits.shape[1] == FEW["tiny"].vocab


def test_a_step_of_the_engine_is_timed_on_the_reference() -> None:
    row = step_seconds(CPU, FEW["tiny"], 3, [20, 23])
    assert 0 < row["low_us"] <= row["us"] <= row["high_us"]


def test_without_a_gpu_the_floors_are_predicted() -> None:
    run = serving("--predict")
    assert run.returncode == 0, run.stderr
    assert "8B decode 32 behind 1500" in run.stdout
    assert "not measured" in run.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)
def test_a_dry_run_takes_steps_in_the_interpreter(tmp_path: Path) -> None:
    path = tmp_path / "dry.json"
    run = serving("--dry-run", "--json", str(path), "--only", "decode 1 behind")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(path.read_text())
    assert found["measured"] is False
    assert len(found["cases"]) == 2
    assert all("us" in row for row in [*found["cases"], *found["engine"]])
    assert len(found["engine"]) == 1
