"""What is measured on a GPU: each case's shapes, least work and tensors.

Owns: the cases and their goals.  Does not know: clocks, tables.
Idea: a case knows its work without its tensors, so that it can be predicted where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import kernels
from kernels.roofline import (
    Heads,
    Work,
    attention_work,
    copy_work,
    linear_work,
    norm_work,
    rotary_store_work,
    sample_work,
    silu_work,
    store_work,
)

HEADS = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
BLOCK_SIZE = 16
HALF = torch.bfloat16
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One measurement.

    build  makes tensors on a device and returns calls of the op, each on tensors of its own
    peer   the same for the peer that it is measured beside, or None
    goal   the share of the roofline to reach, or None
    """

    name: str
    work: Work
    build: Callable[[torch.device], list[Call]]
    peer: Callable[[torch.device], list[Call]] | None = None
    goal: float | None = None


@dataclass
class Step:
    """Paged tensors of one attention call: every block in its own place, in random order."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor

    @property
    def paged(self) -> tuple[torch.Tensor, ...]:
        return self.k_pool, self.v_pool, self.block_table, self.seq_lens, self.q_start


def new_step(
    device: torch.device,
    q_lens: list[int],
    seq_lens: list[int],
    *,
    heads: Heads = HEADS,
    dtype: torch.dtype = HALF,
    shared: int = 0,
) -> Step:
    """Make a step; the first `shared` keys of all sequences are in the same blocks."""
    num_shared = shared // BLOCK_SIZE
    own = [-(-n // BLOCK_SIZE) - num_shared for n in seq_lens]
    ids = torch.randperm(num_shared + sum(own), dtype=torch.int32)
    table = torch.full((len(seq_lens), num_shared + max(own)), -1, dtype=torch.int32)
    table[:, :num_shared] = ids[:num_shared]
    at = num_shared
    for row, count in enumerate(own):
        table[row, num_shared : num_shared + count] = ids[at : at + count]
        at += count
    shape = (len(ids), BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
    pools = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    q = torch.randn(sum(q_lens), heads.num_heads, heads.head_dim, device=device, dtype=dtype)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return Step(q, *pools, table.to(device), lens.to(device), starts.to(device))


def extend_calls(device: torch.device, new: int, prefix: int) -> list[Call]:
    step = new_step(device, [new], [prefix + new])
    return [partial(kernels.extend_attention, step.q, *step.paged, scale=HEADS.head_dim**-0.5)]


def sdpa_calls(device: torch.device, new: int) -> list[Call]:
    """Torch's fused attention of a prompt, on contiguous keys that nobody had to gather."""
    q, k, v = (
        torch.randn(1, n, new, HEADS.head_dim, device=device, dtype=HALF)
        for n in (HEADS.num_heads, HEADS.num_kv_heads, HEADS.num_kv_heads)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return [partial(attend, q, k, v, is_causal=True, enable_gqa=True)]


def decode_calls(device: torch.device, batch: int, seq_len: int, copies: int) -> list[Call]:
    """Decode steps on `copies` pools, so that a call finds little of its keys in L2."""
    calls: list[Call] = []
    for _ in range(copies):
        step = new_step(device, [1] * batch, [seq_len] * batch)
        calls.append(
            partial(
                kernels.decode_attention,
                step.q,
                *step.paged,
                scale=HEADS.head_dim**-0.5,
                max_seq_len=seq_len,
            )
        )
    return calls


def quantised_decode_calls(device: torch.device, batch: int, seq_len: int) -> list[Call]:
    step = new_step(device, [1] * batch, [seq_len] * batch)
    pools = [pool.to(torch.float8_e4m3fn) for pool in (step.k_pool, step.v_pool)]
    scale = torch.ones(HEADS.num_kv_heads, device=device)
    return [
        partial(
            kernels.decode_attention,
            step.q,
            *pools,
            *step.paged[2:],
            scale=HEADS.head_dim**-0.5,
            max_seq_len=seq_len,
            k_scale=scale,
            v_scale=scale,
        )
    ]


def gathered_decode_calls(device: torch.device, batch: int, seq_len: int) -> list[Call]:
    """Torch's attention over keys that it gathers from their blocks first."""
    step = new_step(device, [1] * batch, [seq_len] * batch)
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> torch.Tensor:
        k, v = (
            pool[step.block_table.long()].flatten(1, 2).transpose(1, 2)
            for pool in (step.k_pool, step.v_pool)
        )
        return attend(step.q[:, :, None], k, v, enable_gqa=True)

    return [call]


def shared_decode_calls(device: torch.device, batch: int, prefix: int, own: int) -> list[Call]:
    """Plain decode of sequences that share their prefix's blocks: the peer of the cascade."""
    step = new_step(device, [1] * batch, [prefix + own] * batch, shared=prefix)
    return [
        partial(
            kernels.decode_attention,
            step.q,
            *step.paged,
            scale=HEADS.head_dim**-0.5,
            max_seq_len=prefix + own,
        )
    ]


def cascade_calls(device: torch.device, batch: int, prefix: int, own: int) -> list[Call]:
    step = new_step(device, [1] * batch, [prefix + own] * batch, shared=prefix)
    prefixes = kernels.SharedPrefixes.of([(list(range(batch)), prefix)], device)
    return [
        partial(
            kernels.shared_prefix_attention,
            step.q,
            *step.paged,
            prefixes,
            scale=HEADS.head_dim**-0.5,
            max_seq_len=prefix + own,
        )
    ]


def row_calls(device: torch.device, name: str, num_rows: int) -> list[Call]:
    """One of the row-wise ops at the sizes of an 8B model."""
    hidden, ffn, vocab = 4096, 14336, 128256
    x = torch.randn(num_rows, hidden, device=device, dtype=HALF)
    if name == "norm":
        residual, weight = torch.randn_like(x), torch.ones_like(x[0])
        return [partial(kernels.rms_norm, x, weight, eps=1e-5, residual=residual)]
    if name == "silu":
        gate_up = torch.randn(num_rows, 2 * ffn, device=device, dtype=HALF)
        return [partial(kernels.silu_and_mul, gate_up)]
    if name == "linear":
        weight = torch.randn(hidden, hidden, device=device, dtype=HALF)
        return [partial(kernels.linear, x, weight)]
    logits = torch.randn(num_rows, vocab, device=device)
    row = torch.arange(num_rows, device=device)
    ones = torch.ones(num_rows, device=device)
    limits = {"temperature": ones, "top_k": row * 0 + 50, "top_p": ones * 0.9, "min_p": ones * 0}
    return [partial(kernels.sample, logits, seeds=row, positions=row, **limits)]


def matmul_calls(device: torch.device, num_rows: int) -> list[Call]:
    """The library's product, which is not row-invariant."""
    x, weight = (torch.randn(n, 4096, device=device, dtype=HALF) for n in (num_rows, 4096))
    return [partial(torch.nn.functional.linear, x, weight)]


def move_calls(device: torch.device, name: str, num_tokens: int) -> list[Call]:
    """Storing, turning and copying keys and values."""
    num_layers, num_blocks = (4, 2 * num_tokens // BLOCK_SIZE) if name != "store" else (1, 4096)
    shape = (2, num_layers, num_blocks, BLOCK_SIZE, HEADS.num_kv_heads, HEADS.head_dim)
    pools = torch.zeros(shape, device=device, dtype=HALF)
    ids = torch.randperm(num_blocks, device=device)[: num_tokens // BLOCK_SIZE]
    if name == "copy":
        free = torch.ones(num_blocks, dtype=torch.bool, device=device).index_fill_(0, ids, False)
        others = free.nonzero()[:, 0][: len(ids)]
        return [partial(kernels.copy_blocks, *pools, ids, others, ids * 0 + BLOCK_SIZE)]
    if name == "gather":
        staging = torch.empty((len(ids), 2, num_layers, *shape[3:]), device=device, dtype=HALF)
        return [partial(kernels.gather_blocks, *pools, ids, staging)]
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]
    qkv = torch.randn(num_tokens, 48, HEADS.head_dim, device=device, dtype=HALF)
    k_pool, v_pool = pools[:, 0]
    if name == "store":
        return [partial(kernels.store_kv, qkv[:, 32:40], qkv[:, 40:], k_pool, v_pool, slots)]
    cos, sin = torch.ones(2, num_tokens, HEADS.head_dim // 2, device=device)
    return [partial(kernels.rotary_store_kv, qkv, cos, sin, k_pool, v_pool, slots)]


def attention_cases() -> list[Case]:
    """Return the cases of attention."""

    def decode(batch: int, seq_len: int, **options: int) -> Work:
        return attention_work([1] * batch, [seq_len] * batch, HEADS, **options)

    cascade = decode(64, 8192 + 128, shared=8192)
    return [
        Case(
            "decode 32 x 4k",
            decode(32, 4096),
            partial(decode_calls, batch=32, seq_len=4096, copies=4),
            partial(gathered_decode_calls, batch=32, seq_len=4096),
            goal=0.85,
        ),
        Case(
            "decode 1 x 128k",
            decode(1, 131072),
            partial(decode_calls, batch=1, seq_len=131072, copies=4),
            partial(gathered_decode_calls, batch=1, seq_len=131072),
            goal=0.85,
        ),
        Case(
            "decode 256 x 1k",
            decode(256, 1024),
            partial(decode_calls, batch=256, seq_len=1024, copies=4),
        ),
        Case(
            "decode 32 x 4k fp8",
            decode(32, 4096, kv_bytes=1),
            partial(quantised_decode_calls, batch=32, seq_len=4096),
        ),
        Case(
            "extend 8k",
            attention_work([8192], [8192], HEADS),
            partial(extend_calls, new=8192, prefix=0),
            partial(sdpa_calls, new=8192),
            goal=0.6,
        ),
        Case(
            "extend 512 on 16k",
            attention_work([512], [16896], HEADS),
            partial(extend_calls, new=512, prefix=16384),
        ),
        Case(
            "cascade 64 behind 8k",
            cascade,
            partial(cascade_calls, batch=64, prefix=8192, own=128),
            partial(shared_decode_calls, batch=64, prefix=8192, own=128),
        ),
        Case(
            "cascade 64 behind 512",
            decode(64, 640, shared=512),
            partial(cascade_calls, batch=64, prefix=512, own=128),
            partial(shared_decode_calls, batch=64, prefix=512, own=128),
        ),
    ]


def row_cases() -> list[Case]:
    """Return the cases of everything around attention."""
    return [
        *(
            Case(
                f"{name} 16k tokens", work, partial(move_calls, name=name, num_tokens=16384), goal=g
            )
            for name, work, g in (
                ("store", store_work(16384, HEADS), 0.85),
                ("copy", copy_work(16384, 4, HEADS), 0.85),
                ("gather", copy_work(16384, 4, HEADS), 0.85),
                ("turn and store", rotary_store_work(16384, HEADS), None),
            )
        ),
        *(
            Case(f"{name} {rows} rows", work, partial(row_calls, name=name, num_rows=rows))
            for name, rows, work in (
                ("norm", 8192, norm_work(8192, 4096, residual=True)),
                ("silu", 8192, silu_work(8192, 14336)),
                ("sample", 64, sample_work(64, 128256)),
            )
        ),
        *(
            Case(
                f"linear {rows} rows",
                linear_work(rows, 4096, 4096),
                partial(row_calls, name="linear", num_rows=rows),
                partial(matmul_calls, num_rows=rows),
            )
            for rows in (1, 64, 8192)
        ),
    ]


def all_cases() -> list[Case]:
    """Return every case."""
    return attention_cases() + row_cases()
