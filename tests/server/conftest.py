"""A server of its own for each test, where a module asks for no other.

Owns: the default fixtures.  A module that wants other settings, or one server for all of its tests,
has fixtures of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from runtime.loading import Runtime
from tests.support.served import quick_runtime, serving


@pytest.fixture
def runtime() -> Runtime:
    """An engine without a model, which nothing was asked yet."""
    return quick_runtime()


@pytest.fixture
def http(runtime: Runtime) -> Iterator[httpx.Client]:
    """A client of a server over it, which must have leaked nothing when the test ends."""
    with serving(runtime) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client
