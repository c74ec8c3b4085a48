"""Everything around attention on a GPU: moving keys and values, rows, products.

Owns: our calls, and the cases that they make.  Does not know: clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

import kernels
from benchmarks.gpu import freedom, torch_peers
from benchmarks.gpu.case import EXACTNESS, OURS, Case, Goal
from benchmarks.gpu.steps import BLOCK_SIZE, HALF, Call, Shapes
from kernels.roofline import (
    Work,
    copy_work,
    linear_work,
    norm_work,
    rotary_store_work,
    sample_work,
    silu_work,
    store_work,
)

MOVED_TOKENS: Final = 16384
NUM_LAYERS: Final = 4
LIBRARY: Final = "torch's linear"


def row_calls(device: torch.device, shapes: Shapes, name: str, num_rows: int) -> list[Call]:
    """Return calls of one of the row-wise ops at the sizes of a model."""
    x = torch.randn(num_rows, shapes.hidden, device=device, dtype=HALF)
    if name == "norm":
        residual, weight = torch.randn_like(x), torch.ones_like(x[0])
        out = torch.empty_like(x)
        return [partial(kernels.rms_norm, x, weight, eps=1e-5, residual=residual, out=out)]
    if name == "silu":
        gate_up = torch.randn(num_rows, 2 * shapes.ffn, device=device, dtype=HALF)
        return [partial(kernels.silu_and_mul, gate_up)]
    if name == "linear":
        weight = torch.randn(shapes.hidden, shapes.hidden, device=device, dtype=HALF)
        return [partial(kernels.linear, x, weight, out=torch.empty_like(x))]
    logits = torch.randn(num_rows, shapes.vocab, device=device)
    row = torch.arange(num_rows, device=device)
    ones = torch.ones(num_rows, device=device)
    limits = {"temperature": ones, "top_k": row * 0, "top_p": ones, "min_p": ones * 0}
    if name == "sample filtered":
        limits |= {"top_k": row * 0 + 50, "top_p": ones * 0.9}
    return [partial(kernels.sample, logits, seeds=row, positions=row, **limits)]


def move_calls(device: torch.device, shapes: Shapes, name: str, num_tokens: int) -> list[Call]:
    """Return calls that store, turn, copy or gather keys and values."""
    num_layers = 1 if name == "store" else NUM_LAYERS
    num_used = -(-num_tokens // BLOCK_SIZE)
    num_blocks = 2 * num_used
    num_heads, num_kv_heads, head_dim = shapes.heads
    shape = (2, num_layers, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    pools = torch.randn(shape, device=device, dtype=HALF)
    order = torch.randperm(num_blocks, device=device)
    ids, others = order[:num_used], order[num_used:]
    if name == "copy":
        whole = torch.full_like(ids, BLOCK_SIZE)
        return [partial(kernels.copy_blocks, *pools, ids, others, whole)]
    if name in ("gather", "scatter"):
        staging = torch.randn((num_used, 2, num_layers, *shape[3:]), device=device, dtype=HALF)
        if name == "gather":
            return [partial(kernels.gather_blocks, *pools, ids, staging)]
        return [partial(kernels.scatter_blocks, staging, *pools, ids)]
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    num_all = num_heads + 2 * num_kv_heads
    qkv = torch.randn(num_tokens, num_all, head_dim, device=device, dtype=HALF)
    k_pool, v_pool = pools[:, 0]
    if name == "store":
        k, v = qkv[:, num_heads : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        return [partial(kernels.store_kv, k, v, k_pool, v_pool, slots)]
    cos, sin = torch.ones(2, num_tokens, head_dim // 2, device=device)
    return [partial(kernels.rotary_store_kv, qkv, cos, sin, k_pool, v_pool, slots)]


def move_cases(shapes: Shapes) -> Iterator[Case]:
    """Iterate over the cases that move keys and values."""
    tokens = shapes.rows(MOVED_TOKENS)
    slots = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE
    copied = copy_work(slots, NUM_LAYERS, shapes.heads)
    works: dict[str, tuple[Work, bool]] = {
        "store": (store_work(tokens, shapes.heads), True),
        "copy": (copied, True),
        "gather": (copied, False),
        "scatter": (copied, False),
        "turn and store": (rotary_store_work(tokens, shapes.heads), False),
    }
    for name, (work, must) in works.items():
        yield Case(
            f"{name} 16k tokens",
            OURS,
            "ours",
            work,
            partial(move_calls, shapes=shapes, name=name, num_tokens=tokens),
            (Goal("share of bandwidth", 0.85),) if must else (),
        )


def row_cases(shapes: Shapes) -> Iterator[Case]:
    """Iterate over the cases of row-wise ops and of the product."""

    def rows(num: int) -> int:
        return shapes.rows(num)

    works = {
        ("norm", 8192): norm_work(rows(8192), shapes.hidden, residual=True),
        ("norm", 32): norm_work(rows(32), shapes.hidden, residual=True),
        ("silu", 8192): silu_work(rows(8192), shapes.ffn),
        ("silu", 32): silu_work(rows(32), shapes.ffn),
        ("sample", 64): sample_work(rows(64), shapes.vocab),
        ("sample filtered", 64): sample_work(rows(64), shapes.vocab),
    }
    for (name, num), work in works.items():
        build = partial(row_calls, shapes=shapes, name=name, num_rows=rows(num))
        yield Case(f"{name} {num} rows", OURS, "ours", work, build)
    for num in (1, 16, 64, 256, 8192):
        work = linear_work(rows(num), shapes.hidden, shapes.hidden)
        case = partial(Case, f"linear {num} rows", work=work)
        ours = partial(row_calls, shapes=shapes, name="linear", num_rows=rows(num))
        choices = freedom.LINEAR.get(num, ())
        yield case(OURS, "ours", build=ours, goals=(EXACTNESS,) if choices else ())
        peer = partial(torch_peers.matmul_calls, shapes=shapes, num_rows=rows(num))
        yield case(LIBRARY, "torch", build=peer)
        for choice in choices:
            free = partial(freedom.linear_calls, shapes=shapes, num_rows=rows(num), choice=choice)
            yield case(str(choice), "free", build=free)
