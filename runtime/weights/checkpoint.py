"""One door to every model: a name, a file, a folder or a hub repository.

Owns: deciding what a model's name means.  Does not know: file formats, networks.
Idea: whatever was named, the engine gets the same four things from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

import torch

from kernels import QuantisedWeight
from runtime.errors import ModelFileError
from runtime.models.config import ModelConfig
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer
from runtime.weights.gguf import GgufCheckpoint
from runtime.weights.hub import pull_from_hub
from runtime.weights.pull import RELEASES, Progress, pull
from runtime.weights.safetensors import FolderCheckpoint

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Checkpoint(Protocol):
    """A model whose files were found, whole and of a supported kind.

    name    what to call the model in answers
    config  its shape
    """

    name: str
    config: ModelConfig

    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; built at the first call."""
        ...

    def chat_template(self, *, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """Return the model's chat template, or None where it came without one.

        now  the clock of templates that write the date
        """
        ...

    def tensors(
        self, *, as_stored: bool = False
    ) -> Iterator[tuple[str, torch.Tensor | QuantisedWeight]]:
        """Yield every tensor under its canonical name, one at a time.

        as_stored  whether matrices that the kernels compute with as they are stay quantised

        Names are those of Hugging Face's Llama; q and k are in half-split rotary order.  The dtype
        is the stored one, or float32 where the stored one is quantised and does not stay so.
        Raises ModelFileError where a scale is infinite or a NaN.
        """
        ...


def open_checkpoint(model: str, *, progress: Progress | None = None) -> Checkpoint:
    """Find a model and check its files; weights are not read yet.

    model  the name of a model that can be pulled ("smollm2-135m-instruct", in any case; it is
           pulled if need be), the path of a .gguf file or of a Hugging Face folder, or the name of
           a repository on the Hugging Face hub ("org/name"); "./name" is always a path
    Errors: ModelFileError that says what was looked for or what is wrong; DownloadError.
    """
    if model.lower() in RELEASES:
        name = model.lower()
        return GgufCheckpoint(pull(name, progress=progress), name=name)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return FolderCheckpoint(path)
    if model and path.exists() and not path.is_file():
        raise ModelFileError(f"{path} is neither a file nor a folder: name a .gguf file")
    if model and path.exists():
        return GgufCheckpoint(path)
    if _HUB_NAME.fullmatch(model) and not model.endswith(".gguf"):
        return FolderCheckpoint(pull_from_hub(model, progress=progress), name=model)
    raise ModelFileError(
        f"no model {model!r}: it is neither {' nor '.join(map(repr, RELEASES))}, nor is there a "
        f".gguf file or a Hugging Face folder at {path.absolute()}, nor does it look like the name "
        "of a hub repository (org/name)"
    )
