"""A start says whether it is exact, and promises nothing that it has not seen hold."""

from __future__ import annotations

import json
import logging
from importlib import import_module
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from kernels import native
from kernels.linear import PackedWeight, RowLayout
from runtime.cli.main import main
from runtime.config import RuntimeConfig
from runtime.errors import InvalidSetting, NotExact
from runtime.exactness.promise import UNCHECKED, Exactness
from runtime.exactness.start import exact_model
from runtime.llm import LLM
from runtime.models.llama import LlamaModel
from tests.support.served import quick_runtime, serving
from tests.support.tiny_checkpoints import write_tiny_gguf
from tests.support.tiny_models import random_weights, tiny_config

CPU = torch.device("cpu")
LINEAR = import_module("kernels.linear")  # its function has the name


def tiny_model(dtype: torch.dtype = torch.float32) -> LlamaModel:
    config = tiny_config()
    return LlamaModel(config, random_weights(config).items(), dtype=dtype, device=CPU)


def plant(monkeypatch: pytest.MonkeyPatch, *, cured_by: int) -> None:
    """Make products add a little where their rows are no multiple of a number."""
    real = LINEAR._product

    def product(
        x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        result = real(x, weight, bias)
        return result if cured_by and len(x) % cured_by == 0 else result + 1e-3 * len(x)

    monkeypatch.setattr(LINEAR, "_product", product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_on_this_machine_is_exact_by_default(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(dtype)
    exactness = exact_model(model, "require")
    assert exactness.holds
    assert exactness.seconds > 0
    if native.available():  # our own kernels; a library may need a slower layout, and gets it
        assert (exactness.faults, str(exactness)) == ((), "held")
        assert model.row_layout is None
        assert not caplog.records


def test_a_fault_that_no_layout_cures_is_warned_of_and_the_promise_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, cured_by=0)
    monkeypatch.setattr("kernels.row_check.SLOWER_LAYOUTS", (RowLayout(8),))
    with caplog.at_level(logging.WARNING, "radixcache"):
        exactness = exact_model(tiny_model(), "warn")
    assert exactness.holds is False
    assert "product 48 × 80" in str(exactness)
    assert "cached and uncached answers may differ" in caplog.text
    with pytest.raises(NotExact, match="--exact warn"):
        exact_model(tiny_model(), "require")


def test_a_fault_that_a_slower_layout_cures_is_cured_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plant(monkeypatch, cured_by=64)
    model = tiny_model()
    with caplog.at_level(logging.WARNING, "radixcache"):
        exactness = exact_model(model, "require")
    assert exactness.holds
    assert model.row_layout == RowLayout(64)
    assert "slower products of rows in 64s" in str(exactness)
    assert "slower" in caplog.text


def test_attention_that_is_not_exact_refuses_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: torch.Tensor, *rest: torch.Tensor, scale: float) -> torch.Tensor:
        return q * len(q)

    monkeypatch.setattr("kernels.row_check.extend_attention", attend)
    exactness = exact_model(tiny_model(), "warn")
    assert exactness.holds is False
    assert [fault.partition(":")[0] for fault in exactness.faults] == [
        "attention of 3 heads on 1 of 16"
    ]


def test_nothing_is_checked_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, cured_by=0)
    assert exact_model(tiny_model(), "off") == UNCHECKED


def test_the_setting_takes_three_words() -> None:
    with pytest.raises(InvalidSetting, match="require, warn, off"):
        RuntimeConfig(exact="maybe")  # type: ignore[arg-type]


def test_loading_checks_and_a_required_promise_that_fails_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    settings = {"model": str(path), "num_blocks": 16}
    assert LLM(**settings).runtime.exactness.holds is True
    assert LLM(**settings, exact="off").runtime.exactness.holds is None
    monkeypatch.setattr("kernels.row_check.rms_norm", lambda x, weight, *, eps: x * len(x))
    flags = ["--model", str(path), "--num-blocks", "16", "--exact", "require", "--json"]
    assert main(["generate", "hello", *flags]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "NotExact"


@pytest.mark.parametrize(
    ("exactness", "gauge", "ready"),
    [
        (Exactness(holds=True), "1.0", True),
        (Exactness(holds=False, faults=("norm",)), "0.0", False),
        (UNCHECKED, "0.0", None),
    ],
    ids=["held", "refused", "unchecked"],
)
def test_a_server_shows_whether_it_is_exact(
    exactness: Exactness, gauge: str, ready: bool | None
) -> None:
    runtime = msgspec.structs.replace(quick_runtime(), exactness=exactness)
    with serving(runtime) as url, httpx.Client(base_url=url) as http:
        assert f"\nradixcache_exact {gauge}\n" in http.get("/metrics").text
        assert http.get("/ready").json() == {"status": "ready", "exact": ready}
