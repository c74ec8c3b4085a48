"""The fastest product is measured once, kept, and used until it is measured anew."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import PackedWeight, calibration, linear, native, pack_weight
from kernels.calibration import ROW_COUNTS, Calibration, Product, calibrate, use

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler")
SHAPES = [(96, 64), (512, 512)]


def product(backend: Any, rate: float, *, alike: bool = False) -> Product:
    return Product(backend, alike, (rate,) * len(ROW_COUNTS))


def found(**products: Product) -> Calibration:
    return Calibration("AVX2 and FMA", 1, 100.0, 1.0, products, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are kept: beside the kernels, which seem to be here."""
    build = native.build()
    assert build.path is not None
    moved = build._replace(path=tmp_path / build.path.name)
    monkeypatch.setattr(native, "build", lambda: moved)
    return tmp_path


def kept(folder: Path) -> list[Path]:
    return list(folder.glob("calibration-*"))


def test_what_was_measured_is_kept_until_it_is_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calibrate(SHAPES)
    assert first is not None
    assert set(first.products) == set(first.torch) == {"float32", "bfloat16"}
    assert first.target == native.target()
    assert first.num_threads == torch.get_num_threads()
    assert min(first.peak_flop_s, first.read_bytes_s) > 0
    assert all(rate > 0 for chosen in first.products.values() for rate in chosen.flop_s)
    assert len(kept(folder)) == 1
    other = replace(first, peak_flop_s=1.0)
    monkeypatch.setattr(calibration, "_measure", lambda shapes: other)
    assert calibrate(reversed(SHAPES)) == first  # type: ignore[arg-type]
    assert calibrate(SHAPES, again=True) == other
    assert calibrate(SHAPES) == other


def test_other_shapes_and_threads_are_measured_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_measure", lambda shapes: found(float32=product("torch", 90)))
    calibrate(SHAPES)
    calibrate([(512, 512)])
    torch.set_num_threads(3)
    calibrate(SHAPES)
    assert len(kept(folder)) == 3


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"products": {"float32": {}}}', "\xff"])
def test_a_damaged_result_is_measured_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    wanted = found(float32=product("native", 60), bfloat16=product("native", 60))
    monkeypatch.setattr(calibration, "_measure", lambda shapes: wanted)
    calibrate(SHAPES)
    [file] = kept(folder)
    file.write_text(content, "latin-1")
    assert calibrate(SHAPES) == wanted
    assert json.loads(file.read_text()) == json.loads(json.dumps(asdict(wanted)))


def test_a_product_far_from_the_peak_is_a_warning_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = found(float32=product("native", 49), bfloat16=product("native", 51))
    monkeypatch.setattr(calibration, "_measure", lambda shapes: slow)
    with caplog.at_level(logging.WARNING, logger="radixcache.kernels"):
        calibrate(SHAPES)
        calibrate(SHAPES)
    [message] = caplog.messages
    assert message.startswith("products in float32 are slow on this processor: C, ")
    assert "49% of the peak" in message


def test_a_folder_that_cannot_be_written_costs_time_and_no_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = native.build()._replace(path=folder / "gone" / "kernels.so")
    monkeypatch.setattr(native, "build", lambda: missing)
    both = found(float32=product("native", 60), bfloat16=product("native", 60))
    monkeypatch.setattr(calibration, "_measure", lambda shapes: both)
    assert calibrate(SHAPES) == both
    assert any("can't be kept" in message for message in caplog.messages)


@pytest.mark.parametrize(("theirs", "wins"), [(1.2, "native"), (1.3, "torch")])
def test_torch_is_taken_only_where_it_is_well_ahead(
    monkeypatch: pytest.MonkeyPatch, theirs: float, wins: str
) -> None:
    rates = {"native": 10.0, "torch": 10.0 * theirs}
    monkeypatch.setattr(
        calibration,
        "_rates",
        lambda shapes, dtype, backend, alike: (rates[backend] + alike * 0.1,) * 3,
    )
    chosen = calibration._measure(SHAPES).products["float32"]
    assert chosen.backend == wins
    assert chosen.tiles_alike == (wins == "native")  # those were a little faster


def test_bfloat16_is_preferred_only_where_it_was_measured_faster() -> None:
    slow, fast = product("native", 60), product("native", 70)
    assert found(float32=slow, bfloat16=fast).prefers_bfloat16
    assert not found(float32=fast, bfloat16=slow).prefers_bfloat16
    assert not found(float32=slow, bfloat16=slow).prefers_bfloat16


def test_tiles_change_no_bit() -> None:
    x, weight = torch.randn(23, 70), pack_weight(torch.randn(50, 70), backend="native")
    assert isinstance(weight, PackedWeight)
    results = []
    for alike in (False, True):
        assert use(found(float32=product("native", 1, alike=alike)), torch.float32) == "native"
        results.append(linear(x, weight, backend="native"))
    assert torch.equal(*results)
