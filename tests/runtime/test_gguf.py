"""GGUF files, whole and broken: what is read equals what was written, or one clear error."""

from __future__ import annotations

import contextlib
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import ModelFileError
from runtime.models.config import ModelConfig, RopeScaling
from runtime.weights.gguf import GgufCheckpoint
from tests.support.smollm2 import open_smollm2
from tests.support.tiny_checkpoints import (
    TINY,
    tiny_gguf_keys,
    tiny_weights,
    write_tiny_gguf,
)

FACTORS = (1.0, 1.5, 4.0, 8.0)
VARIANTS = {
    "plain": TINY,
    "untied": msgspec.structs.replace(TINY, tie_embeddings=False),
    "biased": msgspec.structs.replace(TINY, attention_bias=True),
    "wide heads": msgspec.structs.replace(TINY, head_dim=16),
    "one kv head": msgspec.structs.replace(TINY, num_kv_heads=1),
    "long context": msgspec.structs.replace(TINY, rope_freq_factors=FACTORS),
}
NEEDED_KEYS = (
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
)


def read_all(path: Path) -> GgufCheckpoint:
    """Open a file and use everything in it."""
    checkpoint = GgufCheckpoint(path)
    checkpoint.tokenizer().encode("hello 1")
    checkpoint.chat_template()
    for _ in checkpoint.tensors():
        pass
    return checkpoint


def same_config(found: ModelConfig, wanted: ModelConfig) -> bool:
    """Compare but for the epsilon, which the file holds in float32."""
    eps = wanted.rms_norm_eps
    assert found.rms_norm_eps == pytest.approx(eps, rel=1e-6)
    return msgspec.structs.replace(found, rms_norm_eps=eps) == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_is_read_back_as_it_was_written(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]
    checkpoint = read_all(write_tiny_gguf(tmp_path / "tiny.gguf", config=config))
    assert checkpoint.name == "tiny"
    assert same_config(checkpoint.config, config)
    wanted = tiny_weights(config)
    found = dict(checkpoint.tensors())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("quantised", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q8_0])
def test_quantised_rows_come_out_as_the_format_defines(quantised: Q, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quantised=quantised)
    found = dict(GgufCheckpoint(path).tensors())
    for name, tensor in tiny_weights().items():
        assert found[name].dtype == torch.float32
        if tensor.ndim == 2:
            wanted = dequantize(quantize(tensor.numpy(), quantised), quantised)
            np.testing.assert_array_equal(found[name].numpy(), wanted, err_msg=name)


def test_tensors_outlive_the_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    found = dict(GgufCheckpoint(path).tensors())
    before = {name: tensor.clone() for name, tensor in found.items()}
    path.write_bytes(bytes(path.stat().st_size))  # in place: a map of it would see zeros
    assert all(torch.equal(found[name], before[name]) for name in found)
    next(iter(found.values())).add_(1)  # and they may be written to


def test_rotary_rows_are_half_split(tmp_path: Path) -> None:
    weights = tiny_weights()
    name = "model.layers.0.self_attn.q_proj.weight"
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weights=weights)
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight").data
    found = dict(GgufCheckpoint(path).tensors())[name].numpy()
    half = TINY.head_dim // 2
    for head in range(TINY.num_heads):
        for pair in range(half):
            row = head * TINY.head_dim
            np.testing.assert_array_equal(found[row + pair], stored[row + 2 * pair])
            np.testing.assert_array_equal(found[row + half + pair], stored[row + 2 * pair + 1])


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling_is_read(keys: dict[str, object], tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", keys=tiny_gguf_keys() | keys)
    assert GgufCheckpoint(path).config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


def test_no_rope_scaling_is_none(tmp_path: Path) -> None:
    keys = tiny_gguf_keys() | {"llama.rope.scaling.type": "none"}
    assert (
        GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", keys=keys)).config.rope_scaling is None
    )


def test_without_a_chat_template_there_is_none(tmp_path: Path) -> None:
    keys = tiny_gguf_keys()
    del keys["tokenizer.chat_template"]
    assert GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", keys=keys)).chat_template() is None


def test_the_file_names_bos_and_every_end(tmp_path: Path) -> None:
    keys = tiny_gguf_keys() | {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    keys |= {"tokenizer.ggml.add_bos_token": True}
    tokenizer = GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", keys=keys)).tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.eos_ids == {0, 2, 5, 6}  # 0 by its name, <|endoftext|>
    assert tokenizer.encode_prompt("h") == [1, *tokenizer.encode("h")]


@pytest.mark.parametrize("key", NEEDED_KEYS)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    keys = tiny_gguf_keys()
    del keys[key]
    with pytest.raises(ModelFileError, match=f"no key '{key}'"):
        read_all(write_tiny_gguf(tmp_path / "t.gguf", keys=keys))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.sliding_window": 128}, "sliding-window"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -1.0}, "factor -1"),
        ({"llama.rope.dimension_count": 4}, "a part of each head"),
        ({"llama.attention.value_length": 4}, "different sizes"),
        ({"llama.attention.head_count_kv": 3}, "no multiple"),
        ({"llama.attention.head_count_kv": [2, 2]}, "is not of the kind"),
        ({"llama.attention.head_count": 0, "llama.attention.key_length": 8}, "num_heads is 0"),
        ({"llama.block_count": 3}, "lacks model.layers.2"),
        ({"llama.block_count": 1}, "holds model.layers.1"),
        ({"llama.block_count": 4_000_000_000}, "claims 4000000000 layers"),
        ({"llama.block_count": "two"}, "holds str 'two'"),
        ({"llama.feed_forward_length": 65}, "implies"),
        ({"llama.embedding_length": 64, "llama.attention.key_length": 8}, "measures"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "finite"),
        ({"tokenizer.ggml.model": "llama"}, "model 'llama'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 token types"),
        ({"tokenizer.ggml.tokens": ["a"] * 999}, "999 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "is not of the kind"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges that do not fit"),
        ({"tokenizer.ggml.merges": ["unseparated"]}, "merges that do not fit"),
        ({"tokenizer.ggml.eos_token_id": 270}, "no token"),
        ({"tokenizer.chat_template": "{% if %}"}, "chat template that is broken"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "t.gguf", keys=tiny_gguf_keys() | changes)
    with pytest.raises(ModelFileError, match=message):
        read_all(path)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="architecture 'gemma3'"):
        GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", architecture="gemma3"))


def test_a_vocabulary_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no token_embd"):
        GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", weights={}))


def test_wrong_rope_factors_are_refused(tmp_path: Path) -> None:
    for values in (np.ones(3), np.array([1, 1, 1, np.nan]), np.ones((2, 4))):
        extra = {"rope_freqs.weight": values.astype(np.float32)}
        with pytest.raises(ModelFileError, match="rope_freq_factors"):
            GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", extra=extra))


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_q_norm"):
        GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", extra=extra))


def test_a_tensor_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.ones(32, np.int16)}
    with pytest.raises(ModelFileError, match="type I16"):
        GgufCheckpoint(write_tiny_gguf(tmp_path / "t.gguf", extra=extra))


def test_an_unknown_tensor_type_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "t.gguf")
    whole = path.read_bytes()
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(whole[:at] + (250).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ModelFileError, match=r"250.* is not a valid GGML"):
        GgufCheckpoint(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(30), "not a GGUF file"),
        (b"GGUF", "version 0"),
        (b"GGUF\x01\x00\x00\x00" + bytes(30), "version 1"),
        (b"GGUF\x04\x00\x00\x00" + bytes(30), "version 4"),
        (b"GGUF\x00\x00\x00\x03" + bytes(30), "big-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 30, "claims"),
        (b"GGUF\x03\x00\x00\x00" + bytes(3), "damaged"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused(start: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(start)
    with pytest.raises(ModelFileError, match=message):
        GgufCheckpoint(path)


def test_a_missing_file_is_a_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufCheckpoint(tmp_path / "none.gguf")


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "t.gguf")
    whole = path.read_bytes()
    last = next(reversed(gguf.GGUFReader(path).tensors))
    end = last.data_offset + last.n_bytes  # padding may follow
    for length in {*range(0, 64, 3), *range(64, end, end // 60), end - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            GgufCheckpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("whole") / "t.gguf").read_bytes()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_bytes_give_a_model_or_a_model_file_error(
    data: st.DataObject, whole: bytes, tmp_path: Path
) -> None:
    header = whole.index(b"token_embd.weight") + 2000
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        bytes_ = data.draw(st.binary(min_size=1, max_size=8))
        damaged[at : at + len(bytes_)] = bytes_
    path = tmp_path / "t.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelFileError):
        read_all(path)


def test_the_real_model_is_what_its_card_says() -> None:
    checkpoint = open_smollm2()
    assert same_config(
        checkpoint.config,
        ModelConfig(
            architecture="llama",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_len=8192,
            rms_norm_eps=1e-5,
            rope_theta=100000.0,
            tie_embeddings=True,
        ),
    )
    assert checkpoint.config.kv_bytes_per_token(2) == 23_040
    name, embedding = next(iter(checkpoint.tensors()))
    assert (name, embedding.shape) == ("model.embed_tokens.weight", (49152, 576))
    assert embedding.isfinite().all()
