"""Are a model's logits and K/V the same bits, whatever the cache did?  Asked of a small Llama.

Owns: the ways to the same text: chunks, batches, blocks, a captured decode.  Does not know: which
code computes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

from benchmarks.gpu.graphs import replayed
from benchmarks.gpu.history import Piece
from benchmarks.gpu.invariance import Answer, compare
from benchmarks.gpu.small_llama import FEW, SMALL, LayersAlone, Model, Step, Texts

LENS: Final = [3, 65, 530, 1100]
FEW_LENS: Final = [3, 18]

Way = tuple[str, torch.Tensor, torch.Tensor]


def lens_of(device: torch.device) -> list[int]:
    """Return the lengths of the texts: few where a kernel is interpreted."""
    return LENS if device.type == "cuda" else FEW_LENS


class Computed:
    """Logits of every position, and K/V in order of position, however they were computed."""

    def __init__(self, model: Model, texts: Texts) -> None:
        self.model, self.texts = model, texts
        self.pool = model.new_pool(texts.tables.numel(), texts.block_size)
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, pieces: list[Piece]) -> None:
        """Compute pieces in one pass."""
        logits = self.model.logits(self.pool, self.texts, pieces)
        places = ((s, at) for s, start, end in pieces for at in range(start, end))
        self.rows |= dict(zip(places, logits, strict=True))

    def logits(self, sequence: int) -> torch.Tensor:
        count = len(self.texts.ids[sequence])
        return torch.stack([self.rows[sequence, at] for at in range(count)])

    def kv(self, sequence: int) -> torch.Tensor:
        table = self.texts.tables[sequence].long().to(self.pool.device)
        return self.pool[:, :, table].flatten(2, 3)[:, :, : len(self.texts.ids[sequence])]


def model_ways(model: Model, vocab: int, lens: list[int], chunks: tuple[int, ...]) -> Iterator[Way]:
    """Yield each way to the same logits and K/V."""
    texts = Texts.random(lens, vocab, 16)
    every = [Piece(s, 0, length) for s, length in enumerate(lens)]
    alone = Computed(model, texts)
    for piece in every:
        alone.take([piece])

    def same(name: str, other: Computed) -> Iterator[Way]:
        for s, length in enumerate(lens):
            yield f"{name}, logits of {length} tokens", other.logits(s), alone.logits(s)
            yield f"{name}, K/V of {length} tokens", other.kv(s), alone.kv(s)

    for block_size in (16, 1, 64):
        batch = Computed(model, Texts.of(texts.ids, block_size))
        batch.take(every[::-1])
        yield from same(f"in one batch, blocks of {block_size}", batch)
    for chunk in chunks:
        cut = Computed(model, texts)
        for first in range(0, max(lens), chunk):
            pieces = [
                Piece(s, first, min(first + chunk, n)) for s, n in enumerate(lens) if first < n
            ]
            cut.take(pieces)
        yield from same(f"in chunks of {chunk}", cut)


def captured_ways(model: LayersAlone, vocab: int, device: torch.device) -> Iterator[Way]:
    """Yield a decode captured once and replayed for each token, beside the whole text."""
    longest = lens_of(device)[-1]
    texts = Texts.random([longest, longest // 2], vocab, 16)
    whole, stepped = Computed(model, texts), Computed(model, texts)
    whole.take([Piece(0, 0, longest), Piece(1, 0, longest // 2)])
    first = longest // 2 - 3
    stepped.take([Piece(0, 0, first), Piece(1, 0, first)])

    def step_at(at: int) -> Step:
        return texts.step([Piece(0, at, at + 1), Piece(1, at, at + 1)], device)

    held = step_at(first)
    out = torch.empty(2, vocab, device=device)

    def decode() -> torch.Tensor:
        return out.copy_(model.forward(stepped.pool, held, max_seq_len=longest))

    replay = replayed(decode, device)
    for at in range(first, longest // 2):
        for tensor, value in zip(held, step_at(at), strict=True):
            tensor.copy_(value)
        replay()
        for s in range(2):
            yield f"captured, token {at} of text {s}", out[s].clone(), whole.rows[s, at]


def questions(device: torch.device) -> dict[str, Callable[[], Answer]]:
    """Return every question about models, by name."""
    shape = SMALL if device.type == "cuda" else FEW
    chunks = (1, 7, 64, 512) if device.type == "cuda" else (7,)
    found: dict[str, Callable[[], Answer]] = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        layers = partial(LayersAlone, shape, device, dtype)
        found[f"layers of the kernels alone, {name}"] = lambda layers=layers: compare(
            model_ways(layers(), shape.vocab, lens_of(device), chunks)
        )
        found[f"layers of the kernels alone, captured decode, {name}"] = lambda layers=layers: (
            compare(captured_ways(layers(), shape.vocab, device))
        )

        def runtime(dtype: torch.dtype = dtype) -> Answer:
            try:
                from benchmarks.gpu.runtime_llama import RuntimeLlama
            except ModuleNotFoundError as error:
                return {"absent": f"the runtime needs {error.name}, which is not installed"}
            model = RuntimeLlama(shape, device, dtype)
            return compare(model_ways(model, shape.vocab, lens_of(device), chunks))

        found[f"the runtime's Llama, {name}"] = runtime
    return found
