"""Faults of arithmetic to plant: each makes a token's bits depend on more than the tokens up to it.

Owns: the faults, and how one is planted.  Does not know: who catches it; the tests do.
Idea: these are the ways in which caches are seen elsewhere: an order of sums that follows the
batch or the cut of a prompt, noise by row, positions that count from the hit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

from runtime.kv.store import KVStore
from tests.support.planted import PlantedBug

LLAMA = importlib.import_module("runtime.models.llama")
ATTENTION = importlib.import_module("runtime.models.attention")

Cuts = Callable[[int, int, int], list[int]]
"""Where the keys of a sequence are cut: from its first new row, its length and the batch's size."""

FEW_ROWS = 4
"""Rows from which on a product with the planted fault is summed in one go."""

ATTENDING = ("extend_attention", "decode_attention", "shared_prefix_attention")


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models compute their layers operation by operation, as a fault in one of them needs."""
    monkeypatch.setattr(ATTENTION.StepAttention, "plan", None)


def plant_attention(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Any]) -> None:
    """Put `attend` in the place of every attention operation of a model."""
    one_by_one(monkeypatch)
    for name in ATTENDING:
        monkeypatch.setattr(ATTENTION, name, attend)


class PlantedFault(NamedTuple):
    """One fault: what goes wrong, as a phrase, and how it is put in place for a test."""

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]


def attention_cut_at(cuts: Cuts) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant an attention that is right, but sums its keys part by part, cut where `cuts` says."""

    def attend(
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        q_start: torch.Tensor,
        *,
        scale: float,
        out: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        rows = q_start.tolist()
        for i, seq_len in enumerate(seq_lens.tolist()):
            keys, values = (
                pool[block_table[i].clamp(min=0).long()].flatten(0, 1)[:seq_len].float()
                for pool in (k_pool, v_pool)
            )
            first = seq_len - (rows[i + 1] - rows[i])
            ends = [0, *cuts(first, seq_len, len(rows) - 1), seq_len]
            parts = list(pairwise(ends))
            out[rows[i] : rows[i + 1]] = _in_parts(
                q[rows[i] : rows[i + 1]].float() * scale, keys, values, first, parts
            ).to(q.dtype)
        return out

    return lambda monkeypatch: plant_attention(monkeypatch, attend)


def _in_parts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    parts: list[tuple[int, int]],
) -> torch.Tensor:
    """Attend to each part of the keys on its own, and merge what that gives."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", q, keys)
    ahead = torch.arange(len(keys)) > (first + torch.arange(len(q)))[:, None]
    scores = scores.masked_fill(ahead, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    total, mass = 0.0, 0.0
    for start, end in parts:
        weights = torch.exp(scores[..., start:end] - top)
        total = total + torch.einsum("hts,shd->htd", weights, values[start:end])
        mass = mass + weights.sum(-1, keepdim=True)
    return (total / mass).transpose(0, 1)


def _products_cut_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum the products of few rows in two parts; some libraries do so, and none has to."""
    multiply = LLAMA.linear

    def product(x: torch.Tensor, weight: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if len(x) >= FEW_ROWS:
            whole: torch.Tensor = multiply(x, weight, *rest, **options)
            return whole
        in_first = torch.arange(x.shape[1]) < x.shape[1] // 2
        first: torch.Tensor = multiply(x * in_first, weight, *rest, **options)
        return first + multiply(x * ~in_first, weight)

    one_by_one(monkeypatch)
    monkeypatch.setattr(LLAMA, "linear", product)


def _store_after_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = LLAMA.rotary_store_kv
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def rotate_alone(mixed: Any, cos: Any, sin: Any, *pools_and_slots: Any) -> torch.Tensor:
        pools = pools_and_slots[:2]
        before = [pool.clone() for pool in pools]
        q: torch.Tensor = rotate(mixed, cos, sin, *pools_and_slots)
        late.extend((pool, pool.clone()) for pool in pools)
        for pool, unwritten in zip(pools, before, strict=True):
            pool.copy_(unwritten)
        return q

    def attend_first(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*tensors: Any, **options: Any) -> torch.Tensor:
            attended = attend(*tensors, **options)
            for _ in range(2):
                pool, written = late.pop()
                pool.copy_(written)
            return attended

        return run

    one_by_one(monkeypatch)
    monkeypatch.setattr(LLAMA, "rotary_store_kv", rotate_alone)
    for name in ATTENDING:
        monkeypatch.setattr(ATTENTION, name, attend_first(getattr(ATTENTION, name)))


def _edit(name: str, where: tuple[Any, str], edit: tuple[str, str]) -> PlantedFault:
    return PlantedFault(name, PlantedBug(name, where, edit, seen_by="").plant)


FAULTS = (
    PlantedFault(
        "attention cuts its keys where the cached prefix ends",
        attention_cut_at(lambda first, seq_len, size: [first] if first else []),
    ),
    PlantedFault(
        "attention cuts its keys by how many sequences there are",
        attention_cut_at(lambda first, seq_len, size: [seq_len // 2] if size > 2 else []),
    ),
    PlantedFault("products are cut by how many rows there are", _products_cut_by_rows),
    PlantedFault("K/V is stored after attention", _store_after_attention),
    _edit(
        "noise is drawn by the row of the batch",
        (importlib.import_module("runtime.executor.executor"), "choose_tokens"),
        (
            "_noise(draw, logits.shape[-1]) for draw in drawn",
            "torch.rand(logits.shape[-1], generator=torch.Generator().manual_seed(row))"
            " for row in rows",
        ),
    ),
    _edit(
        "positions count from the first token that is computed",
        (importlib.import_module("runtime.executor.batch"), "_batch_of_slices"),
        ("positions=on_device(positions)", "positions=on_device(positions - starts[owner])"),
    ),
    _edit(
        "a decode stores its K/V at the begin of its block",
        (importlib.import_module("runtime.executor.batch"), "_batch_of_rows"),
        ("np.int64(block_size) + inside", "np.int64(block_size)"),
    ),
    _edit(
        "noise counts positions from the hit",
        (importlib.import_module("runtime.scheduler.scheduler"), "next_slice"),
        ("draws_of(sequence, end)", "draws_of(sequence, end - sequence.num_in_place)"),
    ),
    _edit(
        "a copied block misses its last slot",
        (KVStore, "_copy_batch"),
        ("c.num_tokens) for c", "max(0, c.num_tokens - 1)) for c"),
    ),
)
