"""The contracts of the kernels hold for each instruction set that this machine can run.

A process computes with one library, so each target below the machine's own is a child process.
"""

from __future__ import annotations

import os
import re

import pytest

from kernels import native
from kernels.native.compiler import TARGET_VARIABLE, available_targets
from tests.kernels.conftest import HERE, start_child

SUITES = ("linear", "quantised", "attention_native", "decoder_layers", "rows", "rotary")
LOWER = [name for name in available_targets() if name != "native"]


@pytest.mark.skipif(TARGET_VARIABLE in os.environ, reason="is the child process, or asked for one")
@pytest.mark.skipif(not native.available(), reason="no C compiler")
@pytest.mark.parametrize("target", LOWER)
def test_the_contracts_hold_for_a_lower_target(target: str) -> None:
    files = [str(HERE / f"test_{suite}.py") for suite in SUITES]
    with start_child(
        "pytest", "-p", "no:cacheprovider", *files, **{TARGET_VARIABLE: target}
    ) as run:
        told = run.communicate()[0]
    assert run.returncode == 0, told
    passed = re.search(r"(\d+) passed", told)
    assert passed is not None
    assert int(passed[1]) > 300
