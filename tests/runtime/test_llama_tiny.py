"""A small real model: right by a dense reference, and the same bits whatever the cache does."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kernels import native
from radixcache import CacheConfig, RadixCache, pack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.executor.executor import ModelExecutor
from runtime.kv.store import KVStore
from runtime.models.config import ModelConfig
from runtime.models.llama import LlamaModel
from runtime.plan import StepPlan, StepResult
from runtime.request import Request, SamplingParams
from tests.support.tiny_models import dense_logits, random_weights, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHAPES = {
    "gqa1-dim16": tiny_config(num_heads=4, num_kv_heads=4, head_dim=16, hidden_size=64),
    "gqa3-dim64": tiny_config(num_heads=3, num_kv_heads=1, head_dim=64, tie_embeddings=True),
    "gqa9-dim32": tiny_config(num_heads=9, num_kv_heads=1, head_dim=32, attention_bias=True),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GREEDY = SamplingParams(max_tokens=6)
DRAWN = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.95, seed=7)


def prompt(count: int, first: int = 0) -> list[int]:
    """Token ids that look like no pattern; the same begin for the same `first`."""
    return [(first * 13 + 7 * i * i + 3 * i) % 61 for i in range(count)]


class Answer(NamedTuple):
    """What a request gave: its tokens, and the logits that each was chosen from."""

    tokens: list[int]
    logits: torch.Tensor
    num_cached: int

    def same_bits(self, other: Answer) -> bool:
        return self.tokens == other.tokens and torch.equal(self.logits, other.logits)


class RecordingExecutor(ModelExecutor):
    """Keeps the logits of each draw by request."""

    def __init__(self, model: LlamaModel, store: KVStore) -> None:
        super().__init__(model, store)
        self.logits: dict[str, list[torch.Tensor]] = {}
        self._project, model.logits = model.logits, self._keep

    def execute(self, plan: StepPlan) -> StepResult:
        self._drawing = [piece.request_id for piece in plan.slices if piece.draws]
        return super().execute(plan)

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._project(hidden)
        for name, row in zip(self._drawing, rows, strict=True):
            self.logits.setdefault(name, []).append(row.clone())
        return rows


class Lab:
    """An engine over a tiny model; `ask` runs requests together and returns their answers."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        *,
        num_blocks: int = 400,
        block_size: int = 16,
        enable_prefix_cache: bool = True,
        **limits: int,
    ) -> None:
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        model = LlamaModel(config, random_weights(config).items(), dtype=dtype, device=CPU)
        store = KVStore(config, **sizes, dtype=dtype, device=CPU)
        store.pool.fill_(torch.nan)  # what is read without being written shows
        cache = RadixCache(CacheConfig(**sizes, enable_prefix_cache=enable_prefix_cache))
        limits.setdefault("max_len", min(config.max_len, num_blocks * block_size))
        self.executor = RecordingExecutor(model, store)
        self.engine = Engine(
            cache,
            EngineConfig(**limits),
            self.executor,
            tokenizer=None,
            eos_ids=frozenset(),
            vocab_size=config.vocab_size,
            draw_seed=lambda: 1,
        )
        self._count = 0

    def ask(self, *prompts: list[int], sampling: SamplingParams = GREEDY) -> list[Answer]:
        names = []
        for ids in prompts:
            self._count += 1
            names.append(f"r{self._count}")
            request = Request(request_id=names[-1], prompt=pack_tokens(ids), sampling=sampling)
            self.engine.submit(request)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        cached: dict[str, int] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None
                tokens[output.request_id] += output.token_ids
                cached[output.request_id] = output.usage.cached_tokens
        self.engine.check()
        logits = {name: torch.stack(self.executor.logits[name]) for name in names}
        return [Answer(tokens[name], logits[name], cached[name]) for name in names]


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=["native", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the kernels in C, and as on a machine without a compiler."""
    if request.param == "native" and not native.available():
        pytest.skip(native.build().reason)
    monkeypatch.setenv("RADIXCACHE_KERNELS", request.param)


# Right.


@pytest.mark.parametrize("chunk", [0, 7])
def test_logits_are_those_of_a_dense_float64_model(config, chunk):
    weights = random_weights(config)
    lab = Lab(config, torch.float32, block_size=4, max_chunk_tokens=chunk)
    for ids in (prompt(1), prompt(40), prompt(150, first=1)):
        (answer,) = lab.ask(ids)
        dense = dense_logits(config, weights, ids + answer.tokens)[len(ids) - 1 : -1]
        assert answer.logits.shape == dense.shape
        assert (answer.logits - dense).abs().max() < 1e-4 * dense.abs().max()
        assert answer.tokens == dense.argmax(-1).tolist()


def test_bfloat16_logits_are_near_those_of_a_dense_float64_model(config):
    ids = prompt(60)
    (answer,) = Lab(config, torch.bfloat16).ask(ids)
    dense = dense_logits(config, random_weights(config), ids + answer.tokens)[len(ids) - 1 : -1]
    error = (answer.logits - dense).abs()
    assert error.max() < 0.2 * dense.abs().max()
    assert error.mean() < 0.03 * dense.abs().max()


def test_the_reference_sees_order_and_the_past():
    config = SHAPES["gqa3-dim64"]
    weights = random_weights(config)
    ids = prompt(12)
    rows = dense_logits(config, weights, ids)
    assert torch.allclose(dense_logits(config, weights, ids[:5]), rows[:5])
    swapped = dense_logits(config, weights, [ids[1], ids[0], *ids[2:]])
    assert (swapped[-1] - rows[-1]).abs().max() > 1e-3 * rows.abs().max()


# The same bits; test_invisibility.py has the matrix.


def test_the_next_turn_of_a_conversation_has_the_bits_of_a_new_start(config, dtype):
    lab, history = Lab(config, dtype, block_size=1), prompt(20)
    for turn in range(4):
        (answer,) = lab.ask(history)
        assert answer.num_cached == (len(history) - 5 if turn else 0)
        assert answer.same_bits(Lab(config, dtype).ask(history)[0])
        history = history + answer.tokens + prompt(5, first=turn)
