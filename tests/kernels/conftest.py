"""One contract suite, run on each backend.

A test that takes `backend` runs on torch and on the native kernels here, and on Triton in the child
process that test_triton_interpreter.py starts: Triton reads TRITON_INTERPRET once, when it is
imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from kernels import native

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import tests.support.triton_interpreter  # noqa: F401  (importing is the repair)
else:
    collect_ignore = ["test_interpreter_repair.py"]


@pytest.fixture(scope="session", params=["triton"] if INTERPRETED else ["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "native" and not native.available():
        pytest.skip(native.build().reason)
    return name


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread, which is faster at these sizes and steady on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
