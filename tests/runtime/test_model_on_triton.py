"""The model over the Triton kernels, in Triton's interpreter: same bits, by the right operation.

The file runs itself again in a child process, since Triton reads TRITON_INTERPRET once.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.decoding.sampler import choose_tokens
from runtime.executor.executor import _is_broken
from runtime.models import attention
from runtime.models.llama import LlamaModel
from runtime.plan import Draw
from runtime.request import SamplingParams
from tests.support.invisibility import CPU, Alone, WatchedEngine
from tests.support.tiny_models import random_weights, tiny_config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import tests.support.triton_interpreter  # noqa: F401  (importing is the repair)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process")
PREFIX = [(7 * i * i + i) % 61 for i in range(70)]  # a split, and some
OPERATIONS = ("extend_attention", "decode_attention", "shared_prefix_attention")


@pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None,
    reason="is the child process, or triton is not installed on this platform",
)
def test_the_model_passes_over_interpreted_kernels() -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "RADIXCACHE"))}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).parents[2],
        env=inherited | {"TRITON_INTERPRET": "1", "RADIXCACHE_KERNELS": "triton"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 1


@interpreted
def test_prefill_decode_and_shared_prefixes_give_each_request_its_own_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        operation = getattr(attention, name)

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls[name] += 1
            result: torch.Tensor = operation(*args, **kwargs)
            return result

        return call

    for module in (
        "_attention_work",
        "_attention_triton",
        "shared_prefix_attention",
    ):  # short splits for a slow interpreter
        monkeypatch.setattr(importlib.import_module(f"kernels.{module}"), "SPLIT", 64)
    for name in OPERATIONS:
        monkeypatch.setattr(attention, name, counted(name))
    config = tiny_config(num_layers=1, num_heads=2, max_len=160)
    weights = random_weights(config)
    model = LlamaModel(config, weights.items(), dtype=torch.float16, device=CPU)
    alone = Alone(model, torch.float16)
    engine = WatchedEngine(alone, num_blocks=40, block_size=16, max_step_tokens=60, max_running=8)
    drawn = SamplingParams(max_tokens=2, temperature=1.0, seed=3, logprobs=1)
    engine.submit("first", PREFIX, drawn)
    engine.run()
    assert calls["decode_attention"]
    assert not calls["shared_prefix_attention"]  # nobody shares with a lone request
    for name, tail in (("a", [1]), ("b", [2] * 20)):
        engine.submit(name, PREFIX + tail, drawn)
    engine.submit("other", PREFIX[40:60], drawn)
    engine.run()
    assert set(calls) == set(OPERATIONS)


@interpreted
def test_a_row_with_one_logit_that_is_no_number_is_told_though_another_was_drawn() -> None:
    logits = torch.linspace(0.0, 3.0, 61)[None]
    logits[0, 17] = torch.nan
    draw = Draw(temperature=0.8, top_k=5, top_p=1.0, min_p=0.0, seed=3, position=4)
    tokens = choose_tokens(logits, [draw])
    assert logits[0, tokens[0]].isfinite()
    assert _is_broken(logits, tokens)
