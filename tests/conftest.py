"""For every test: OpenMP's threads sleep while they wait, as under the `radixcache` command."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before anything imports torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: sums differ by their count, and the tests share few cores."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
