"""Triton in child processes: it reads TRITON_INTERPRET once, when it is imported.

The suite in the interpreter was started with the first test of this folder; see conftest.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels.conftest import HAS_TRITON, ROOT, start_child

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed on this platform")


def test_the_kernels_compile_for_gpus_nobody_has_here(tmp_path: Path) -> None:
    # `make kernels` compiles every variant for every target; one of each will do here
    to_json = ("--json", str(tmp_path / "readings.json"))
    arguments = ("tests.kernels.compile_ahead", "--first", "--targets", "sm_90", *to_json)
    with start_child(*arguments, TRITON_CACHE_DIR=str(tmp_path)) as run:
        output, _ = run.communicate()
    assert run.returncode == 0, output
    readings = json.loads((tmp_path / "readings.json").read_text())
    assert len(readings) >= 12
    compiled = {r["kernel"] for r in readings}
    assert {"linear_kernel", "store_kernel", "copy_kernel", "sample_kernel"} <= compiled
    page = (ROOT / "docs" / "kernels.md").read_text()
    documented = set(re.findall(r"^\| `(\w+_kernel)` \|", page, re.MULTILINE))
    assert documented == compiled, "run make kernels"


def test_the_contract_suite_passes_in_the_interpreter(
    interpreted: subprocess.Popen[str],
) -> None:
    output, _ = interpreted.communicate()
    assert interpreted.returncode == 0, output
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None
    assert int(passed[1]) >= 25
