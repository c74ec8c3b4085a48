"""Hugging Face folders, whole and broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import ModelFileError
from runtime.models.config import RopeScaling
from runtime.weights.gguf import GgufCheckpoint
from runtime.weights.safetensors import FolderCheckpoint
from tests.support.tiny_checkpoints import (
    CHATML,
    TINY,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
USER = [{"role": "user", "content": "hello world 12"}]


def change_json(path: Path, **changes: object) -> None:
    """Set keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_is_read_back_as_it_was_written(
    num_shards: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(TINY, tie_embeddings=False, attention_bias=True)
    weights = {name: tensor.to(dtype) for name, tensor in tiny_weights(config).items()}
    folder = write_tiny_folder(
        tmp_path / "tiny", config=config, weights=weights, num_shards=num_shards
    )
    checkpoint = FolderCheckpoint(folder)
    assert (checkpoint.name, checkpoint.config) == ("tiny", config)
    found = dict(checkpoint.tensors())
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name


def test_both_file_forms_of_a_model_are_one_model(tmp_path: Path) -> None:
    folder = FolderCheckpoint(write_tiny_folder(tmp_path / "tiny"))
    file = GgufCheckpoint(write_tiny_gguf(tmp_path / "tiny.gguf"))
    of_folder, of_file = dict(folder.tensors()), dict(file.tensors())
    assert of_folder.keys() == of_file.keys()
    assert all(torch.equal(of_folder[name], of_file[name]) for name in of_file)
    for ours, theirs in ((folder, file), (file, folder)):
        template = ours.chat_template()
        assert template is not None
        ids = template.encode(USER)
        assert theirs.tokenizer().decode(ids, skip_special=False) == template.render(USER)
    assert folder.tokenizer().encode("hello é 1\n\n") == file.tokenizer().encode("hello é 1\n\n")
    assert folder.tokenizer().eos_ids == file.tokenizer().eos_ids == {0, 2}
    assert folder.tokenizer().bos_id == file.tokenizer().bos_id == 1


def test_a_stored_copy_of_tied_embeddings_is_left_out(tmp_path: Path) -> None:
    weights = tiny_weights()
    copy = weights["model.embed_tokens.weight"].clone()
    folder = write_tiny_folder(tmp_path, weights=weights | {"lm_head.weight": copy})
    assert "lm_head.weight" not in dict(FolderCheckpoint(folder).tensors())


def test_stored_rotary_frequencies_are_left_out(tmp_path: Path) -> None:
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write_tiny_folder(tmp_path, weights=tiny_weights() | derived)
    assert dict(FolderCheckpoint(folder).tensors()).keys() == tiny_weights().keys()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeScaling(kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": LLAMA3},
            RopeScaling(
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_len=64,
            ),
        ),
    ],
)
def test_rope_scaling_is_read(
    changes: dict[str, object], wanted: RopeScaling | None, tmp_path: Path
) -> None:
    assert FolderCheckpoint(write_tiny_folder(tmp_path, changes=changes)).config.rope_scaling == (
        wanted
    )


def test_newer_files_keep_theta_and_scaling_in_one_record(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_theta": 500000.0, **LLAMA3}}
    config = FolderCheckpoint(write_tiny_folder(tmp_path, changes=changes)).config
    assert config.rope_theta == 500000.0
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == "llama3"


def test_what_config_json_leaves_out_has_the_usual_value(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    path = folder / "config.json"
    keys = json.loads(path.read_text())
    for key in ("head_dim", "rope_theta", "attention_bias"):
        del keys[key]
    path.write_text(json.dumps(keys))
    assert FolderCheckpoint(folder).config == TINY


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"architectures": None}, "no architecture"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window 4096"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 9.0}}, "low_freq_factor 9.0"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 10**12}, "claims"),
        ({"num_hidden_layers": "2"}, "num_layers"),
        ({"num_attention_heads": 0, "head_dim": None}, "ZeroDivisionError"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": None}, "incomplete or wrong"),
        ({"vocab_size": 271}, "measures"),
        ({"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match=message):
        FolderCheckpoint(write_tiny_folder(tmp_path, changes=changes))


def test_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    assert FolderCheckpoint(write_tiny_folder(tmp_path, changes=changes)).config == TINY


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def cut(name: str, length: int) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / name).write_bytes((folder / name).read_bytes()[:length]) and None
    )


FIRST_SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "config.json is missing"),
        (rewrite("config.json", "{"), "cannot be read as JSON"),
        (rewrite("config.json", "[]"), "holds no JSON object"),
        (remove(FIRST_SHARD), f"lacks {FIRST_SHARD}"),
        (cut(FIRST_SHARD, 4), "cut short or damaged"),
        (cut(FIRST_SHARD, 400), "cut short or damaged"),
        (cut(FIRST_SHARD, -1), "cut short or damaged"),
        (rewrite(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "its own folder"),
        (rewrite(INDEX, '{"weight_map": {"a": 1}}'), "its own folder"),
        (rewrite(INDEX, '{"weight_map": []}'), "its own folder"),
        (rewrite(INDEX, f'{{"weight_map": {{"a": "{FIRST_SHARD}"}}}}'), "lacks model"),
        (remove("tokenizer.json"), "tokenizer.json is missing"),
        (rewrite("tokenizer.json", "{}"), "damaged or of a kind"),
        (rewrite("tokenizer_config.json", '{"chat_template": "{{"}'), "template that is broken"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff") and None, "be read"),
    ],
)
def test_a_damaged_folder_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path, num_shards=2)
    damage(folder)
    with pytest.raises(ModelFileError, match=message):
        FolderCheckpoint(folder).chat_template()  # which needs the tokenizer


def test_weights_in_another_form_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"no \*\.safetensors"):
        FolderCheckpoint(folder)


def test_quantised_tensors_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    weights = tiny_weights() | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}
    save_file(weights, str(folder / "model.safetensors"))
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight is of type I8"):
        FolderCheckpoint(folder)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    config = msgspec.structs.replace(TINY, vocab_size=200)
    with pytest.raises(ModelFileError, match="only 200 embeddings"):
        FolderCheckpoint(write_tiny_folder(tmp_path, config=config)).tokenizer()


def test_the_template_is_found_wherever_it_may_be(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    checkpoint = FolderCheckpoint(folder)

    def source() -> str | None:
        template = checkpoint.chat_template()
        return None if template is None else template.source

    assert source() == CHATML
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    assert source() == "yes"
    (folder / "chat_template.jinja").write_text("own file")
    assert source() == "own file"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert source() is None
