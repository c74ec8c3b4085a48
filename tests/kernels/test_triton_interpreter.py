"""Triton in child processes: it reads TRITON_INTERPRET once, when it is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed on this platform"
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RADIXCACHE"))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contract_suite_passes_in_the_interpreter() -> None:
    # Triton 3.6 turns arrays of one element into numbers, which NumPy calls deprecated
    own_warning = ("-W", "ignore:Conversion of an array:DeprecationWarning")
    options = ("-p", "no:cacheprovider", *own_warning)
    run = child("-m", "pytest", *options, str(HERE), TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 25


def test_the_kernels_compile_for_gpus_nobody_has_here(tmp_path: Path) -> None:
    run = child("-m", "tests.kernels.compile_ahead", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stdout + run.stderr
    built = [json.loads(line) for line in run.stdout.splitlines()]
    assert {b["arch"] for b in built} == {80, 90}
    assert {b["kernel"] for b in built} == {"extend_kernel", "store_kernel", "copy_kernel"}
    for b in built:
        assert b["shared_bytes"] <= {80: 163, 90: 227}[b["arch"]] * 1024, b
        assert b["tensor_cores"] == (b["kernel"] == "extend_kernel"), b
