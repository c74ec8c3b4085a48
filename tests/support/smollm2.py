"""The real model for tests: pulled beforehand, never downloaded by a test.

Owns: finding it, and saying what to do where it is not.  Does not know: what is tested with it.
"""

from __future__ import annotations

import functools

import pytest

from runtime.config import DEFAULT_MODEL
from runtime.weights.gguf import GgufCheckpoint
from runtime.weights.pull import cached


@functools.cache
def open_smollm2() -> GgufCheckpoint:
    """Return the pulled model, opened once for all tests; fail the test where there is none."""
    path = cached(DEFAULT_MODEL)
    if path is None:
        pytest.fail("the test model is not in the cache folder: run `radixcache pull` first")
    return GgufCheckpoint(path, name=DEFAULT_MODEL)
