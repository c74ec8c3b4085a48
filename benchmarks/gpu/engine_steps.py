"""The runtime's own steps on a GPU, by the wall clock; needs the runtime's libraries.

Owns: steps as the executor takes them, and the real model through the library's front door.  Does
not know: what the numbers are held against.
Idea: an executor's answer is tokens on the host, so a step's wall time is all of it: building the
batch, every launch, the choice of tokens.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu.runtime_llama import new_runtime_llama
from benchmarks.gpu.small_llama import Shape
from benchmarks.gpu.steps import BLOCK_SIZE, HALF
from runtime.executor.executor import ModelExecutor
from runtime.kv.store import KVStore
from runtime.llm import LLM
from runtime.plan import Draw, Slice, StepPlan
from runtime.request import SamplingParams

WARM_UP, REPEATS = 3, 15
GREEDY: Final = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
QUESTIONS: Final = [f"Name {n} rivers of Europe, and say where each rises." for n in range(2, 10)]


def step_seconds(device: torch.device, shape: Shape, new: int, lens: list[int]) -> dict[str, Any]:
    """Time a step of `new` tokens at the end of each sequence, by the executor."""
    config, model = new_runtime_llama(shape, device, HALF)
    counts = [-(-n // BLOCK_SIZE) for n in lens]
    store = KVStore(
        config, num_blocks=sum(counts), block_size=BLOCK_SIZE, dtype=HALF, device=device
    )
    store.pool.normal_()
    executor = ModelExecutor(model, store)
    ids = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    tables = np.split(ids, np.cumsum(counts)[:-1])
    slices = tuple(
        Slice(
            request_id=str(place),
            start=length - new,
            tokens=np.full(new, place % shape.vocab, np.int32).tobytes(),
            block_table=table.tobytes(),
            draws=(Draw(**GREEDY, position=length),),
        )
        for place, (length, table) in enumerate(zip(lens, tables, strict=True))
    )
    times = []
    warm_up, repeats = (WARM_UP, REPEATS) if device.type == "cuda" else (0, 1)
    for step in range(warm_up + repeats):
        began = time.perf_counter()
        executor.execute(StepPlan(step=step, pieces=slices))
        times.append((time.perf_counter() - began) * 1e6)
    found = sorted(times[warm_up:])
    return {
        "us": statistics.median(found),
        "low_us": found[len(found) // 5],
        "high_us": found[-1 - len(found) // 5],
    }


def real_model(device: str = "cuda", max_tokens: int = 128) -> dict[str, Any]:
    """Answer eight questions with SmolLM2, twice; the second time from the cache."""
    llm = LLM(device=device, max_step_tokens=8192)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    rates = []
    for _ in range(2):
        began = time.perf_counter()
        answers = llm.generate(QUESTIONS, sampling)
        rates.append(sum(len(a.token_ids) for a in answers) / (time.perf_counter() - began))
    return {"us": 1e6 / rates[1], "tokens_s": rates[1], "first_tokens_s": rates[0]}
