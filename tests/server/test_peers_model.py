"""The forms of the model that other servers read hold the same model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from benchmarks.peers.model import write_bfloat16, write_folder
from runtime.weights.gguf import GgufCheckpoint
from runtime.weights.safetensors import FolderCheckpoint
from tests.support.tiny_checkpoints import write_tiny_gguf

TEXT = "hello world 1234 <|im_start|>user\n  hé\n\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    quantised = gguf.GGMLQuantizationType.Q4_1
    return write_tiny_gguf(tmp_path / "tiny.gguf", quantised=quantised)


def test_the_folder_has_the_weights_and_the_tokens_of_the_gguf(
    source: Path, tmp_path: Path
) -> None:
    ours = GgufCheckpoint(source)
    write_folder(tmp_path / "folder", ours)
    theirs = FolderCheckpoint(tmp_path / "folder")
    found = dict(theirs.tensors())
    for name, tensor in ours.tensors():
        assert torch.equal(found.pop(name), tensor)
    assert not found
    assert theirs.config.rope_theta == ours.config.rope_theta
    for special in (False, True):
        a, b = (c.tokenizer().encode(TEXT, parse_special=special) for c in (ours, theirs))
        assert a == b
    assert ours.tokenizer().eos_ids == theirs.tokenizer().eos_ids
    a, b = (checkpoint.chat_template() for checkpoint in (ours, theirs))
    assert a is not None
    assert b is not None
    assert a.source == b.source


def test_the_bfloat16_gguf_has_the_weights_rounded_once(source: Path, tmp_path: Path) -> None:
    write_bfloat16(source, tmp_path / "other.gguf")
    ours, theirs = GgufCheckpoint(source), GgufCheckpoint(tmp_path / "other.gguf")
    assert theirs.config == ours.config
    assert theirs.vocabulary() == ours.vocabulary()
    found = dict(theirs.tensors())
    for name, tensor in ours.tensors():
        rounded = tensor if tensor.ndim == 1 else tensor.bfloat16().float()
        assert torch.equal(found.pop(name), rounded)
    assert not found
