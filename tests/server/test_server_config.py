"""Settings of the server: what makes no sense is refused by the name of its field."""

from __future__ import annotations

import pytest

from runtime.errors import InvalidSetting
from runtime.server.config import ServerConfig


@pytest.mark.parametrize("name", [n for n in ServerConfig.__struct_fields__ if "max" in n])
def test_a_limit_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        ServerConfig(**{name: 0})


@pytest.mark.parametrize("name", [n for n in ServerConfig.__struct_fields__ if "timeout" in n])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidSetting, match=name):
        ServerConfig(**{name: value})


@pytest.mark.parametrize("value", [-1, float("nan"), 1e9])
def test_the_drain_time_has_a_range(value: float) -> None:
    with pytest.raises(InvalidSetting, match="drain_s"):
        ServerConfig(drain_s=value)
