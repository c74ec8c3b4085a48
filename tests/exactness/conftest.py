"""Tests of exactness use one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """For each of them."""
