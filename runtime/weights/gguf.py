"""A GGUF file as a checkpoint: its shape, its vocabulary, its tensors.

Owns: what a GGUF's keys and the layout of its tensors mean.  Does not know: how a header is parsed,
where the file came from, how text is split into tokens, what will compute with the weights.
Idea: whatever can be wrong with a file is found when it is opened; after that tensors only stream,
one at a time, from a memory map.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from kernels import QuantisedWeight
from kernels.formats import BLOCKS
from runtime.errors import ModelFileError
from runtime.models.config import ModelConfig, RopeScaling
from runtime.tokenizer.chat import ChatTemplate
from runtime.tokenizer.load import Tokenizer, tokenizer_from_gguf
from runtime.tokenizer.vocabulary import GgufVocabulary
from runtime.weights.dequantise import dequantised
from runtime.weights.gguf_header import Keys, open_header
from runtime.weights.mapping import canonical_name, check_shapes

_ELSE = "; choose another model"
_SIXTEEN_BITS = {"F16": torch.float16, "BF16": torch.bfloat16}
_NUMBERS = (
    gguf.GGMLQuantizationType.F32,
    gguf.GGMLQuantizationType.F16,
    gguf.GGMLQuantizationType.BF16,
)
_ROPE_FREQS = "rope_freqs.weight"

NUM_AHEAD = 4
"""Tensors that are dequantised before they are asked for."""


class GgufCheckpoint:
    """A Llama-like model in one GGUF file.

    Opening reads and checks the header and the type, name and shape of every tensor; weights are
    read only by `tensors`.
    Errors: ModelFileError that says what is wrong with the file and what to do.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.name = path.stem if name is None else name
        self._path = path
        self._reader = open_header(path)
        self._keys = Keys(self._reader, path)
        self._refuse_other_models()
        for qtype in {t.tensor_type for t in self._reader.tensors}:
            self._check_readable(qtype)
        self._tensors = {t.name: t for t in self._reader.tensors}
        freqs = self._tensors.pop(_ROPE_FREQS, None)
        factors = (
            None if freqs is None else tuple(dequantised(freqs.data, freqs.tensor_type).tolist())
        )
        self.config = self._read_config(factors)
        check_shapes(
            {canonical_name(n) or n: _shape(t) for n, t in self._tensors.items()},
            self.config,
            str(path),
        )
        self._tokenizer: Tokenizer | None = None

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer built from the file's vocabulary; built once."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_from_gguf(self.vocabulary(), where=str(self._path))
        return self._tokenizer

    def chat_template(self, *, now: Callable[[], datetime] = datetime.now) -> ChatTemplate | None:
        """Return the file's chat template, or None where it has none."""
        source = self._keys.text("tokenizer.chat_template", default="")
        if not source:
            return None
        return ChatTemplate(source, self.tokenizer(), where=str(self._path), now=now)

    def tensors(
        self, *, as_stored: bool = False
    ) -> Iterator[tuple[str, torch.Tensor | QuantisedWeight]]:
        """Yield every tensor under its canonical name, in the file's order.

        as_stored  whether matrices that the kernels compute with as they are stay quantised, and
                   16-bit ones in 16 bits; else all are float32

        Each comes in memory of its own; the next ones are read meanwhile, on a thread, so that a
        few are in memory beside those handed out.  Rows of the q and k projections are put back
        from GGUF's interleaved rotary pairs to half-split ones.  Raises ModelFileError where a
        quantised tensor has a scale that is infinite or a NaN.
        """
        read = self._stored if as_stored else self._float32
        ahead: deque[tuple[str, Future[torch.Tensor | QuantisedWeight]]] = deque()
        with ThreadPoolExecutor(max_workers=1) as thread:
            for name, tensor in self._tensors.items():
                canonical = canonical_name(name)
                assert canonical is not None  # `check_shapes` let no other name through
                ahead.append((canonical, thread.submit(read, name, tensor)))
                if len(ahead) > NUM_AHEAD:
                    ready, values = ahead.popleft()
                    yield ready, values.result()
            while ahead:
                ready, values = ahead.popleft()
                yield ready, values.result()

    def _stored(self, name: str, tensor: Any) -> torch.Tensor | QuantisedWeight:
        """Read a tensor as it is stored; float32 what no kernel computes with."""
        kind, shape = tensor.tensor_type.name, _shape(tensor)
        if len(shape) != 2 or (kind not in BLOCKS and kind not in _SIXTEEN_BITS):
            return self._float32(name, tensor)
        # Read, not mapped: pages of a map would count as memory beside the packed copy.
        stored = np.fromfile(
            self._path, np.uint8, int(tensor.n_bytes), offset=int(tensor.data_offset)
        )
        rows = torch.from_numpy(self._in_order(name, stored.reshape(shape[0], -1)))
        if kind in _SIXTEEN_BITS:
            return rows.view(_SIXTEEN_BITS[kind])
        weight = QuantisedWeight(rows, kind, (shape[0], shape[1]))
        self._check_scales(name, weight.has_finite_scales())
        return weight

    def _float32(self, name: str, tensor: Any) -> torch.Tensor:
        rows = self._in_order(name, np.asarray(tensor.data))
        # A copy even of float32: nothing handed out may change or vanish with the file.
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused below
            values = dequantised(rows, tensor.tensor_type)
        if tensor.tensor_type not in _NUMBERS:
            self._check_scales(name, bool(np.isfinite(values).all()))
        return torch.from_numpy(values.reshape(_shape(tensor)))

    def _in_order(self, name: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rows in half-split rotary order; they may still be quantised."""
        if ".attn_q." in name:
            return _half_split(rows, self.config.num_heads)
        return _half_split(rows, self.config.num_kv_heads) if ".attn_k." in name else rows

    def _check_scales(self, name: str, are_finite: bool) -> None:
        if not are_finite:
            raise ModelFileError(
                f"{self._path}: tensor {name} has a scale that is infinite or not a number: the "
                "file is damaged, or was made wrong; fetch it again or choose another"
            )

    def _check_readable(self, qtype: Any) -> None:
        _, type_bytes = gguf.GGML_QUANT_SIZES[qtype]
        try:
            dequantize(np.zeros((1, type_bytes), np.uint8), qtype)
        except NotImplementedError as error:
            raise ModelFileError(
                f"{self._path} holds tensors of type {qtype.name}, which cannot be read; choose a "
                "file with another quantisation, such as Q8_0 or Q4_K_M"
            ) from error

    def _refuse_other_models(self) -> None:
        keys, path = self._keys, self._path
        architecture = keys.text("general.architecture")
        if architecture != "llama":
            raise ModelFileError(
                f"{path} holds a model of architecture {architecture!r}; only Llama-like ones "
                "('llama') are supported"
            )
        if keys.integer("llama.attention.sliding_window", default=0):
            raise ModelFileError(f"{path}: sliding-window attention is not supported{_ELSE}")
        if keys.integer("llama.expert_count", default=0):
            raise ModelFileError(f"{path}: mixtures of experts are not supported{_ELSE}")

    def _read_config(self, rope_freq_factors: tuple[float, ...] | None) -> ModelConfig:
        keys = self._keys
        hidden = keys.integer("llama.embedding_length")
        heads = keys.integer("llama.attention.head_count")
        head_dim = keys.integer("llama.attention.key_length", default=hidden // max(heads, 1))
        if keys.integer("llama.attention.value_length", default=head_dim) != head_dim:
            raise ModelFileError(
                f"{self._path}: keys and values of different sizes are not supported{_ELSE}"
            )
        if keys.integer("llama.rope.dimension_count", default=head_dim) != head_dim:
            raise ModelFileError(
                f"{self._path}: rotary embedding of a part of each head is not supported{_ELSE}"
            )
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelFileError(
                f"{self._path} has no token_embd.weight: it is a part or a vocabulary of a model, "
                "not a whole one; choose a complete file"
            )
        try:
            return ModelConfig(
                architecture="llama",
                vocab_size=next(iter(_shape(embedding)), 0),
                hidden_size=hidden,
                intermediate_size=keys.integer("llama.feed_forward_length"),
                num_layers=keys.integer("llama.block_count"),
                num_heads=heads,
                num_kv_heads=keys.integer("llama.attention.head_count_kv", default=heads),
                head_dim=head_dim,
                max_len=keys.integer("llama.context_length"),
                rms_norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
                rope_theta=keys.number("llama.rope.freq_base", default=10000.0),
                rope_scaling=self._read_rope_scaling(),
                rope_freq_factors=rope_freq_factors,
                tie_embeddings="output.weight" not in self._tensors,
                attention_bias="blk.0.attn_q.bias" in self._tensors,
            )
        except ValueError as error:
            raise ModelFileError(f"{self._path}: {error}; fetch the file again") from error

    def _read_rope_scaling(self) -> RopeScaling | None:
        keys = self._keys
        linear = keys.number("llama.rope.scale_linear", default=1.0)  # the key of older files
        kind = keys.text("llama.rope.scaling.type", default="none" if linear == 1.0 else "linear")
        if kind == "none":
            return None
        if kind != "linear":
            raise ModelFileError(f"{self._path}: rope scaling {kind!r} is not supported{_ELSE}")
        factor = keys.number("llama.rope.scaling.factor", default=linear)
        return None if factor == 1.0 else RopeScaling(kind="linear", factor=factor)

    def vocabulary(self) -> GgufVocabulary:
        """Return what the file says about its tokenizer."""
        keys, at = self._keys, "tokenizer.ggml."
        tokens = keys.array(f"{at}tokens", str)
        return GgufVocabulary(
            model=keys.text(f"{at}model"),
            pre=keys.text(f"{at}pre", default="default"),
            tokens=tokens,
            token_types=keys.array(f"{at}token_type", int, default=[1] * len(tokens)),
            merges=keys.array(f"{at}merges", str, default=[]),
            bos_id=keys.optional_integer(f"{at}bos_token_id"),
            eos_id=keys.optional_integer(f"{at}eos_token_id"),
            other_eos_ids=frozenset(
                keys.integer(f"{at}{kind}_token_id")
                for kind in ("eot", "eom")
                if f"{at}{kind}_token_id" in keys
            ),
            add_bos=keys.flag(f"{at}add_bos_token"),
            vocab_size=self.config.vocab_size,
        )


def _shape(tensor: Any) -> tuple[int, ...]:
    """Return a tensor's dimensions in torch's order; GGUF writes the innermost first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _half_split(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder the rows of a q or k projection for half-split rotary pairs.

        GGUF, per head:  0 h 1 h+1 2 h+2 ...   pair i in rows 2i, 2i+1
        wanted:          0 1 2 ... h h+1 ...   pair i in rows i, i+h       (h = half the head)

    Rows may still be quantised: blocks never cross a row.
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
