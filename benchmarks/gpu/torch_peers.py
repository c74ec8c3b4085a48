"""Torch's own attention and product, as peers.

Owns: how they are called on the same tensors.  Does not know: cases, clocks.
Idea: torch knows no pages, so K and V are gathered for it: before the clock starts, which flatters
it, or within, which is what an engine on it would pay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import kernels
from benchmarks.gpu.freedom import require_close
from benchmarks.gpu.steps import HALF, Call, Shapes, Step, new_step

FLASH: Final = "sdpa flash"
CUDNN: Final = "sdpa cudnn"


def decode_step(device: torch.device, shapes: Shapes, sizes: tuple[int, int]) -> Step:
    """Make the step of one decode subject."""
    batch, seq_len = sizes
    return new_step(device, [1] * batch, [seq_len] * batch, heads=shapes.heads)


def sdpa_decode(
    device: torch.device, shapes: Shapes, sizes: tuple[int, int], *, gathering: bool
) -> list[Call]:
    step = decode_step(device, shapes, sizes)
    before = None if gathering else tuple(t.contiguous() for t in step.gathered())
    longest = sizes[1]
    blocks = step.block_table.long()

    def call() -> torch.Tensor:
        if before is None:
            k, v = (
                pool[blocks].flatten(1, 2)[:, :longest].transpose(1, 2)
                for pool in (step.k_pool, step.v_pool)
            )
        else:
            k, v = before
        q = step.q[:, :, None]
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return [checked(call, step)]


def flex_decode(device: torch.device, shapes: Shapes, sizes: tuple[int, int]) -> list[Call]:
    step = decode_step(device, shapes, sizes)
    k, v = (t.contiguous() for t in step.gathered())
    attend = compiled(device)
    return [checked(lambda: attend(step.q[:, :, None], k, v, enable_gqa=True), step)]


def sdpa_extend(
    device: torch.device, shapes: Shapes, new: list[int], prefix: int, *, cudnn: bool = False
) -> list[Call]:
    """Fused attention on contiguous keys that nobody had to gather."""
    step, q, k, v = contiguous(device, shapes, new, prefix)
    wanted = SDPBackend.CUDNN_ATTENTION if cudnn else SDPBackend.FLASH_ATTENTION
    backend = wanted if device.type == "cuda" else SDPBackend.MATH
    masked: dict[str, Any] = {"is_causal": True}
    if prefix:
        from torch.nn.attention.bias import causal_lower_right  # loads a compiler, which takes long

        masked = {"attn_mask": causal_lower_right(new[0], prefix + new[0])}

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **masked)

    return [checked(call, step)]


def flex_extend(device: torch.device, shapes: Shapes, new: list[int], prefix: int) -> list[Call]:
    step, q, k, v = contiguous(device, shapes, new, prefix)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query + prefix >= key

    mask = create_block_mask(sees, None, None, new[0], prefix + new[0], device=device)
    attend = compiled(device)
    return [checked(lambda: attend(q, k, v, block_mask=mask, enable_gqa=True), step)]


def contiguous(
    device: torch.device, shapes: Shapes, new: list[int], prefix: int
) -> tuple[Step, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make a step of sequences of one length, and its q, k, v as torch wants them."""
    step = new_step(device, new, [prefix + n for n in new], heads=shapes.heads)
    q = step.q.view(len(new), new[0], *step.q.shape[1:]).transpose(1, 2).contiguous()
    k, v = (t.contiguous() for t in step.gathered())
    return step, q, k, v


def compiled(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return FlexAttention, compiled where there is a GPU."""
    if device.type != "cuda":
        return flex_attention
    torch.compiler.reset()  # each subject has a shape of its own, and recompiling is limited
    attend: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return attend


def checked(call: Callable[[], torch.Tensor], step: Step) -> Call:
    """Return a peer's call, once its answer agrees with ours; [S, H, n, D] comes out of it."""
    got = call().transpose(1, 2).reshape(step.q.shape)
    require_close(got, kernels.extend_attention(step.q, *step.paged, scale=step.scale))
    return call


def matmul_calls(device: torch.device, shapes: Shapes, num_rows: int) -> list[Call]:
    """The library's product, which is not row-invariant."""
    x, weight = (
        torch.randn(n, shapes.hidden, device=device, dtype=HALF) for n in (num_rows, shapes.hidden)
    )
    return [partial(functional.linear, x, weight)]


DECODE: Final[dict[str, Callable[..., list[Call]]]] = {
    "sdpa, gathering": partial(sdpa_decode, gathering=True),
    "sdpa, gathered before": partial(sdpa_decode, gathering=False),
    "flex, gathered before": flex_decode,
}
EXTEND: Final[dict[str, Callable[..., list[Call]]]] = {
    FLASH: sdpa_extend,
    CUDNN: partial(sdpa_extend, cudnn=True),
    "flex": flex_extend,
}
