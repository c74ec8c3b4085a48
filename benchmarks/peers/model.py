"""SmolLM2-135M in the forms that other servers read, all from the one GGUF that ours serves.

    .venv/bin/python -m benchmarks.peers.model FOLDER

Owns: a Hugging Face folder (config, float32 safetensors, tokenizer, chat template), and a GGUF with
its matrices in bfloat16.  Does not know: servers.
Idea: every server has the same weights: those that our loader dequantises.  transformers' own GGUF
loader would do for the folder, but loses that digits are tokens of their own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from runtime.config import DEFAULT_MODEL
from runtime.models.config import ModelConfig
from runtime.tokenizer.vocabulary import SPLITS, GgufVocabulary
from runtime.weights.gguf import GgufCheckpoint
from runtime.weights.pull import pull

FOLDER, BFLOAT16_GGUF, Q4_GGUF = "model", "model-bfloat16.gguf", "model-q4_1.gguf"
_CONTROL = 3  # of `tokenizer.ggml.token_type`


def main() -> None:
    """Write all forms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_forms(parser.parse_args().folder)


def write_forms(home: Path) -> None:
    """Write the folder, the bfloat16 GGUF and a link to the GGUF itself; nothing where they are.

    About 800 MB and ten seconds.
    """
    source = pull(DEFAULT_MODEL)
    home.mkdir(parents=True, exist_ok=True)
    if not (home / FOLDER / "tokenizer.json").exists():  # written last
        write_folder(home / FOLDER, GgufCheckpoint(source))
    if not (home / BFLOAT16_GGUF).exists():
        write_bfloat16(source, home / BFLOAT16_GGUF)
    link = home / Q4_GGUF
    link.unlink(missing_ok=True)
    link.symlink_to(source.absolute())


def write_folder(folder: Path, checkpoint: GgufCheckpoint) -> None:
    """Write a Hugging Face folder with float32 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = checkpoint.vocabulary()
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    template = checkpoint.chat_template()
    assert template is not None
    (folder / "chat_template.jinja").write_text(template.source)
    _write_json(folder / "config.json", _config(checkpoint.config, vocabulary))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(checkpoint, vocabulary))
    _tokenizer(vocabulary).save(str(folder / "tokenizer.json"))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _config(shape: ModelConfig, vocabulary: GgufVocabulary) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_len,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "torch_dtype": "float32",
    }


def _tokenizer_config(checkpoint: GgufCheckpoint, vocabulary: GgufVocabulary) -> dict[str, Any]:
    assert vocabulary.bos_id is not None
    assert vocabulary.eos_id is not None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "pad_token": vocabulary.tokens[vocabulary.eos_id],
        "model_max_length": checkpoint.config.max_len,
        "clean_up_tokenization_spaces": False,
    }


def _tokenizer(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """Build what `tokenizer.json` describes: byte-level BPE behind the split of the file."""
    splitter = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary.tokens)},
            merges=[(m[: m.find(" ", 1)], m[m.find(" ", 1) + 1 :]) for m in vocabulary.merges],
        )
    )
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(expression), behavior="isolated")
        for expression in SPLITS[vocabulary.pre]
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    splitter.decoder = decoders.ByteLevel()
    kinds = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    splitter.add_special_tokens([token for token, kind in kinds if kind == _CONTROL])
    return splitter


def write_bfloat16(source: Path, target: Path) -> None:
    """Write a GGUF again with its matrices in bfloat16 and its vectors in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.BF16 if len(tensor.shape) > 1 else tensor.tensor_type
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
