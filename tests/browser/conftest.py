"""One browser for all tests of a session, and a page of its own for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import (
    ENVIRONMENT_VARIABLE,
    Page,
    Pipe,
    chromium,
    find_browser,
    new_page,
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Pipe]:
    """A running browser; skips where there is none."""
    executable = find_browser()
    if executable is None:
        pytest.skip(f"no browser: `make browser` fetches one, {ENVIRONMENT_VARIABLE} names another")
    with chromium(executable) as pipe:
        yield pipe


@pytest.fixture
def page(browser: Pipe) -> Iterator[Page]:
    """A new tab, 1280 pixels wide; all its requests went to one server, and the console is quiet.

    A test that makes the server refuse or go away leaves the page, and looks at what it gets.
    """
    with new_page(browser) as page:
        page.show_as(width=1280, height=900)
        yield page
        origins = {tuple(request["url"].split("/")[:3]) for request in page.requests()}
        assert len({origin for origin in origins if origin[0] != "data:"}) <= 1
        assert page.complaints() == []
