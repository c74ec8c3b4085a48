"""Are the kernels right on this GPU?  Asked before anything is timed.

Owns: the questions that must be answered yes.  Does not know: clocks.
Idea: attention is compared with float64, with NaN in every slot that must not be read and in every
output; the other ops with what torch computes of the same numbers on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

import kernels
from benchmarks.gpu.attention import quantised
from benchmarks.gpu.steps import BLOCK_SIZE, HALF, Step, new_step
from kernels.roofline import Heads

SMALL: Final = Heads(num_heads=8, num_kv_heads=2, head_dim=64)
WIDE: Final = Heads(num_heads=8, num_kv_heads=2, head_dim=128)
TOLERANCE: Final = 2e-2
Q_LENS, SEQ_LENS = [5, 1, 300, 33, 129], [70, 1, 1500, 33, 1024]
FEW_Q_LENS, FEW_SEQ_LENS = [5, 1, 3], [70, 1, 520]
"""For the interpreter: two splits still."""


def lengths(device: torch.device) -> tuple[list[int], list[int]]:
    """Return queries and keys of each sequence: few where a kernel is interpreted."""
    return (Q_LENS, SEQ_LENS) if device.type == "cuda" else (FEW_Q_LENS, FEW_SEQ_LENS)


def poisoned(device: torch.device, heads: Heads = SMALL, dtype: torch.dtype = HALF) -> Step:
    """A ragged step whose unused slots hold NaN."""
    q_lens, seq_lens = lengths(device)
    step = new_step(device, q_lens, seq_lens, heads=heads, dtype=dtype)
    for row, length in enumerate(seq_lens):
        last = int(step.block_table[row, (length - 1) // BLOCK_SIZE])
        for pool in (step.k_pool, step.v_pool):
            pool[last, (length - 1) % BLOCK_SIZE + 1 :] = float("nan")
    return step


def attended(step: Step, row: int, window: int | None = None) -> torch.Tensor:
    """Attention of one sequence in float64."""
    start, end = step.q_start[row : row + 2].tolist()
    length, queries = int(step.seq_lens[row]), end - start
    blocks = step.block_table[row, : -(-length // BLOCK_SIZE)].long()
    group = step.q.shape[1] // step.k_pool.shape[2]
    k, v = (
        pool[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
        for pool in (step.k_pool, step.v_pool)
    )
    q = step.q[start:end].double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * step.scale
    place = torch.arange(length, device=q.device)
    position = place[length - queries :, None]
    hidden = place[None, :] > position
    if window is not None:
        hidden |= place[None, :] <= position - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    """True where each number is right by the tolerance; a NaN never is."""
    got, want = got.double().cpu(), want.double().cpu()
    return bool(((got - want).abs() <= tolerance * (1 + want.abs())).all())


def attention_right(
    device: torch.device, heads: Heads, dtype: torch.dtype, window: int | None = None
) -> bool:
    step = poisoned(device, heads, dtype)
    want = torch.cat([attended(step, row, window) for row in range(len(step.seq_lens))])
    out = torch.full_like(step.q, float("nan"))
    kernels.extend_attention(step.q, *step.paged, scale=step.scale, window=window, out=out)
    return near(out, want)


def options_right(device: torch.device, kv_dtype: torch.dtype) -> bool:
    """Compare pools of eight bits, sinks and a soft cap with the reference on the CPU."""
    step = new_step(device, *lengths(device), heads=SMALL)
    options: dict[str, Any] = quantised(step, kv_dtype)
    options |= {"sinks": torch.randn(SMALL.num_heads, device=device), "soft_cap": 20.0}
    got = kernels.decode_attention(step.q, *step.paged, scale=step.scale, **options)
    away = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    tensors = (tensor.cpu() for tensor in (step.q, *step.paged))
    want = kernels.extend_attention(*tensors, scale=step.scale, backend="torch", **away)
    return near(got, want)


def attention_families_equal(device: torch.device) -> bool:
    """The layouts of work and a decode step of each last query give the same bits."""
    step = poisoned(device)
    whole = kernels.extend_attention(step.q, *step.paged, scale=step.scale)
    longest = int(step.seq_lens.max())
    split = kernels.decode_attention(step.q, *step.paged, scale=step.scale, max_seq_len=longest)
    if not torch.equal(whole, split):
        return False
    ends = step.q_start[1:].long() - 1
    for row, end in enumerate(ends.tolist()):
        alone = kernels.decode_attention(
            step.q[end : end + 1],
            step.k_pool,
            step.v_pool,
            step.block_table[row : row + 1],
            step.seq_lens[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            scale=step.scale,
            max_seq_len=int(step.seq_lens[row]),
        )
        if not torch.equal(alone[0], whole[end]):
            return False
    return True


def linear_right(device: torch.device) -> bool:
    inner = 576
    x, weight = (torch.randn(n, inner, device=device, dtype=HALF) for n in (100, 96))
    want = x.double() @ weight.double().T
    return near(kernels.linear(x, weight), want, TOLERANCE * inner**0.5)


def linear_alone(device: torch.device) -> bool:
    """A row of a product has the same bits in any batch."""
    inner = 4096 if device.type == "cuda" else 192
    x, weight = (torch.randn(n, inner, device=device, dtype=HALF) for n in (300, 256))
    whole = kernels.linear(x, weight)
    cuts = ((0, 1), (299, 300), (17, 49), (100, 228))
    return all(torch.equal(kernels.linear(x[a:b], weight), whole[a:b]) for a, b in cuts)


def noise_is_the_same(device: torch.device) -> bool:
    """Noise has the bits that the CPU computes."""
    seeds, positions = torch.arange(5) * 10**12, torch.arange(5)
    here = kernels.uniform_noise(seeds.to(device), positions.to(device), 5000)
    return torch.equal(here.cpu(), kernels.uniform_noise(seeds, positions, 5000, backend="torch"))


def rows_right(device: torch.device) -> bool:
    """Norm and gated SiLU agree with float64."""
    x, weight = torch.randn(33, 1024, device=device, dtype=HALF), torch.randn(1024, device=device)
    wide, weight = x.double(), weight.to(HALF)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    gate, up = wide.chunk(2, -1)
    gated = kernels.silu_and_mul(x)
    return near(kernels.rms_norm(x, weight, eps=1e-5), want) and near(
        gated, gate * gate.sigmoid() * up
    )


def moves_right(device: torch.device) -> bool:
    """Turned and stored, copied and gathered, everything is where the CPU would have put it."""
    pools = torch.randn(2, 2, 6, BLOCK_SIZE, 2, 64, dtype=HALF)
    qkv = torch.randn(7, 12, 64, dtype=HALF)
    angles = torch.randn(7, 32)
    slots = torch.tensor([5, 17, -1, 40, 39, 0, 63])
    ids = [torch.tensor(values) for values in ([0, 2], [4, 5], [BLOCK_SIZE, 3])]

    def moved(place: torch.device, backend: str | None) -> list[torch.Tensor]:
        there = pools.to(place, copy=True)
        turned = kernels.rotary_store_kv(
            qkv.to(place),
            angles.cos().to(place),
            angles.sin().to(place),
            there[0, 0],
            there[1, 0],
            slots.to(place),
            backend=backend,
        )
        kernels.copy_blocks(*there, *(i.to(place) for i in ids), backend=backend)
        staging = torch.empty(2, 2, 2, BLOCK_SIZE, 2, 64, dtype=HALF, device=place)
        kernels.gather_blocks(*there, ids[1].to(place), staging, backend=backend)
        return [turned, there, staging]

    here, there = moved(device, None), moved(torch.device("cpu"), "torch")
    return all(near(a, b) for a, b in zip(here, there, strict=True))


def sample_right(device: torch.device) -> bool:
    """Draws are those of the CPU."""
    logits = torch.randn(6, 4000 if device.type == "cuda" else 200) * 3
    row = torch.arange(6)
    limits = {
        "temperature": torch.tensor([0.5, 1.0, 1.5, 1.0, 0.8, 2.0]),
        "top_k": torch.tensor([0, 50, 0, 3, 1, 100]),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1.0, 0.7, 0.95]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.05]),
        "seeds": row * 7,
        "positions": row,
    }
    here = kernels.sample(logits.to(device), **{n: v.to(device) for n, v in limits.items()})
    return torch.equal(here.cpu(), kernels.sample(logits, **limits, backend="torch"))


Question = Callable[[torch.device], bool]


def right_questions() -> dict[str, Question]:
    """Return what must hold before a time means anything."""
    half = torch.float16
    return {
        "attention is right, bfloat16, head dim 64": partial(
            attention_right, heads=SMALL, dtype=HALF
        ),
        "attention is right, bfloat16, head dim 128": partial(
            attention_right, heads=WIDE, dtype=HALF
        ),
        "attention is right, float16": partial(attention_right, heads=WIDE, dtype=half),
        "attention is right, float32": partial(attention_right, heads=SMALL, dtype=torch.float32),
        "attention is right in a window": partial(
            attention_right, heads=SMALL, dtype=HALF, window=40
        ),
        "attention is right over float8": partial(options_right, kv_dtype=torch.float8_e4m3fn),
        "attention is right over int8": partial(options_right, kv_dtype=torch.int8),
        "extend, decode and decode alone have equal bits": attention_families_equal,
        "the product is right": linear_right,
        "a row of the product has the same bits in any batch": linear_alone,
        "noise has the CPU's bits": noise_is_the_same,
        "norm and gated SiLU are right": rows_right,
        "turning, storing, copying and gathering are right": moves_right,
        "draws are the CPU's": sample_right,
    }
