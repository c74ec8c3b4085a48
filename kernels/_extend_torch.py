"""Extend attention in torch: the production path on CPU.

Owns: the arithmetic of a planned step.  Does not know: how the step was cut, see _extend_cut.
Idea: every product has the same inner sizes whatever the batch and its rows come in eights, where
the CPU's matrix product gives a row the same bits in any company; tiles then fold in ascending
order.  docs/kernels.md has the argument, tests/kernels the check.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels._extend_cut import TILE, padded
from kernels._extend_plan import Gather, Product, TorchPlan, pool_rows


class _Tiles(NamedTuple):
    """Attention within single tiles, [items, Hkv, rows, .]: not yet joined."""

    parts: torch.Tensor  # normalised within the tile
    top: torch.Tensor  # the largest score
    mass: torch.Tensor  # the sum of exp(score - top)


def run_torch(
    plan: TorchPlan,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fill `out` as `extend_attention` says; without v_pool, values are the front of the keys."""
    for gather in plan.gathers:
        k = _collect(plan, gather, "k", k_pool)
        v = k[..., : out.shape[2]] if v_pool is None else _collect(plan, gather, "v", v_pool)
        for product in gather.products:
            tiles = product.num_gathered
            _attend(plan, product, q, k[:tiles], v[:tiles], scale, out)


def _collect(plan: TorchPlan, gather: Gather, name: str, pool: torch.Tensor) -> torch.Tensor:
    """Copy the gathered keys or values, as float32 [tiles, Hkv, TILE, D]."""
    rows, _ = pool_rows(pool)
    heads = plan.heads
    target = plan.scratch.take(name, gather.index.shape[0], heads.dim)
    if pool.dtype == target.dtype:
        torch.index_select(rows, 0, gather.index, out=target)
    else:
        target.copy_(rows.index_select(0, gather.index))
    return target.view(gather.num_tiles, heads.num_kv, TILE, heads.dim)


def _attend(
    plan: TorchPlan,
    product: Product,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    group = plan.heads.group
    n, count, shared = product.num_chunks, product.num_queries, product.num_shared
    packed = _pack(plan, product, q, scale)
    rows = plan.scratch.take("rows", product.owner.shape[0] - n * shared, *packed.shape[1:])
    torch.index_select(packed, 0, product.owner[n * shared :], out=rows)
    tiles = _tiles(plan, "own", rows, k[shared:], v[shared:], product)
    if shared:
        tiles = _with_shared(plan, product, packed, k[:shared], v[:shared], tiles)
    folded = _fold(product, tiles)[:, :, : count * group]
    folded = (
        torch.unflatten(folded, 2, (count, group))
        .transpose(1, 2)
        .reshape(n * count, *out.shape[1:])
    )
    out.index_copy_(0, product.rows, folded.to(out.dtype))


def _pack(plan: TorchPlan, product: Product, q: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled float32 queries by key head: [chunks, Hkv, rows, D], rows past the queries zero."""
    num_kv_heads, group, head_dim = plan.heads
    n, count = product.num_chunks, product.num_queries
    packed = plan.scratch.take("packed", n, num_kv_heads, padded(count * group), head_dim)
    packed[:, :, count * group :].zero_()
    queries = q.index_select(0, product.rows).view(n, count, num_kv_heads, group, head_dim)
    apart = torch.unflatten(packed[:, :, : count * group], 2, (count, group))
    apart.copy_(queries.transpose(1, 2))
    return packed.mul_(scale)


def _tiles(
    plan: TorchPlan,
    name: str,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masked: Product | None,
) -> _Tiles:
    """Attend within each tile alone: rows [items, Hkv, R, D] to k, v [items, Hkv, TILE, .]."""
    num_items, num_kv_heads, num_rows, head_dim = rows.shape
    batch = num_items * num_kv_heads
    scores = plan.scratch.take("scores", batch, num_rows, TILE)
    keys = k.view(batch, TILE, head_dim).transpose(1, 2)
    torch.bmm(rows.reshape(batch, num_rows, head_dim), keys, out=scores)
    if masked is not None:
        n, count, group = masked.num_chunks, masked.num_queries, plan.heads.group
        seen = scores.view(num_items, num_kv_heads, num_rows, TILE)[:, :, : count * group]
        mask = masked.mask[:, None, :, None].expand(n, num_kv_heads, count, group, TILE)
        seen = torch.unflatten(seen, 2, (count, group))
        if n == 1:  # its last tile is the last item; adding by index takes a fifth of a prefill
            seen[-1].add_(mask[0])
        else:
            seen.index_add_(0, masked.last, mask)
    top = scores.amax(-1, keepdim=True)
    torch.softmax(scores, -1, out=scores)  # in place: a row is read before it is written
    # the largest weight of a tile is exp(0) over the sum, so its inverse is the sum
    mass = scores.amax(-1, keepdim=True).reciprocal_()
    parts = plan.scratch.take(name, batch, num_rows, v.shape[-1])
    torch.bmm(scores, v.flatten(0, 1), out=parts)
    shape = (num_items, num_kv_heads, num_rows, -1)
    return _Tiles(parts.view(shape), top.view(shape), mass.view(shape))


def _with_shared(
    plan: TorchPlan,
    product: Product,
    packed: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: _Tiles,
) -> _Tiles:
    """Attend from the rows of all chunks at once to the shared tiles; put them before `own`."""
    num_kv_heads, group, head_dim = plan.heads
    n, width = product.num_chunks, product.num_queries * group
    joined = plan.scratch.take("joined", num_kv_heads, padded(n * width), head_dim)
    joined[:, n * width :].zero_()
    apart = torch.unflatten(joined[:, : n * width], 1, (n, width))
    apart.copy_(packed[:, :, :width].transpose(0, 1))
    shared = _tiles(plan, "shared", joined.expand(k.shape[0], *joined.shape), k, v, None)
    merged = []
    for name, head, tail in zip(_Tiles._fields, shared, own, strict=True):
        target = plan.scratch.take(f"all {name}", product.owner.shape[0], *tail.shape[1:])
        apart = torch.unflatten(head[:, :, : n * width], 2, (n, width)).transpose(1, 2)
        torch.unflatten(target[: -tail.shape[0], :, :width], 0, (-1, n)).copy_(apart)
        target[-tail.shape[0] :].copy_(tail)
        merged.append(target)
    return _Tiles(*merged)


def _fold(product: Product, tiles: _Tiles) -> torch.Tensor:
    """Join the tiles of each chunk in ascending order; overwrites them."""
    steps = list(product.steps)
    parts, top, mass = tiles
    peak = top[: steps[0]].clone()
    for n, later in zip(steps[1:], torch.split(top, steps)[1:], strict=True):
        torch.maximum(peak[:n], later, out=peak[:n])
    mass.mul_(top.sub_(peak.index_select(0, product.owner)).exp_())
    parts.mul_(mass)
    result, norm = parts[: steps[0]], mass[: steps[0]]
    # mul_ and add_ apart: a fused multiply-add would round by where a vector register ends
    for n, part, share in zip(
        steps[1:], torch.split(parts, steps)[1:], torch.split(mass, steps)[1:], strict=True
    ):
        result[:n].add_(part)
        norm[:n].add_(share)
    return result.div_(norm)
