"""The real model's logits are those of Hugging Face transformers, on the same weights.

`samples/logits.json` holds transformers 5.24's float32 logits of three real texts at every eighth
position: the eight likeliest tokens and each 1,009th.  `benchmarks/compare_transformers.py` made
it, and compares every logit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.executor.batch import build_batch
from runtime.executor.executor import ModelExecutor
from runtime.llm import LLM
from runtime.plan import Slice

SAMPLES = json.loads((Path(__file__).parent / "samples" / "logits.json").read_text())
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def executor() -> ModelExecutor:
    executor = LLM(num_blocks=8, dtype="float32").runtime.executor
    assert isinstance(executor, ModelExecutor)
    return executor


def logits_in_chunks(executor: ModelExecutor, ids: list[int], chunk: int) -> torch.Tensor:
    """The logits of every position, computed `chunk` tokens a step."""
    block_size = executor.store.block_size
    rows = []
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        num_blocks = -(-(start + len(piece)) // block_size)
        plan = Slice(
            request_id="text",
            start=start,
            tokens=np.array(piece, np.int32).tobytes(),
            block_table=np.arange(num_blocks, dtype=np.int32).tobytes(),
            draws=(),
        )
        with torch.inference_mode():
            batch = build_batch([plan], block_size=block_size, device=torch.device("cpu"))
            rows.append(executor.model.logits(executor.model.forward(batch, executor.store)))
    return torch.cat(rows)


@pytest.mark.parametrize("sample", SAMPLES, ids=["novel", "code", "numbers"])
def test_logits_are_those_of_transformers(executor: ModelExecutor, sample: Any) -> None:
    ours = logits_in_chunks(executor, sample["ids"], len(sample["ids"]))
    assert len(sample["rows"]) > 5
    for row in sample["rows"]:
        found = ours[row["position"], row["tokens"]]
        assert (found - torch.tensor(row["logits"])).abs().max() < TOLERANCE


def test_logits_have_the_same_bits_however_the_text_is_cut(executor: ModelExecutor) -> None:
    ids = SAMPLES[0]["ids"]
    whole = logits_in_chunks(executor, ids, len(ids))
    for chunk in (1, 7, 32):
        assert torch.equal(logits_in_chunks(executor, ids, chunk), whole)
