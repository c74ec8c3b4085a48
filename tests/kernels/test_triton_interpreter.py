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
    run = child("-m", "pytest", "-p", "no:cacheprovider", str(HERE), TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 25


def test_the_kernels_compile_for_gpus_nobody_has_here(tmp_path: Path) -> None:
    # `make kernels` compiles every variant for every target; one of each will do here
    run = child(
        "-m",
        "tests.kernels.compile_ahead",
        "--first",
        *("--targets", "sm_90"),
        *("--json", str(tmp_path / "readings.json")),
        TRITON_CACHE_DIR=str(tmp_path),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    readings = json.loads((tmp_path / "readings.json").read_text())
    assert len(readings) >= 12
    compiled = {r["kernel"] for r in readings}
    assert {"linear_kernel", "store_kernel", "copy_kernel", "sample_kernel"} <= compiled
    page = (ROOT / "docs" / "kernels.md").read_text()
    documented = set(re.findall(r"^\| `(\w+_kernel)` \|", page, re.MULTILINE))
    assert documented == compiled, "run make kernels"
