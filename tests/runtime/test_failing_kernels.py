"""A kernel that fails ends the one request whose tokens it failed on, whichever computes the model.

The kernels are the real ones, in C where a compiler is; a failure comes after the real call, so
that whatever it wrote is there.  The model is tiny, and what others must give is what they give
where nothing fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernels import native
from radixcache import CacheConfig, RadixCache
from radixcache.tokens import pack_tokens
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.executor.executor import ModelExecutor
from runtime.kv.store import KVStore
from runtime.models.batch import Batch
from runtime.models.llama import LlamaModel
from runtime.request import Request, RequestOutput, SamplingParams
from tests.support.tiny_models import random_weights, tiny_config

POISON = 60
CPU = torch.device("cpu")
OTHERS = {"greedy": SamplingParams(max_tokens=9), "drawn": SamplingParams(max_tokens=9, n=2)}
IN_C = {
    "layers": ("kernels.decoder_layers", "radixcache_decoder"),
    "product": ("kernels._linear_native", "radixcache_linear"),
    "attention": ("kernels._attention_native", "radixcache_attention"),
    "norm": ("kernels._rows_native", "radixcache_rms_norm"),
}


class Armed:
    """Whether the step in progress holds the poison."""

    def __init__(self) -> None:
        self.now = False
        self.num_failed = 0

    def fail(self) -> None:
        """Raise, if it does."""
        if self.now:
            self.num_failed += 1
            raise MemoryError("the kernel was told to fail")


class FailingLibrary:
    """The kernels in C, one of which fails behind its real work."""

    def __init__(self, name: str, armed: Armed) -> None:
        self._real, self._name, self._armed = native.library(), name, armed

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name != self._name:
            return real

        def failing(*arguments: Any) -> Any:
            done = real(*arguments)
            self._armed.fail()
            return done

        return failing


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Armed:
    """Armed while a step is computed that holds the poison."""
    armed, forward = Armed(), LlamaModel.forward

    def watched(model: LlamaModel, batch: Batch, store: KVStore) -> torch.Tensor:
        armed.now = POISON in batch.token_ids
        try:
            return forward(model, batch, store)
        finally:
            armed.now = False

    monkeypatch.setattr(LlamaModel, "forward", watched)
    return armed


def new_engine() -> Engine:
    config = tiny_config(head_dim=64)
    sizes = {"num_blocks": 40, "block_size": 4}
    model = LlamaModel(config, random_weights(config).items(), dtype=torch.float32, device=CPU)
    return Engine(
        RadixCache(CacheConfig(**sizes)),
        EngineConfig(max_len=60, max_step_tokens=16, max_running=8),
        ModelExecutor(model, KVStore(config, **sizes, dtype=torch.float32, device=CPU)),
        tokenizer=None,
        eos_ids=frozenset(),
        vocab_size=config.vocab_size,
        draw_seed=lambda: 3,
    )


def submit(engine: Engine, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
    engine.submit(Request(request_id=name, prompt=pack_tokens(prompt), sampling=sampling))


def run(engine: Engine, *, poisoned: bool) -> dict[tuple[str, int], list[RequestOutput]]:
    """Serve the others and, amid them, a prompt with poison and one that draws it."""
    news: list[RequestOutput] = []
    for place, (name, sampling) in enumerate(OTHERS.items()):
        submit(engine, name, [1, 2, 3, place], sampling)
    for step in range(60):
        if poisoned and step == 2:
            submit(engine, "asked", [1, 2, 4, POISON], SamplingParams(max_tokens=3, n=2))
            drawing = SamplingParams(max_tokens=3, n=2, logit_bias=((POISON, 100.0),))
            submit(engine, "drawn by it", [1, 2, 3], drawing)
        news += engine.step()
        engine.check()
    assert not engine.has_work
    stats = engine.stats().cache
    assert (stats.num_private, stats.num_pinned, stats.num_leases) == (0, 0, 0)
    found: dict[tuple[str, int], list[RequestOutput]] = {}
    for output in news:
        found.setdefault((output.request_id, output.index), []).append(output)
    return found


def tokens(news: list[RequestOutput]) -> list[int]:
    return [token for output in news for token in output.token_ids]


def check_that_only_the_poisoned_end(engine: Engine, error: str) -> None:
    expected = run(new_engine(), poisoned=False)
    found = run(engine, poisoned=True)
    for key, news in expected.items():
        assert tokens(found[key]) == tokens(news)
        assert found[key][-1].finish_reason == "length"
    for key in found.keys() - expected.keys():
        assert found[key][-1].finish_reason == "error"
        assert error in str(found[key][-1].error)
    assert {key[0] for key in found.keys() - expected.keys()} == {"asked", "drawn by it"}
    again = run(engine, poisoned=False)  # what is cached now is as good
    assert {key: tokens(news) for key, news in again.items()} == {
        key: tokens(news) for key, news in expected.items()
    }


@pytest.mark.skipif(not native.available(), reason="no C compiler")
@pytest.mark.parametrize("kernel", IN_C)
def test_a_kernel_in_c_that_fails_ends_the_request_that_it_fails_on(
    kernel: str, armed: Armed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "native")
    engine = new_engine()
    assert isinstance(engine._executor, ModelExecutor)
    if kernel != "layers":  # operation by operation
        engine._executor.model._fused = None
    module, name = IN_C[kernel]
    library = FailingLibrary(name, armed)
    monkeypatch.setattr(importlib.import_module(module), "library", lambda: library)
    check_that_only_the_poisoned_end(engine, "MemoryError: the kernel was told to fail")
    assert armed.num_failed >= 4


def test_an_operation_of_torch_that_fails_ends_the_request_that_it_fails_on(
    armed: Armed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "torch")
    product = LlamaModel._product

    def failing(model: LlamaModel, *arguments: Any, **named: Any) -> torch.Tensor:
        done = product(model, *arguments, **named)
        armed.fail()
        return done

    monkeypatch.setattr(LlamaModel, "_product", failing)
    check_that_only_the_poisoned_end(new_engine(), "MemoryError: the kernel was told to fail")
    assert armed.num_failed >= 4


def break_hidden(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the model compute what is no number behind poison."""
    forward = LlamaModel.forward

    def breaking(model: LlamaModel, batch: Batch, store: KVStore) -> torch.Tensor:
        hidden = forward(model, batch, store)
        hidden[batch.token_ids == POISON] = value
        return hidden

    monkeypatch.setattr(LlamaModel, "forward", breaking)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_kernel_that_computes_no_numbers_ends_the_request_that_it_does_so_for(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than to draw whatever comes first: an end of sequence, or the same token for ever."""
    break_hidden(value, monkeypatch)
    check_that_only_the_poisoned_end(new_engine(), "BrokenLogits: the model computed logits")


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_prompt_is_not_scored_by_what_is_no_number(
    value: float, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_hidden(value, monkeypatch)
    engine = new_engine()
    scored = SamplingParams(max_tokens=max_tokens, prompt_logprobs=1)
    submit(engine, "broken", [1, 2, POISON, 3, 4], scored)
    submit(engine, "whole", [1, 2, 5, 3, 4], scored)
    news: list[RequestOutput] = []
    while engine.has_work:
        news += engine.step()
        engine.check()
    last = {output.request_id: output for output in news if output.is_last}
    assert (last["broken"].finish_reason, last["whole"].finish_reason) == ("error", "length")
    assert "BrokenLogits" in str(last["broken"].error)
