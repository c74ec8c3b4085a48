"""Attention over latents on a GPU: DeepSeek's shape, decode and extend.

Owns: our calls, the cases, and the questions about them.  Does not know: clocks.
Idea: a latent is read once for all the heads, so decode is nearer to the arithmetic's ceiling than
to memory's: its goal is in bytes a second all the same, as public figures are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

import kernels
from benchmarks.gpu.case import OURS, Case, Goal
from benchmarks.gpu.checks import near
from benchmarks.gpu.steps import BLOCK_SIZE, FULL, HALF, TINY, Call, Shapes
from kernels.roofline import Work, mla_work

LATENT, ROPE, HEADS = 512, 64, 128
SCALE: Final = 192**-0.5
DECODES: Final = ((32, 4096), (128, 1024), (1, 32768))


def sizes_of(shapes: Shapes) -> tuple[int, int, int]:
    """Return heads, latent and rotary sizes: few where a kernel is interpreted."""
    return (16, 32, 16) if shapes is TINY else (HEADS, LATENT, ROPE)


def latent_work(new: list[int], lens: list[int], shapes: Shapes) -> Work:
    """Count the least work of a step."""
    heads, latent, rope = sizes_of(shapes)
    return mla_work(new, lens, heads, latent_dim=latent, rope_dim=rope)


def latent_step(
    device: torch.device, shapes: Shapes, new: list[int], lens: list[int]
) -> tuple[torch.Tensor, ...]:
    """Make queries, and latents in scattered blocks: the tensors that `mla_attention` takes."""
    heads, latent, rope = sizes_of(shapes)
    counts = [-(-n // BLOCK_SIZE) for n in lens]
    ids = torch.randperm(sum(counts), dtype=torch.int32)
    table = torch.full((len(lens), max(counts)), -1, dtype=torch.int32)
    for row, (count, part) in enumerate(zip(counts, ids.split(counts), strict=True)):
        table[row, :count] = part
    pool = torch.randn(len(ids), BLOCK_SIZE, 1, latent + rope, device=device, dtype=HALF)
    q_latent, q_rope = (
        torch.randn(sum(new), heads, size, device=device, dtype=HALF) for size in (latent, rope)
    )
    starts = torch.tensor([0, *new]).cumsum(0).int()
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return q_latent, q_rope, pool, table.to(device), seq_lens.to(device), starts.to(device)


def latent_calls(
    device: torch.device, shapes: Shapes, new: list[int], lens: list[int]
) -> list[Call]:
    """Return calls over a planned step."""
    q_latent, q_rope, *paged = latent_step(device, shapes, new, lens)
    scratch = kernels.Scratch(device)
    plan = kernels.plan_mla(
        *paged,
        num_heads=q_latent.shape[1],
        num_tokens=sum(new),
        max_seq_len=max(lens),
        dtype=HALF,
        scratch=scratch,
    )
    attend = partial(kernels.mla_attention, q_latent, q_rope, *paged, scale=SCALE, plan=plan)
    return [partial(attend, max_seq_len=max(lens), scratch=scratch, out=q_latent.clone())]


def latent_cases(shapes: Shapes) -> Iterator[Case]:
    """Iterate over the cases of attention over latents."""
    for many, length in DECODES:
        batch, seq_len = shapes.batch(many), shapes.keys(length)
        new, lens = [1] * batch, [seq_len] * batch
        yield Case(
            f"latents {many} x {length // 1024}k",
            OURS,
            "ours",
            latent_work(new, lens, shapes),
            partial(latent_calls, shapes=shapes, new=new, lens=lens),
            (Goal("TB/s", 1.8),) if (many, length) == DECODES[0] else (),
            eager=True,
        )
    prompt = shapes.rows(2048)
    yield Case(
        "latents, extend 2k",
        OURS,
        "ours",
        latent_work([prompt], [prompt], shapes),
        partial(latent_calls, shapes=shapes, new=[prompt], lens=[prompt]),
    )


def latents_right(device: torch.device) -> bool:
    """Compare a ragged step with what torch computes of the same numbers on the CPU."""
    shapes = FULL if device.type == "cuda" else TINY
    step = latent_step(device, shapes, [5, 1, 40], [70, 1, 1200 if shapes is FULL else 45])
    got = kernels.mla_attention(*step, scale=SCALE)
    want = kernels.mla_attention(*(t.cpu() for t in step), scale=SCALE, backend="torch")
    return near(got, want)


def latents_equal(device: torch.device) -> bool:
    """The last row of each sequence has the same bits alone as at the end of its prompt."""
    shapes = FULL if device.type == "cuda" else TINY
    new = [33, 1, 1100 if shapes is FULL else 40]
    q_latent, q_rope, pool, table, lens, starts = latent_step(device, shapes, new, new)
    whole = kernels.mla_attention(q_latent, q_rope, pool, table, lens, starts, scale=SCALE)
    ends = starts[1:].long() - 1
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for row, end in enumerate(ends.tolist()):
        last = slice(end, end + 1)
        paged = (pool, table[row : row + 1], lens[row : row + 1], one)
        alone = kernels.mla_attention(q_latent[last], q_rope[last], *paged, scale=SCALE)
        if not torch.equal(alone[0], whole[end]):
            return False
    every = torch.arange(4, dtype=torch.int32, device=device)[: len(ends) + 1]
    together = kernels.mla_attention(
        q_latent[ends], q_rope[ends], pool, table, lens, every, scale=SCALE
    )
    return torch.equal(together, whole[ends])


def latent_questions() -> dict[str, Callable[[torch.device], bool]]:
    """Return what must hold of attention over latents."""
    return {
        "attention over latents is right": latents_right,
        "attention over latents: prompt, decode and decode alone have equal bits": latents_equal,
    }
