"""What a model's name means."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.config import DEFAULT_MODEL
from runtime.errors import DownloadError, ModelFileError
from runtime.weights.checkpoint import open_checkpoint
from tests.support.smollm2 import open_smollm2
from tests.support.tiny_checkpoints import TINY, write_tiny_folder, write_tiny_gguf


def test_a_path_to_a_file_or_folder_is_that_model(tmp_path: Path) -> None:
    file = open_checkpoint(str(write_tiny_gguf(tmp_path / "one.gguf")))
    folder = open_checkpoint(str(write_tiny_folder(tmp_path / "two")))
    assert (file.name, folder.name) == ("one", "two")


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny_gguf(tmp_path / "one.gguf")
    assert open_checkpoint("~/one.gguf").name == "one"


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "SmolLM2-135M-Instruct"])
def test_the_model_that_comes_along_goes_by_its_name(name: str) -> None:
    open_smollm2()  # fails clearly where it is not there, so that no test downloads it
    checkpoint = open_checkpoint(name)
    assert checkpoint.name == DEFAULT_MODEL
    assert checkpoint.config.num_layers == 30


@pytest.mark.parametrize("model", ["", "no-such-model", "./no/such.gguf", "org/no-such.gguf"])
def test_what_is_not_there_is_named_with_where_it_was_looked_for(model: str) -> None:
    with pytest.raises(ModelFileError, match="smollm2-135m-instruct") as caught:
        open_checkpoint(model)
    assert str(Path(model).absolute()) in str(caught.value)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        open_checkpoint(str(path))


def test_a_hub_name_is_fetched_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(write_tiny_folder(tmp_path / "0123abc"))

    fake = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    stages = []
    checkpoint = open_checkpoint("org/tiny-1.0", progress=lambda *stage: stages.append(stage))
    assert (checkpoint.name, checkpoint.config) == ("org/tiny-1.0", TINY)
    assert asked == [("org/tiny-1.0", ["*.json", "*.safetensors", "*.jinja"])]
    assert stages == [("download", 0, None)]


def test_a_hub_that_cannot_be_reached_is_a_download_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host")

    fake = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with pytest.raises(DownloadError, match="no route to host"):
        open_checkpoint("org/tiny")


def test_without_the_hub_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it raises ImportError
    with pytest.raises(ModelFileError, match=r"pip install 'radixcache\[hub\]'"):
        open_checkpoint("org/tiny")
