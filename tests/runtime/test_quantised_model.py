"""A model whose weights stay as its file stores them computes what the dequantised one does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch

from kernels import PackedWeight, QuantisedWeight, native
from kernels.formats import BLOCKS
from radixcache.tokens import pack_tokens
from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.errors import InvalidSetting, ModelFileError
from runtime.exactness.recompute import recompute
from runtime.loading import Runtime, load_runtime
from runtime.models.config import ModelConfig
from runtime.models.llama import LlamaModel
from runtime.request import Request, SamplingParams
from runtime.weights.gguf import GgufCheckpoint
from runtime.weights.mapping import expected_shapes
from tests.support.quantised import random_quantised
from tests.support.smollm2 import open_smollm2
from tests.support.tiny_checkpoints import TINY, write_tiny_gguf

CPU = torch.device("cpu")
WIDE = msgspec.structs.replace(
    TINY, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64
)
PROMPT = [(7 * i * i + i) % TINY.vocab_size for i in range(70)]
needs_native = pytest.mark.skipif(not native.available(), reason="no C compiler")


def stored_weights(config: ModelConfig, *kinds: str) -> dict[str, QuantisedWeight]:
    """Random quantised matrices of a model, whose formats take turns."""
    shapes = {n: s for n, s in expected_shapes(config).items() if len(s) == 2}
    return {
        name: random_quantised(kinds[i % len(kinds)], *shape, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }


def write_quantised(path: Path, *kinds: str, config: ModelConfig = WIDE) -> Path:
    return write_tiny_gguf(path, config=config, stored=stored_weights(config, *kinds))


def model_of(path: Path, *, as_stored: bool, dtype: torch.dtype = torch.float32) -> LlamaModel:
    checkpoint = GgufCheckpoint(path)
    tensors = checkpoint.tensors(as_stored=as_stored)
    return LlamaModel(checkpoint.config, tensors, dtype=dtype, device=CPU)


def logits_of(model: LlamaModel) -> torch.Tensor:
    _, hidden = recompute(model, pack_tokens(PROMPT))
    return model.logits(hidden)


@needs_native
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kinds", [*((k,) for k in BLOCKS), ("Q4_K", "Q6_K", "Q5_K")], ids=str)
def test_logits_have_the_bits_of_a_model_that_was_dequantised(
    kinds: tuple[str, ...], tied: bool, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(WIDE, tie_embeddings=tied)
    path = write_quantised(tmp_path / "model.gguf", *kinds, config=config)
    kept = model_of(path, as_stored=True)
    head = kept.head_weight
    assert isinstance(head, PackedWeight)
    assert set(head.formats) <= set(kinds)
    whole = logits_of(model_of(path, as_stored=False))
    assert whole.isfinite().all()
    assert torch.equal(logits_of(kept), whole)


@needs_native
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_16_bit_weights_of_a_file_stay_in_16_bits(kind: str, tmp_path: Path) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    path = write_tiny_gguf(tmp_path / "model.gguf", quantised=stored)
    kept = model_of(path, as_stored=True)
    assert isinstance(kept.head_weight, PackedWeight)
    assert kept.head_weight.formats == (kind,)
    assert torch.equal(logits_of(kept), logits_of(model_of(path, as_stored=False)))


def runtime(**settings: object) -> Runtime:
    return load_runtime(RuntimeConfig(num_blocks=40, num_threads=1, **settings))  # type: ignore[arg-type]


def answers(runtime: Runtime) -> list[object]:
    """Token ids and log-probabilities of two prompts, one after the other."""
    params = SamplingParams(max_tokens=6, logprobs=2)
    found: list[object] = []
    for name, prompt in (("a", list(range(100, 160))), ("b", [*range(100, 150), 7])):
        request = Request(request_id=name, prompt=pack_tokens(prompt), sampling=params)
        runtime.engine.submit(request)
        while runtime.engine.has_work:
            for output in runtime.engine.step():
                found += [output.token_ids, output.logprobs]
    return found


@needs_native
def test_the_real_model_answers_the_same_from_its_file_and_dequantised() -> None:
    open_smollm2()
    file = runtime(dtype="float32", weights="file")
    assert file.exactness.holds
    assert answers(file) == answers(runtime(dtype="float32", weights="float32"))


@needs_native
def test_weights_rounded_to_bfloat16_multiply_float32_rows() -> None:
    open_smollm2()
    kept = runtime(dtype="float32", weights="bfloat16")
    head = kept.executor.model.head_weight  # type: ignore[attr-defined]
    assert head.formats == ("BF16",)
    assert head.dtype == torch.float32
    assert kept.exactness.holds


@needs_native
def test_8_bit_activations_are_near_the_full_ones_and_exact_in_any_batch() -> None:
    open_smollm2()
    near, full = runtime(activations="int8"), runtime()
    assert near.exactness.holds, near.exactness
    ids = full.prompt_tokens("A radix tree maps prefixes of keys to values, and shares them.")

    def surprise(of: Runtime) -> float:
        """The mean negative log-likelihood of the text."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        of.engine.submit(Request(request_id="x", prompt=pack_tokens(ids), sampling=params))
        found: list[float] = []
        while of.engine.has_work:
            for output in of.engine.step():
                found += [entry.token for entry in output.prompt_logprobs]
        return -float(np.mean(found))

    assert surprise(near) == pytest.approx(surprise(full), rel=0.05)


def damaged(path: Path, name: str, at: int, value: bytes) -> Path:
    """Overwrite bytes of a tensor."""
    [tensor] = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    content = bytearray(path.read_bytes())
    start = int(tensor.data_offset) + at
    content[start : start + len(value)] = value
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("as_stored", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused_by_name(
    bad: float, as_stored: bool, tmp_path: Path
) -> None:
    path = write_quantised(tmp_path / "model.gguf", "Q4_K")
    damaged(path, "blk.1.ffn_up.weight", 5 * 144, np.float16(bad).tobytes())
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight has a scale that is infini"):
        list(GgufCheckpoint(path).tensors(as_stored=as_stored))


def test_rows_that_are_no_whole_blocks_are_refused_by_name(tmp_path: Path) -> None:
    """TINY's rows of 32 numbers, said to be of a type whose blocks have 256."""
    stored: Mapping[str, QuantisedWeight] = stored_weights(TINY, "Q4_0")
    path = write_tiny_gguf(tmp_path / "model.gguf", stored=stored)
    content = path.read_bytes()
    at = content.index(b"blk.0.attn_v.weight") + len("blk.0.attn_v.weight") + 4 + 2 * 8
    path.write_bytes(content[:at] + bytes([gguf.GGMLQuantizationType.Q4_K]) + content[at + 1 :])
    with pytest.raises(ModelFileError, match=r"blk\.0\.attn_v\.weight has rows of 32 numbers, no"):
        GgufCheckpoint(path)


def test_settings_that_no_backend_here_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    open_smollm2()
    monkeypatch.setenv("RADIXCACHE_KERNELS", "torch")
    with pytest.raises(InvalidSetting, match="weights are 'file', which the torch backend does"):
        runtime(weights="file")
    with pytest.raises(InvalidSetting, match="activations are int8, which only the native back"):
        runtime(activations="int8")
    monkeypatch.delenv("RADIXCACHE_KERNELS")
    with pytest.raises(InvalidSetting, match="activations are int8"):
        runtime(activations="int8", weights="float32")
    for name in ("weights", "activations"):
        with pytest.raises(InvalidSetting, match=f"{name} is 'int4': choose one of"):
            RuntimeConfig(**{name: "int4"})


PEAK = """
import sys
from pathlib import Path
import torch
from kernels import native
from runtime.models.llama import LlamaModel
from runtime.weights.gguf import GgufCheckpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

checkpoint = GgufCheckpoint(Path(sys.argv[1]))
native.library()
torch.zeros(1 << 20).sum()
before = peak()
model = LlamaModel(checkpoint.config, checkpoint.tensors(as_stored=True),
                   dtype=torch.float32, device=torch.device("cpu"))
print(peak() - before)
"""


@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_takes_little_more_memory_than_the_file(tmp_path: Path) -> None:
    """A model of 7 billion parameters in Q4_K must fit a laptop; here 60 million."""
    config = msgspec.structs.replace(
        WIDE, hidden_size=768, intermediate_size=2048, num_layers=10, num_heads=12, num_kv_heads=4
    )
    path = write_quantised(tmp_path / "model.gguf", "Q4_K", config=config)
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    two_layers = 2 * path.stat().st_size // config.num_layers  # being read, and being packed
    assert int(run.stdout) < 1.05 * path.stat().st_size + two_layers + (4 << 20)


def test_the_default_model_is_kept_in_its_own_formats() -> None:
    if not native.available():
        pytest.skip("no C compiler")
    open_smollm2()
    model = runtime(model=DEFAULT_MODEL).executor.model  # type: ignore[attr-defined]
    assert model.head_weight.formats == ("Q8_0",)
    weights = [weight for weight, _ in model.layer_weights]
    assert {name for weight in weights for name in weight.formats} == {"Q4_1"}
    assert sum(weight.nbytes for weight in (*weights, model.head_weight)) < 100e6
