"""The best public attention kernels, where a machine has them.

Owns: how each is called on our pools.  Does not know: cases, clocks.
Idea: none of them is needed, and most machines lack most of them; one that is absent says so in its
row.  Each answer is compared with ours before it is timed.  Written from their documentation; the
rows show which of them have run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Final, cast

import torch

import kernels
from benchmarks.gpu.freedom import require_close
from benchmarks.gpu.steps import BLOCK_SIZE, Call, Shapes, Step, new_step

WORKSPACE_BYTES: Final = 256 << 20


class Absent(Exception):
    """A library that this machine has not got."""


def public(module: str) -> Any:
    """Import a library's module.  Raises Absent where the machine lacks it."""
    name = module.partition(".")[0]
    if importlib.util.find_spec(name) is None:
        raise Absent(f"{name} is not installed")
    return importlib.import_module(module)


def flash_attn_decode(step: Step) -> Call:
    """FlashAttention 2, whose pages hold 256 keys at least, so ours are gathered into such."""
    attend = public("flash_attn").flash_attn_with_kvcache
    k, v = (pool.transpose(1, 2).contiguous() for pool in step.gathered())
    q = step.q[:, None]
    lens = step.seq_lens
    return lambda: attend(q, k, v, cache_seqlens=lens, softmax_scale=step.scale, causal=True)


def flash_attn_extend(step: Step) -> Call:
    attend = public("flash_attn").flash_attn_func
    num_sequences = len(step.seq_lens)
    q = step.q.view(num_sequences, -1, *step.q.shape[1:])
    k, v = (pool.transpose(1, 2).contiguous() for pool in step.gathered())
    return lambda: attend(q, k, v, softmax_scale=step.scale, causal=True)


def flashinfer(step: Step) -> Call:
    """FlashInfer over our pages; its plan is made before, as ours is."""
    library = public("flashinfer")
    num_blocks = (step.seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    starts = torch.nn.functional.pad(num_blocks.cumsum(0), (1, 0)).int()
    ids = torch.cat([row[:n] for row, n in zip(step.block_table, num_blocks.tolist(), strict=True)])
    last = (step.seq_lens - 1) % BLOCK_SIZE + 1
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=step.q.device)
    heads = (step.q.shape[1], step.k_pool.shape[2], step.q.shape[2], BLOCK_SIZE)
    dtypes = {"q_data_type": step.q.dtype, "kv_data_type": step.k_pool.dtype}
    if len(step.q) == len(step.seq_lens):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(starts, ids, last, *heads, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(step.q_start, starts, ids, last, *heads, causal=True, **dtypes)
    return lambda: wrapper.run(step.q, (step.k_pool, step.v_pool))


def vllm_flash(step: Step) -> Call:
    """The FlashAttention that vLLM builds, over our pages."""
    attend = public("vllm.vllm_flash_attn").flash_attn_varlen_func
    longest = {
        "max_seqlen_q": int(step.q_start.diff().max()),
        "max_seqlen_k": int(step.seq_lens.max()),
    }
    return lambda: attend(
        step.q,
        step.k_pool,
        step.v_pool,
        cu_seqlens_q=step.q_start,
        seqused_k=step.seq_lens,
        softmax_scale=step.scale,
        causal=True,
        block_table=step.block_table.clamp(min=0),
        **longest,
    )


def sglang_flash(step: Step) -> Call:
    """The FlashAttention 3 that SGLang builds, over our pages."""
    attend = public("sgl_kernel.flash_attn").flash_attn_with_kvcache
    longest = int(step.q_start.diff().max())
    table = step.block_table.clamp(min=0)
    return lambda: attend(
        step.q,
        step.k_pool,
        step.v_pool,
        cache_seqlens=step.seq_lens,
        page_table=table,
        cu_seqlens_q=step.q_start,
        max_seqlen_q=longest,
        softmax_scale=step.scale,
        causal=True,
    )


def _decode(adapt: Callable[[Step], Call]) -> Callable[..., list[Call]]:
    def build(device: torch.device, shapes: Shapes, sizes: tuple[int, int]) -> list[Call]:
        batch, seq_len = sizes
        return _checked(adapt, new_step(device, [1] * batch, [seq_len] * batch, heads=shapes.heads))

    return build


def _extend(adapt: Callable[[Step], Call]) -> Callable[..., list[Call]]:
    def build(device: torch.device, shapes: Shapes, new: list[int], prefix: int) -> list[Call]:
        lens = [prefix + n for n in new]
        return _checked(adapt, new_step(device, new, lens, heads=shapes.heads))

    return build


def _checked(adapt: Callable[[Step], Call], step: Step) -> list[Call]:
    call = adapt(step)
    got = cast(torch.Tensor, call())
    want = kernels.extend_attention(step.q, *step.paged, scale=step.scale)
    require_close(got.reshape(want.shape), want)
    return [call]


DECODE: Final[dict[str, Callable[..., list[Call]]]] = {
    "flash_attn": _decode(flash_attn_decode),
    "flashinfer": _decode(flashinfer),
    "vllm": _decode(vllm_flash),
    "sgl_kernel": _decode(sglang_flash),
}
EXTEND: Final[dict[str, Callable[..., list[Call]]]] = {
    "flash_attn": _extend(flash_attn_extend),
    "flashinfer": _extend(flashinfer),
    "vllm": _extend(vllm_flash),
    "sgl_kernel": _extend(sglang_flash),
}
