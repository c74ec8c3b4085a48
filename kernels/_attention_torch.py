"""Attention with options in torch: the reference, and what a CPU runs where options are used.

Owns: windows, sinks, soft caps, trees, scales and the log-sum-exp.  Does not know: plans.
Idea: the definition, tile by tile.  Rows come in eights and key tiles at absolute positions, as in
_extend_torch.py and for the same reason: a row's bits are its own.  Nothing is shared between
sequences here, which makes it short, and slower than the plain path.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch

from kernels._attention_call import Call
from kernels._draft_path import on_path
from kernels._extend_cut import TILE, padded
from kernels._extend_plan import check_lengths

CHUNK: Final = 64  # queries computed together


def run_options(call: Call) -> None:
    """Fill `call.out`, and the log-sum-exp if asked for; waits for the device to read lengths."""
    lens, starts = call.seq_lens.tolist(), call.q_start.tolist()
    check_lengths(lens, starts, call.block_table.shape[1] * call.k_pool.shape[1])
    for sequence, (row, end_row) in enumerate(pairwise(starts)):
        for start in range(row, end_row, CHUNK):
            end = min(start + CHUNK, end_row)
            position = lens[sequence] - end_row
            _attend(call, sequence, (start, end), position, position + row)


def _attend(call: Call, sequence: int, rows: tuple[int, int], offset: int, first_new: int) -> None:
    """Compute neighbouring rows of one sequence; row r stands at position r + offset."""
    num_kv_heads, group, head_dim = call.heads
    start, end = rows
    options, device = call.options, call.q.device
    width = (end - start) * group
    queries = call.q.new_zeros(num_kv_heads, padded(width), head_dim, dtype=torch.float32)
    packed = call.q[start:end].view(end - start, num_kv_heads, group, head_dim).transpose(0, 1)
    queries[:, :width] = packed.reshape(num_kv_heads, width, head_dim)
    queries *= call.scale

    top = torch.full((*queries.shape[:2], 1), -math.inf, device=device)
    mass = torch.zeros_like(top)
    total = queries.new_zeros(*queries.shape[:2], call.v_pool.shape[3])
    lowest = 0
    seat, seen_bits = _places(call, rows, offset, first_new)
    if options.window is not None:
        lowest = max(int(seat.min()) - options.window + 1, 0)
    for first in range(lowest // TILE * TILE, end + offset, TILE):
        keys = (max(first, lowest), min(first + TILE, end + offset))
        k = _collect(call, sequence, call.k_pool, options.k_scale, keys, first)
        v = _collect(call, sequence, call.v_pool, options.v_scale, keys, first)
        scores = torch.bmm(queries, k.transpose(1, 2))
        if options.soft_cap is not None:
            scores = (scores / options.soft_cap).tanh() * options.soft_cap
        key = torch.arange(first, first + TILE, device=device)
        hidden = key > torch.arange(start + offset, end + offset, device=device)[:, None]
        if options.window is not None:
            hidden |= key <= seat[:, None] - options.window
        if seen_bits is not None:
            new = key - first_new
            bit = seen_bits[:, None] >> new.clamp(0, 63) & 1
            hidden |= (bit == 0) & (new >= 0) & (new < 64)
        scores[:, :width].masked_fill_(hidden.repeat_interleave(group, 0), -math.inf)
        peak = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = peak.masked_fill(peak == -math.inf, 0.0)
        weights, decay = (scores - base).exp(), (top - base).exp()
        mass = mass * decay + weights.sum(-1, keepdim=True)
        total = total * decay + torch.bmm(weights, v)
        top = peak
    _finish(call, rows, top[:, :width], mass[:, :width], total[:, :width])


def _collect(
    call: Call,
    sequence: int,
    pool: torch.Tensor,
    scale: torch.Tensor | None,
    keys: tuple[int, int],
    first: int,
) -> torch.Tensor:
    """Copy one tile as float32 [Hkv, TILE, D]; what no row sees stays zero and is not read."""
    low, high = keys
    block_size = pool.shape[1]
    position = torch.arange(low, high, device=pool.device)
    block = call.block_table[sequence, position // block_size].long()
    slot = position % block_size
    values = pool[block, slot].float()
    if scale is not None:
        values *= (scale if scale.dim() == 1 else scale[block, slot])[..., None]
    tile = values.new_zeros(values.shape[1], TILE, values.shape[2])
    tile[:, low - first : high - first] = values.transpose(0, 1)
    return tile


def _places(
    call: Call, rows: tuple[int, int], offset: int, first_new: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return where each row's window counts from, and the new tokens that a tree lets it see."""
    options, (start, end) = call.options, rows
    position = torch.arange(start + offset, end + offset, device=call.q.device)
    if options.tree_mask is None:
        return position, None
    tree_mask = options.tree_mask[start:end]
    if options.window is None:
        return position, tree_mask
    return on_path(tree_mask, position, torch.full_like(position, first_new), options.window)


def _finish(
    call: Call, rows: tuple[int, int], top: torch.Tensor, mass: torch.Tensor, total: torch.Tensor
) -> None:
    """Count the sinks, once a row; normalise; write."""
    start, end = rows
    num_kv_heads, group, _ = call.heads
    options = call.options
    if options.sinks is not None:
        sink = options.sinks.view(num_kv_heads, 1, group).expand(-1, end - start, -1)
        sink = sink.reshape(num_kv_heads, -1, 1)
        peak = torch.maximum(top, sink)
        decay = (top - peak).exp()
        mass, total, top = mass * decay + (sink - peak).exp(), total * decay, peak

    mass = mass.masked_fill(mass == 0.0, 1.0)  # a row that sees nothing: zeros, -inf

    def by_row(x: torch.Tensor) -> torch.Tensor:
        """Bring [Hkv, rows * group, x] into the order of q: [rows, H, x]."""
        return x.reshape(num_kv_heads, end - start, group, -1).transpose(0, 1).flatten(1, 2)

    call.out[start:end] = by_row(total / mass).to(call.out.dtype)
    if options.lse is not None:
        options.lse[start:end] = by_row(top + mass.log())[..., 0]
