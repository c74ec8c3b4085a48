"""Tiny models on disk, whole and valid, as a GGUF file and as a Hugging Face folder.

Owns: weights by seed, a byte-level vocabulary, both file forms with the same content.  Does not
know: how the project reads them.
Idea: two forms of one model, written by the packages that define the forms, so that what is read
from one can be compared with the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from kernels.formats import QuantisedWeight
from runtime.models.config import ModelConfig
from runtime.weights.mapping import expected_shapes

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ã ©", "Ċ Ċ")
TOKENS = (
    *CONTROL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
)
TINY = ModelConfig(
    architecture="llama",
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_len=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_embeddings=True,
)

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_weights(config: ModelConfig = TINY, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float32 weights of that shape, by canonical name; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if "norm" in name else 0.3 * noise
    return weights


def tiny_gguf_keys(config: ModelConfig = TINY, *, pre: str = "smollm") -> dict[str, Any]:
    """Return the keys that a converter writes for such a model; a test may change some."""
    keys: dict[str, Any] = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_len,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS)
        + [1] * (len(TOKENS) - len(CONTROL_TOKENS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        keys |= dict.fromkeys(
            ("llama.attention.key_length", "llama.attention.value_length"), config.head_dim
        )
    return keys


def write_tiny_gguf(
    path: Path,
    *,
    config: ModelConfig = TINY,
    weights: Mapping[str, torch.Tensor] | None = None,
    keys: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    quantised: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    stored: Mapping[str, QuantisedWeight] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter does and return its path.

    quantised  the type of the matrices; norms and biases stay float32
    stored     matrices as they are to lie in the file, by canonical name, instead of `weights`
    extra      further float32 tensors, by their GGUF names
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (tiny_gguf_keys(config) if keys is None else keys).items():
        _add_key(writer, key, value)
    for name, tensor in (tiny_weights(config) if weights is None else weights).items():
        if stored and name in stored:
            kind = gguf.GGMLQuantizationType[stored[name].format]
            writer.add_tensor(gguf_name(name), stored[name].raw.numpy(), raw_dtype=kind)
            continue
        values = tensor.numpy()
        if ".q_proj." in name:
            values = _interleaved(values, config.num_heads)
        elif ".k_proj." in name:
            values = _interleaved(values, config.num_kv_heads)
        if values.ndim == 2 and quantised != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    if config.rope_freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope_freq_factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(canonical: str) -> str:
    """Return the name that a tensor has in a GGUF file."""
    stem, _, kind = canonical.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[inner]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def write_tiny_folder(
    folder: Path,
    *,
    config: ModelConfig = TINY,
    weights: Mapping[str, torch.Tensor] | None = None,
    changes: Mapping[str, Any] | None = None,
    num_shards: int = 1,
) -> Path:
    """Write a model as `save_pretrained` does and return its folder.

    changes  keys of config.json that a test wants otherwise
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    _write_json(folder / "config.json", described | dict(changes or {}))
    _write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    _write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML},
    )
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write_shards(folder, tiny_weights(config) if weights is None else weights, num_shards)
    return folder


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Return the tiny vocabulary as the `tokenizers` package would have trained it."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(TOKENS)},
            merges=[tuple(merge.split(" ")) for merge in MERGES],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    return tokenizer


def _write_shards(folder: Path, weights: Mapping[str, torch.Tensor], num_shards: int) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    if num_shards == 1:
        save_file(tensors, str(folder / "model.safetensors"))
        return
    weight_map = {}
    for i, names in enumerate(_dealt(list(tensors), num_shards), start=1):
        shard = f"model-{i:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, str(folder / shard))
        weight_map |= dict.fromkeys(names, shard)
    _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _dealt(names: Sequence[str], num_hands: int) -> list[Sequence[str]]:
    return [names[i::num_hands] for i in range(num_hands)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), "utf-8")


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _interleaved(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Order rows of q or k as GGUF does: the two of a rotary pair next to each other."""
    half = rows.shape[0] // num_heads // 2
    halves = rows.reshape(num_heads, 2, half, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
