"""A Hugging Face folder as a checkpoint: config.json, safetensors, tokenizer.json.

Owns: what the keys of config.json mean; finding each tensor's shard.  Does not know: how a folder
came to be on this machine, what will compute with the weights.
Idea: headers are checked whole when the folder is opened; tensors are then handed out as stored,
backed by the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from runtime.errors import ModelFileError
from runtime.models.config import ModelConfig, RopeScaling
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer, tokenizer_from_folder
from runtime.tokenizer.vocabulary import read_json
from runtime.weights.mapping import check_shapes

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_DTYPES = ("F32", "F16", "BF16")
_INDEX = "model.safetensors.index.json"
_DERIVED = ".rotary_emb.inv_freq"  # old checkpoints store what the config implies


class FolderCheckpoint:
    """A Llama-like model in a Hugging Face folder.

    Opening reads config.json and the headers of all safetensors files, not the weights.
    Errors: ModelFileError that says what is missing, damaged or not supported.
    """

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        self.name = folder.resolve().name if name is None else name
        self._folder = folder
        self.config = _config(read_json(folder / "config.json"), folder / "config.json")
        self._shard_of: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in _shards(folder):
            found = _shapes(shard)
            shapes |= found
            self._shard_of |= dict.fromkeys(found, shard)
        if self.config.tie_embeddings:
            shapes.pop("lm_head.weight", None)
            self._shard_of.pop("lm_head.weight", None)
        check_shapes(shapes, self.config, str(folder))
        self._tokenizer: Tokenizer | None = None

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that tokenizer.json describes; built once."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_from_folder(self._folder, vocab_size=self.config.vocab_size)
        return self._tokenizer

    def chat_template(self, *, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """Return the folder's chat template, or None where it has none."""
        source = _template_source(self._folder)
        if not source:
            return None
        return ChatTemplate(source, self.tokenizer(), where=str(self._folder), now=now)

    def tensors(self, *, as_stored: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor under its canonical name, with the dtype that is stored."""
        del as_stored  # as they always are
        for shard in dict.fromkeys(self._shard_of.values()):
            with _opened(shard) as file:
                for name, of in self._shard_of.items():
                    if of == shard:
                        yield name, file.get_tensor(name)


def _shards(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of the index, or all of them."""
    weight_map = read_json(folder / _INDEX, required=False).get("weight_map")
    if weight_map is None:
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise ModelFileError(
                f"{folder} holds no *.safetensors; weights in other forms (.bin, .pt) are not "
                "read, convert them first"
            )
        return shards
    names: set[Any] = set(weight_map.values()) if isinstance(weight_map, dict) else {None}
    if not all(isinstance(n, str) and Path(n).name == n for n in names):
        raise ModelFileError(f"{folder / _INDEX} does not name files of its own folder")
    missing = [n for n in sorted(names) if not (folder / n).is_file()]
    if missing:
        raise ModelFileError(
            f"{folder} lacks {', '.join(missing)}, which its index names; fetch the folder again"
        )
    return [folder / n for n in sorted(names)]


def _opened(shard: Path) -> Any:
    try:
        return safe_open(str(shard), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{shard} is cut short or damaged ({error}); fetch it again"
        ) from error


def _shapes(shard: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    with _opened(shard) as file:
        for name in file.keys():  # noqa: SIM118  # the library's object is no mapping
            if name.endswith(_DERIVED):
                continue
            part = file.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise ModelFileError(
                    f"{shard}: tensor {name} is of type {part.get_dtype()}, supported are "
                    f"{', '.join(_DTYPES)}; choose weights that are not quantised"
                )
            shapes[name] = tuple(part.get_shape())
    return shapes


def _template_source(folder: Path) -> str:
    """Find the template: a file of its own, or in tokenizer_config.json, maybe one of several."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{own} cannot be read: {error}") from error
    found = read_json(folder / "tokenizer_config.json", required=False).get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else ""


def _config(keys: Mapping[str, Any], path: Path) -> ModelConfig:
    """Translate config.json, refusing what would change the computation unnoticed."""
    architectures = keys.get("architectures") or []
    if not any(a in _ARCHITECTURES for a in architectures):
        raise ModelFileError(
            f"{path} describes {', '.join(map(str, architectures)) or 'no architecture'}; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    unsupported = {
        "sliding_window": keys.get("sliding_window") is not None,
        "quantization_config": keys.get("quantization_config") is not None,
        "mlp_bias": bool(keys.get("mlp_bias")),
        "hidden_act": keys.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": keys.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise ModelFileError(f"{path}: {key} {keys[key]!r} is not supported")
    rope = keys.get("rope_parameters") or {}  # since transformers 5 theta and scaling are in one
    heads = keys.get("num_attention_heads")
    try:
        return msgspec.convert(
            {
                "architecture": "llama",
                "vocab_size": keys.get("vocab_size"),
                "hidden_size": keys.get("hidden_size"),
                "intermediate_size": keys.get("intermediate_size"),
                "num_layers": keys.get("num_hidden_layers"),
                "num_heads": heads,
                "num_kv_heads": keys.get("num_key_value_heads") or heads,
                "head_dim": keys.get("head_dim") or keys["hidden_size"] // heads,
                "max_len": keys.get("max_position_embeddings", 2048),
                "rms_norm_eps": keys.get("rms_norm_eps", 1e-6),
                "rope_theta": rope.get("rope_theta") or keys.get("rope_theta", 10000.0),
                "rope_scaling": _rope_scaling(keys.get("rope_scaling") or rope),
                "tie_embeddings": keys.get("tie_word_embeddings", False),
                "attention_bias": keys.get("attention_bias", False),
            },
            ModelConfig,
        )
    except (msgspec.ValidationError, KeyError, TypeError, ArithmeticError, ValueError) as error:
        raise ModelFileError(
            f"{path} is incomplete or wrong ({type(error).__name__}: {error}); fetch it again"
        ) from error


def _rope_scaling(keys: Mapping[str, Any]) -> RopeScaling | None:
    kind = keys.get("rope_type", keys.get("type", "default"))
    if kind == "default":
        return None
    of = {"kind": kind, "factor": keys.get("factor")}
    if kind == "llama3":
        of["low_freq_factor"] = keys.get("low_freq_factor", 1.0)
        of["high_freq_factor"] = keys.get("high_freq_factor", 4.0)
        of["original_max_len"] = keys.get("original_max_position_embeddings", 8192)
    return msgspec.convert(of, RopeScaling)
