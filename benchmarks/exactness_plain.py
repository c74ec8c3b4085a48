"""The same operations as a library would have them, where a row's bits may depend on its batch.

Owns: the fastest ways that torch offers on a CPU, and a model made of them.  Does not know: what is
compared, or timing.
Idea: the cost of exactness is the difference to the best of these, so none is spoilt: sequences are
of one length, so that all go through one batched call, and keys are gathered block by block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional

from kernels import PackedWeight, pack_weight
from runtime.models import attention, llama


class PlainPlan(NamedTuple):
    """What a step's layers share: sequences of one length with equally many new tokens.

    table  [B, M] int64 block ids
    mask   [new, length], 0 or -inf; None where nothing is hidden
    """

    table: torch.Tensor
    length: int
    new: int
    mask: torch.Tensor | None


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PlainPlan, float], torch.Tensor]


def plan_plain(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    **options: Any,
) -> PlainPlan:
    """Plan a step for `plain_attention`."""
    length, new = int(seq_lens[0]), int(q_start[1])
    mask = None
    if new > 1:
        hidden = torch.arange(length) > torch.arange(length - new, length)[:, None]
        mask = torch.zeros(new, length, dtype=k_pool.dtype).masked_fill_(hidden, -torch.inf)
    return PlainPlan(block_table.long(), length, new, mask)


def gathered(pool: torch.Tensor, plan: PlainPlan) -> torch.Tensor:
    """Copy keys or values out of their blocks: [B, Hkv, length, D]."""
    return pool[plan.table].flatten(1, 2)[:, : plan.length].transpose(1, 2)


def by_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlainPlan, scale: float
) -> torch.Tensor:
    """Attend with torch's fused attention: q [B, new, H, D], k and v [B, Hkv, length, D]."""
    whole = plan.new == plan.length
    result = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=None if whole else plan.mask,
        is_causal=whole and plan.new > 1,
        scale=scale,
        enable_gqa=True,
    )
    return result.transpose(1, 2)


def by_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlainPlan, scale: float
) -> torch.Tensor:
    """Attend with two batched products, the query heads of a key head packed together."""
    num, new, num_heads, dim = q.shape
    kv_heads = k.shape[1]
    packed = (q * scale).view(num, new, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
    group = packed.shape[2]
    scores = packed.reshape(num, kv_heads, group * new, dim) @ k.transpose(2, 3)
    if plan.mask is not None:
        scores.view(num, kv_heads, group, new, -1).add_(plan.mask)
    mixed = scores.softmax(-1) @ v
    return mixed.view(num, num_heads, new, dim).transpose(1, 2)


def by_wide_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlainPlan, scale: float
) -> torch.Tensor:
    """Attend with products in float32, as the runtime does, so that accuracy is the same."""
    mask = None if plan.mask is None else plan.mask.float()
    wide = plan._replace(mask=mask)
    return by_products(q.float(), k.float(), v.float(), wide, scale).to(q.dtype)


def plain_attention(attend: Attend) -> Callable[..., torch.Tensor]:
    """Return a stand-in for `extend_attention` that gathers and attends in this way."""

    def run(
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *tables: torch.Tensor,
        scale: float,
        plan: PlainPlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = q.reshape(-1, plan.new, *q.shape[1:])
        result = attend(rows, gathered(k_pool, plan), gathered(v_pool, plan), plan, scale)
        result = result.contiguous().view(q.shape)
        return result if out is None else out.copy_(result)

    return run


def unpadded(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    **layout: Any,
) -> torch.Tensor:
    """Multiply as the library does with the weight as it is, without a companion or padding."""
    if isinstance(weight, PackedWeight):
        weight = library_weight(weight)
    if isinstance(weight, PackedWeight):
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, weight.packed, bias, "none", [], ""
        )
        return result
    return functional.linear(x, weight, bias)


@functools.cache
def library_weight(weight: PackedWeight) -> torch.Tensor | PackedWeight:
    """Return a weight as the library packs it, once."""
    return weight if weight.backend == "torch" else pack_weight(weight.plain(), backend="torch")


def plain_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Normalise with torch's fused operation."""
    if residual is not None:
        x = residual.add_(x)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def plain_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate in the dtype of the input."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def plain_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn in the dtype of the input."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def plain_rotary_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Turn, and store every row."""
    kv_heads = k_pool.shape[2]
    turned = plain_rotary(qkv[:, :-kv_heads], cos, sin)
    k_pool.flatten(0, 1).index_copy_(0, slot_mapping, turned[:, -kv_heads:])
    v_pool.flatten(0, 1).index_copy_(0, slot_mapping, qkv[:, -kv_heads:])
    return turned[:, :-kv_heads]


def plain_sample(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Draw from the likeliest tokens with torch's own generator."""
    ordered, ids = (logits / temperature).sort(descending=True)
    shares = ordered.softmax(-1)
    shares[shares.cumsum(-1) - shares > top_p] = 0
    return ids.gather(-1, torch.multinomial(shares, 1))


@contextmanager
def plain_model(attend: Attend) -> Iterator[None]:
    """Let every model compute in the plain ways while this lasts."""
    ways = {
        "linear": unpadded,
        "rms_norm": plain_norm,
        "silu_and_mul": plain_silu,
        "rotary_store_kv": plain_rotary_store,
    }
    attending = {
        "choose_backend": lambda device: "torch",  # one way of attention for all rows
        "plan_extend": plan_plain,
        "extend_attention": plain_attention(attend),
    }
    apart = patch.object(attention.StepAttention, "plan", None)  # operation by operation
    with patch.multiple(llama, **ways), patch.multiple(attention, **attending), apart:
        yield
