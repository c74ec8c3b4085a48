"""The same kernels with sizes chosen freely: what exactness costs.

Owns: the grids of sizes.  Does not know: clocks.
Idea: an exact kernel has one tile and one split for every batch.  Here the sizes may follow the
shape: splits by batch or none at all, any tile.  The best of a grid is what a kernel that need not
be exact would take; ours over that is the price.
"""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import torch

import kernels
from benchmarks.gpu.steps import HALF, Call, Shapes, Step, new_step
from kernels._attention_call import Options, check_call
from kernels._attention_work import Tiling, WorkPlan, decode_work, extend_work


class Choice(NamedTuple):
    """Sizes of the attention kernel; `split` is in keys."""

    rows: int
    keys: int
    split: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        split = "no splits" if self.split == WHOLE else f"splits of {self.split}"
        return f"{self.rows} x {self.keys}, {split}, {self.num_warps} warps, {self.num_stages} deep"


class LinearChoice(NamedTuple):
    """Sizes of the product kernel."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        size = f"{self.rows} x {self.cols} x {self.inner}"
        return f"{size}, {self.num_warps} warps, {self.num_stages} deep"


WHOLE: Final = 1 << 20  # longer than any sequence

DECODE: Final = (
    Choice(64, 64, 256, 4, 3),
    Choice(64, 64, 1024, 4, 3),
    Choice(64, 64, 2048, 4, 3),
    Choice(64, 64, 4096, 4, 3),
    Choice(64, 128, 1024, 4, 2),
    Choice(64, 64, 1024, 4, 4),
    Choice(16, 64, 512, 4, 3),
    Choice(16, 64, 1024, 4, 4),
    Choice(16, 128, 1024, 4, 3),
    Choice(16, 128, 2048, 8, 3),
)
CASCADE: Final = (
    Choice(64, 64, 256, 4, 3),
    Choice(64, 64, 1024, 4, 3),
    Choice(64, 128, 512, 4, 2),
    Choice(128, 64, 512, 8, 3),
    Choice(16, 64, 512, 4, 3),
)
EXTEND: Final = (
    Choice(128, 64, WHOLE, 8, 3),
    Choice(128, 64, WHOLE, 8, 2),
    Choice(128, 128, WHOLE, 8, 2),
    Choice(64, 64, WHOLE, 4, 3),
    Choice(64, 128, WHOLE, 4, 2),
    Choice(128, 32, WHOLE, 8, 4),
)
LINEAR: Final = {
    1: (
        LinearChoice(16, 32, 256, 4, 4),
        LinearChoice(16, 64, 128, 4, 4),
        LinearChoice(16, 128, 128, 4, 3),
        LinearChoice(64, 32, 128, 4, 4),
    ),
    64: (
        LinearChoice(64, 32, 128, 4, 4),
        LinearChoice(64, 64, 128, 4, 4),
        LinearChoice(64, 64, 64, 4, 4),
        LinearChoice(64, 128, 64, 4, 4),
    ),
    8192: (
        LinearChoice(128, 128, 64, 4, 3),
        LinearChoice(128, 128, 64, 8, 4),
        LinearChoice(128, 256, 64, 8, 3),
        LinearChoice(64, 256, 64, 4, 3),
    ),
}


def decode_calls(
    device: torch.device, shapes: Shapes, sizes: tuple[int, int], choice: Choice
) -> list[Call]:
    batch, seq_len = sizes
    step = new_step(device, [1] * batch, [seq_len] * batch, heads=shapes.heads)
    work = decode_work(
        step.seq_lens,
        step.q_start,
        num_tokens=batch,
        max_seq_len=seq_len,
        tiling=_tiling(shapes, choice),
        scratch=kernels.Scratch(device),
    )
    return [attention_call(step, work, choice)]


def extend_calls(
    device: torch.device, shapes: Shapes, new: list[int], prefix: int, choice: Choice
) -> list[Call]:
    step = new_step(device, new, [prefix + n for n in new], heads=shapes.heads)
    work = extend_work(
        step.seq_lens,
        step.q_start,
        num_tokens=sum(new),
        tiling=_tiling(shapes, choice),
        scratch=kernels.Scratch(device),
    )
    return [attention_call(step, work, choice)]


def cascade_calls(
    device: torch.device, shapes: Shapes, batch: int, prefix: int, own: int, choice: Choice
) -> list[Call]:
    step = new_step(device, [1] * batch, [prefix + own] * batch, heads=shapes.heads, shared=prefix)
    work = decode_work(
        step.seq_lens,
        step.q_start,
        kernels.SharedPrefixes.of([(list(range(batch)), prefix)], device),
        num_tokens=batch,
        max_seq_len=prefix + own,
        tiling=_tiling(shapes, choice),
        scratch=kernels.Scratch(device),
    )
    return [attention_call(step, work, choice)]


def attention_call(step: Step, work: WorkPlan, choice: Choice) -> Call:
    """Return a launch of the attention kernel with sizes of its own; its answer is checked."""
    from kernels._attention_triton import Sizes, run_triton  # optional: not on every platform

    call = check_call(step.q, *step.paged, scale=step.scale, out=None, options=Options())
    launch = partial(run_triton, call, work, Sizes(*choice))
    launch()
    require_close(call.out, kernels.extend_attention(step.q, *step.paged, scale=step.scale))
    return launch


def linear_calls(
    device: torch.device, shapes: Shapes, num_rows: int, choice: LinearChoice
) -> list[Call]:
    from kernels._linear_triton import Sizes, linear_triton  # optional: not on every platform

    x, weight = (
        torch.randn(n, shapes.hidden, device=device, dtype=HALF) for n in (num_rows, shapes.hidden)
    )
    out = torch.empty(num_rows, shapes.hidden, device=device, dtype=HALF)
    launch = partial(linear_triton, x, weight, None, out, Sizes(*choice))
    launch()
    require_close(out, kernels.linear(x, weight), scale=shapes.hidden**0.5)
    return [launch]


def require_close(got: torch.Tensor, want: torch.Tensor, *, scale: float = 1.0) -> None:
    """Raise AssertionError where a variant's answer isn't ours: its time would mean nothing."""
    apart = float((got.float() - want.float()).abs().max())
    if not apart <= 2e-2 * scale:
        raise AssertionError(f"its answer is {apart:.3g} from ours")


def _tiling(shapes: Shapes, choice: Choice) -> Tiling:
    group = shapes.heads.num_heads // shapes.heads.num_kv_heads
    return Tiling(choice.rows // group, choice.split)
