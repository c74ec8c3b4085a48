"""Settings: limits are kept, and a wrong one is named."""

from __future__ import annotations

import msgspec
import pytest

from runtime.config import EngineConfig, RuntimeConfig
from runtime.errors import InvalidSetting
from tests.support.engine_bench import EngineBench

WRONG = {
    "dtype": "float64",
    "kv_memory_bytes": 0,
    "num_blocks": 0,
    "block_size": 0,
    "max_len": 0,
    "max_chunk_tokens": -1,
    "max_running": 0,
    "max_waiting": 0,
    "num_threads": -1,
}


@pytest.mark.parametrize(("name", "value"), WRONG.items(), ids=WRONG.keys())
def test_a_value_below_its_limit_is_refused_and_named(name, value):
    with pytest.raises(InvalidSetting, match=name):
        RuntimeConfig(**{name: value})


@pytest.mark.parametrize("name", [name for name in WRONG if name != "dtype"])
@pytest.mark.parametrize("value", [True, 1.0, "1", float("nan")], ids=repr)
def test_a_number_of_the_wrong_kind_is_refused_and_named(name, value):
    with pytest.raises(InvalidSetting, match=name):
        RuntimeConfig(**{name: value})


@pytest.mark.parametrize("name", ["num_blocks", "max_len"])
def test_only_what_is_optional_may_be_none(name):
    assert getattr(RuntimeConfig(**{name: None}), name) is None
    with pytest.raises(InvalidSetting, match="block_size"):
        RuntimeConfig(block_size=None)


@pytest.mark.parametrize("budget", [1, 7, 8])
def test_the_budget_must_exceed_the_sequences_that_decode(budget):
    with pytest.raises(InvalidSetting, match="max_step_tokens") as caught:
        RuntimeConfig(max_running=8, max_step_tokens=budget)
    assert "max_running" in str(caught.value)
    assert RuntimeConfig(max_running=8, max_step_tokens=9).max_step_tokens == 9


@pytest.mark.parametrize("config", [RuntimeConfig, EngineConfig])
def test_an_unknown_setting_is_refused(config):
    with pytest.raises(TypeError, match="block_sise"):
        config(block_sise=3)
    with pytest.raises(msgspec.ValidationError, match="block_sise"):
        msgspec.json.decode(b'{"max_len": 9, "block_sise": 3}', type=config)


def test_an_engine_refuses_a_max_len_beyond_its_pool():
    EngineBench(num_blocks=4, block_size=4, max_len=16)
    with pytest.raises(InvalidSetting, match="max_len 17 exceeds the pool's 16 tokens"):
        EngineBench(num_blocks=4, block_size=4, max_len=17)
