"""A model's steps on a GPU: prefill and decode of Llama shapes with random weights.

Owns: the shapes, the least work of a step, and the cases.  Does not know: clocks, the engine.
Idea: the layers out of the kernels alone, with one plan a step, captured in a CUDA graph: what an
engine on these kernels could reach.  The engine as it is comes in engine_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch.nn import functional

import kernels
from benchmarks.gpu.case import EXACTNESS, OURS, Case
from benchmarks.gpu.history import Piece
from benchmarks.gpu.small_llama import LayersAlone, Shape, Texts
from benchmarks.gpu.steps import BLOCK_SIZE, HALF, Call
from kernels.roofline import Heads, Work, attention_work

SHAPES: Final = {
    "135M": Shape(Heads(9, 3, 64), 576, 1536, 49152, 30, 8192),
    "1B": Shape(Heads(32, 8, 64), 2048, 8192, 128256, 16, 8192),
    "8B": Shape(Heads(32, 8, 128), 4096, 14336, 128256, 32, 8192),
}
"""SmolLM2 135M; Llama 3.2 1B and 3.1 8B, their embeddings apart from their heads."""

FEW: Final = {"tiny": Shape(Heads(4, 2, 16), 64, 96, 61, 2, 64)}
"""For the interpreter."""

CONTEXT: Final = 1500
BATCHES: Final = (1, 8, 32, 128)
PROMPTS: Final = ((2048, 0), (8192, 0), (60, 1500), (512, 7680))
"""New tokens, and cached ones before them."""

LIBRARY: Final = "the library's product"


def num_weights(shape: Shape) -> int:
    """Count the weights of the layers."""
    heads, hidden = shape.heads, shape.hidden
    mixed = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    out = heads.num_heads * heads.head_dim
    return shape.num_layers * (hidden * (mixed + out) + 3 * hidden * shape.ffn)


def step_work(shape: Shape, new: list[int], lens: list[int]) -> Work:
    """Count what a step must read and multiply: weights once, K/V, and logits of each last row."""
    attention = attention_work(new, lens, shape.heads)
    head = shape.vocab * shape.hidden
    weights = num_weights(shape)
    return Work(
        bytes=2 * (weights + head) + shape.num_layers * attention.bytes,
        flop=2 * (weights * sum(new) + head * len(new)) + shape.num_layers * attention.flop,
    )


def step_calls(
    device: torch.device,
    shape: Shape,
    new: int,
    lens: list[int],
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = kernels.linear,
) -> list[Call]:
    """Return a step of `new` tokens at the end of each sequence; decode where that is one."""
    model = LayersAlone(shape, device, HALF, product)
    texts = Texts.random(lens, shape.vocab, BLOCK_SIZE)
    pool = model.new_pool(texts.tables.numel(), BLOCK_SIZE).normal_()
    step = texts.step([Piece(s, n - new, n) for s, n in enumerate(lens)], device)
    last = step.q_start[1:].long() - 1
    longest = max(lens) if new == 1 else None

    def call() -> torch.Tensor:
        return model.project(model.hidden(pool, step, max_seq_len=longest)[last])

    return [call]


def serving_cases(*, tiny: bool) -> Iterator[Case]:
    """Iterate over the steps of each shape."""
    for name, shape in (FEW if tiny else SHAPES).items():
        steps = [(f"decode {batch} behind {CONTEXT}", batch, 1, CONTEXT) for batch in BATCHES]
        steps += [(f"prefill {new} behind {old}", 1, new, old) for new, old in PROMPTS]
        for what, many, tokens, behind in steps:
            batch, new, old = many, tokens, behind
            if tiny:
                batch, new, old = min(many, 2), min(tokens, 7), min(behind, 20)
            lens = [old + new] * batch
            case = partial(
                Case, f"{name} {what}", work=step_work(shape, [new] * batch, lens), eager=True
            )
            build = partial(step_calls, shape=shape, new=new, lens=lens)
            yield case(OURS, "ours", build=build, goals=(EXACTNESS,))
            yield case(LIBRARY, "free", build=partial(build, product=functional.linear))
