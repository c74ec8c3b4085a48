"""For every test: threads of OpenMP sleep while they wait, and a module's models go with it.

Idea: a model that a server ran is part of a cycle, which Python notices late in a process of many
objects, and the C library keeps what is freed for its next allocation.  So both collect when a
module ends.  What the imports made is frozen before: a collection then takes milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before anything imports torch


def pytest_collection_finish() -> None:
    """Let collections look only at what tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def memory_goes_with_its_module() -> Iterator[None]:
    """Give back what the tests of a module left behind: real models, pools of K/V."""
    yield
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: sums differ by their count, and the tests share few cores."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
