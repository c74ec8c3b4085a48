"""One contract suite, run on each backend.

A test that takes `backend` runs on torch and on the native kernels here, and on Triton in a child
process: Triton reads TRITON_INTERPRET once, when it is imported.  It takes minutes, so it starts
with the first test here, on a core of its own, and test_triton_interpreter.py waits for it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import native

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import tests.support.triton_interpreter  # noqa: F401  (importing is the repair)
else:
    collect_ignore = ["test_interpreter_repair.py"]


def start_child(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a module in a process whose Triton is as `environment` says."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RADIXCACHE"))}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="session", autouse=not INTERPRETED)
def interpreted(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str] | None]:
    """The suite on Triton, where the test that waits for it is going to run."""
    modules = {item.path.stem for item in request.session.items}
    if not HAS_TRITON or "test_triton_interpreter" not in modules:
        yield None
        return
    arguments = ("-p", "no:cacheprovider", str(HERE))
    with start_child("pytest", *arguments, TRITON_INTERPRET="1") as run:
        yield run
        run.kill()


@pytest.fixture(scope="session", params=["triton"] if INTERPRETED else ["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "native" and not native.available():
        pytest.skip(native.build().reason)
    return name


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """For each test here: faster at these sizes, and steady on a busy machine."""


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest, one_thread: None) -> int:
    """Run a test at each thread count; the bits are fixed for each, not across them."""
    torch.set_num_threads(request.param)
    return int(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the child process keep only what there is to see there."""
    if not INTERPRETED:
        return
    kept = [item for item in items if "backend" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
