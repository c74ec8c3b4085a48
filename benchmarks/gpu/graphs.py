"""The ops in a CUDA graph: captured once, replayed over other lengths, the same bits as launched.

Owns: the questions about capture.  Does not know: clocks.
Idea: the index tensors of a captured step are refilled before each replay, and what a replay writes
is compared with a call made in the usual way on the same tensors.  Where there is no GPU a capture
is remembered and made again, which tests all but the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

import kernels
from benchmarks.gpu.clock import captured
from benchmarks.gpu.steps import HALF, Step, new_step
from kernels.roofline import Heads

LONGEST: Final = 1100
ROUNDS: Final = ((700, 1, 1024, 33), (1100, 513, 512, 20), (64, 65, 1000, 1))
"""Lengths of the sequences of a step, captured with the first and replayed with each."""

CUTS: Final = ((5, 1, 20, 6), (1, 1, 1, 20), (32, 0, 0, 0))
"""Queries of each sequence in a step of 32 rows; rows too many belong to no sequence."""


def heads_of(device: torch.device) -> Heads:
    """Return the heads of a step: few where a kernel is interpreted."""
    return Heads(8, 2, 128) if device.type == "cuda" else Heads(2, 1, 16)


def replayed(call: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], object]:
    """Return the replay of a captured call; off a GPU, the call."""
    call()
    if device.type != "cuda":
        return call
    torch.cuda.synchronize()
    return captured(call)


def step_of(device: torch.device, num_rows: int) -> Step:
    """Make a step with room for the longest sequences, whose lengths are refilled."""
    num_sequences, heads = len(ROUNDS[0]), heads_of(device)
    step = new_step(device, [1] * num_sequences, [LONGEST] * num_sequences, heads=heads)
    step.q = torch.randn(num_rows, heads.num_heads, heads.head_dim, device=device, dtype=HALF)
    return step


def refill(step: Step, lens: tuple[int, ...], cuts: tuple[int, ...]) -> int:
    """Write a round's lengths into the step's own tensors; return the rows that are in use."""
    new = torch.tensor([min(n, length) for n, length in zip(cuts, lens, strict=True)])
    step.seq_lens.copy_(torch.tensor(lens))
    step.q_start[1:].copy_(new.cumsum(0))
    return int(new.sum())


def attention_replays(device: torch.device, op: str) -> bool:
    """Plan and attention are captured together; lengths and cuts change between replays."""
    decode = op != "extend"
    step = step_of(device, len(ROUNDS[0]) if decode else 32)
    one_each = (1,) * len(ROUNDS[0])
    cuts = (one_each,) * len(ROUNDS) if decode else CUTS
    out = torch.empty_like(step.q)
    scratch = kernels.Scratch(device)
    prefixes = kernels.SharedPrefixes.of([([0, 2], 512)], device)

    def attend(scratch: kernels.Scratch, out: torch.Tensor | None) -> torch.Tensor:
        room = {"max_seq_len": LONGEST, "scratch": scratch}
        call = partial(
            {
                "extend": kernels.extend_attention,
                "decode": partial(kernels.decode_attention, **room),
                "cascade": partial(kernels.shared_prefix_attention, prefixes=prefixes, **room),
            }[op],
            scale=step.scale,
            out=out,
        )
        return call(step.q, *step.paged)

    if op == "cascade":
        step.block_table[2, : 512 // step.k_pool.shape[1]] = step.block_table[
            0, : 512 // step.k_pool.shape[1]
        ]
    refill(step, ROUNDS[0], cuts[0])
    replay = replayed(partial(attend, scratch, out), device)
    for lens, cut in zip(ROUNDS, cuts, strict=False):
        used = refill(step, lens, cut)
        if op == "cascade":
            prefixes.lens.fill_(512 if min(lens[0], lens[2]) >= 512 else 0)
        out.fill_(float("nan"))
        replay()
        if not torch.equal(out[:used], attend(kernels.Scratch(device), None)[:used]):
            return False
    return True


def layer_replays(device: torch.device) -> bool:
    """Norm, product, turning and storing, gated SiLU and a draw are captured as one."""
    rows, hidden = 5, 256 if device.type == "cuda" else 64
    x = torch.randn(rows, hidden, device=device, dtype=HALF)
    norm = torch.ones(hidden, device=device, dtype=HALF)
    weight = torch.randn(12 * 64, hidden, device=device, dtype=HALF)
    wide = torch.randn(2 * hidden, hidden, device=device, dtype=HALF)
    pools = torch.zeros(2, 4, 16, 2, 64, device=device, dtype=HALF)
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    cos, sin = torch.randn(2, rows, 32, device=device)
    seeds = torch.zeros(rows, dtype=torch.int64, device=device)
    ones = torch.ones(rows, device=device)
    limits = {"temperature": ones, "top_k": seeds + 20, "top_p": ones * 0.9, "min_p": ones * 0}

    def layer() -> list[torch.Tensor]:
        normed = kernels.rms_norm(x, norm, eps=1e-5)
        qkv = kernels.linear(normed, weight).view(rows, 12, 64)
        q = kernels.rotary_store_kv(qkv, cos, sin, *pools, slots)
        gated = kernels.silu_and_mul(kernels.linear(normed, wide))
        drawn = kernels.sample(gated.float(), seeds=seeds, positions=slots, **limits)
        return [q, gated, drawn, pools]

    kept = [torch.empty_like(part) for part in layer()]

    def call() -> torch.Tensor:
        for place, part in zip(kept, layer(), strict=True):
            place.copy_(part)
        return kept[0]

    replay = replayed(call, device)
    for turn in range(3):
        x.copy_(torch.randn(rows, hidden))
        slots.copy_(torch.randperm(64)[:rows])
        seeds.fill_(turn)
        pools.zero_()
        replay()
        here = [part.clone() for part in kept]
        pools.zero_()
        if not all(torch.equal(a, b) for a, b in zip(here, layer(), strict=True)):
            return False
    return True


def graph_questions() -> dict[str, Callable[[torch.device], bool]]:
    """Return what must hold of captured steps."""
    return {
        **{
            f"{op} captured with its plan, replayed with other lengths, has equal bits": partial(
                attention_replays, op=op
            )
            for op in ("extend", "decode", "cascade")
        },
        "the rest of a layer and a draw, captured, have equal bits": layer_replays,
    }
