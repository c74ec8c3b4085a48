"""The least work of an op, counted by hand for small shapes; and the benchmark's table of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_cases import (
    Call,
    cascade_calls,
    decode_calls,
    extend_calls,
    gathered_decode_calls,
    matmul_calls,
    move_calls,
    quantised_decode_calls,
    row_calls,
    sdpa_calls,
    shared_decode_calls,
)
from benchmarks.gpu_checks import answers
from kernels.roofline import (
    Ceilings,
    Heads,
    Work,
    attention_work,
    copy_work,
    least_seconds,
    linear_work,
    norm_work,
    rotary_store_work,
    sample_work,
    silu_work,
    store_work,
)

ROOT = Path(__file__).parents[2]
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)


def test_attention_multiplies_each_query_with_the_keys_it_sees() -> None:
    # 3 queries behind 2 keys see 3, 4 and 5 of them; a lone one sees its 7
    work = attention_work([3, 1], [5, 7], HEADS)
    assert work.flop == 2 * 2 * (3 + 4 + 5 + 7) * 4 * 8
    assert work.bytes == 2 * (2 * 4 * 4 * 8) + 2 * (2 * 12 * 2 * 8)


def test_a_shared_prefix_is_read_once_and_multiplied_for_all() -> None:
    alone = attention_work([1] * 3, [10] * 3, HEADS)
    together = attention_work([1] * 3, [10] * 3, HEADS, shared=8)
    assert together.flop == alone.flop
    assert alone.bytes - together.bytes == 2 * 2 * 16 * 2 * 8


def test_smaller_keys_halve_what_is_read_and_nothing_else() -> None:
    wide = attention_work([1], [100], HEADS)
    small = attention_work([1], [100], HEADS, kv_bytes=1)
    assert wide.bytes - small.bytes == 2 * 100 * 2 * 8


def test_the_row_ops_move_each_number_once() -> None:
    assert store_work(3, HEADS, kv_bytes=1).bytes == 3 * 32 * (2 + 1)
    assert copy_work(3, 5, HEADS).bytes == 3 * 5 * 32 * 2 * 2
    assert linear_work(3, 5, 7) == Work(bytes=2 * (15 + 35 + 21), flop=210)
    assert norm_work(3, 8, residual=False).bytes == 3 * 8 * 2 * 2
    assert norm_work(3, 8, residual=True).bytes == 3 * 8 * 2 * 4
    assert silu_work(3, 8).bytes == 3 * 24 * 2
    assert rotary_store_work(1, HEADS).bytes == 2 * 32 * 2 + 32 * 4 + 8 * 4
    assert sample_work(2, 100).bytes == 800


def test_the_slower_of_memory_and_arithmetic_decides() -> None:
    ceilings = Ceilings(bytes_s=10.0, flop_s=100.0)
    assert least_seconds(Work(bytes=50, flop=100), ceilings) == 5.0
    assert least_seconds(Work(bytes=50, flop=1000), ceilings) == 10.0


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object]]:
    path = tmp_path_factory.mktemp("gpu") / "predictions.json"
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--predict", "--json", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, json.loads(path.read_text())


def test_without_a_gpu_the_benchmark_predicts_and_says_so(
    predictions: tuple[str, dict[str, object]],
) -> None:
    printed, found = predictions
    assert "not measured" in printed
    assert found["measured"] is False
    rows = found["cases"]
    assert isinstance(rows, list)
    assert len(rows) >= 12
    for row in rows:
        assert row["measured_us"] is None
        assert row["least_us"] > 0
        assert row["case"] in printed


def test_the_prediction_of_a_decode_step_is_its_bytes_over_the_bandwidth(
    predictions: tuple[str, dict[str, object]],
) -> None:
    rows = {row["case"]: row for row in predictions[1]["cases"]}  # type: ignore[attr-defined]
    read = 2 * 32 * 4096 * 8 * 128 * 2  # K and V, 32 sequences of 4,096 keys, 8 heads of 128
    least = rows["decode 32 x 4k"]["least_us"]
    assert least == pytest.approx(read / 4.3e12 * 1e6, rel=0.01)


def test_the_questions_asked_of_a_gpu_are_answered_yes_by_the_reference() -> None:
    found = dict(answers(torch.device("cpu")))
    # the CPU's library is row-invariant by padding, and its attention by tiles
    assert found == dict.fromkeys(found, True)
    assert len(found) >= 7


@pytest.mark.parametrize(
    "calls",
    [
        partial(decode_calls, batch=2, seq_len=40, copies=2),
        partial(gathered_decode_calls, batch=2, seq_len=48),
        partial(shared_decode_calls, batch=2, prefix=32, own=5),
        partial(cascade_calls, batch=2, prefix=32, own=5),
        partial(quantised_decode_calls, batch=2, seq_len=20),
        partial(extend_calls, new=5, prefix=30),
        partial(sdpa_calls, new=8),
        *(
            partial(move_calls, name=name, num_tokens=32)
            for name in ("store", "copy", "gather", "turn and store")
        ),
        *(
            partial(row_calls, name=name, num_rows=2)
            for name in ("norm", "silu", "sample", "linear")
        ),
        partial(matmul_calls, num_rows=2),
    ],
    ids=lambda calls: f"{calls.func.__name__} {calls.keywords}",
)
def test_each_case_of_the_benchmark_runs(calls: Callable[[torch.device], list[Call]]) -> None:
    for call in calls(torch.device("cpu")):
        call()
