"""Sampling in Triton: one program draws one row's token, with no sort.

What top-k and top-p keep is everything above a threshold, and of the tokens that equal it the
first few.  A threshold is a float32, seen as an integer in the same order, and is found four bits
at a time: each pass over the row tries 16 candidates at once.
"""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard
from kernels.noise import TO_UNIT
from kernels.variant import Variant

MAX_WIDTH: Final = 1024  # logits that a program takes at a time
NUM_WARPS: Final = 8


def noise_triton(seeds: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` as `uniform_noise` says, without waiting for the device."""
    num_rows, vocab_size = out.shape
    with device_guard(out.device):
        noise_kernel[(num_rows, triton.cdiv(vocab_size, MAX_WIDTH))](
            seeds,
            positions,
            out,
            vocab_size,
            *out.stride(),
            WIDTH=MAX_WIDTH,
            UNIT=TO_UNIT,
            enable_fp_fusion=True,
        )


def sample_triton(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Fill `out` as `sample` says, without waiting for the device."""
    num_rows, vocab_size = logits.shape
    with device_guard(logits.device):
        sample_kernel[(num_rows,)](
            logits,
            noise,
            seeds,
            positions,
            temperature,
            top_k,
            top_p,
            min_p,
            out,
            vocab_size,
            logits.stride(0),
            0 if noise is None else noise.stride(0),
            WIDTH=min(MAX_WIDTH, triton.next_power_of_2(vocab_size)),
            UNIT=TO_UNIT,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


@triton.jit
def uniform(seed, position, token, UNIT: tl.constexpr):
    """Return the numbers of `uniform_noise` for a block of tokens."""
    low = tl.zeros_like(token) + (position & 0xFFFFFFFF).to(tl.uint32)
    high = tl.zeros_like(token) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, token, low, high, tl.zeros_like(token))
    return (word >> 8).to(tl.float32) * UNIT


@triton.jit
def ordered(x):
    """Return integers in the order of the float32 numbers x, with the two zeros equal."""
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def noise_kernel(
    seeds,  # [R]
    positions,
    out,  # [R, V]
    vocab_size,
    out_by_row,  # strides, in elements
    out_by_token,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Write `WIDTH` numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    number = uniform(tl.load(seeds + row), tl.load(positions + row), token.to(tl.uint32), UNIT)
    at = out + row * out_by_row + token.to(tl.int64) * out_by_token
    tl.store(at, number, mask=token < vocab_size)


@triton.jit
def find_threshold(
    line,  # the row's logits
    vocab_size,
    heat,
    peak,
    enough,  # the count or the mass that those at or above the threshold must reach
    floor,  # only keys above it have mass
    floor_mass,  # mass of those at it that are kept
    MASS: tl.constexpr,  # weigh keys by their probability, or count them
    WIDTH: tl.constexpr,
):
    """Return the largest threshold that enough keys reach."""
    found = tl.full((), 0, tl.uint32)
    choice = tl.arange(0, 16).to(tl.uint32)
    shift = tl.full((), 32, tl.uint32)
    for _ in range(8):
        shift -= 4
        candidates = found | (choice << shift)
        reached = tl.full((16,), 0.0, tl.float32)
        for start in range(0, vocab_size, WIDTH):
            token = start + tl.arange(0, WIDTH)
            inside = token < vocab_size
            scaled = tl.load(line + token, mask=inside, other=float("-inf")) / heat
            key = ordered(scaled)
            if MASS:
                weight = tl.where(inside & (key > floor), tl.exp(scaled - peak), 0.0)
            else:
                weight = tl.where(inside, 1.0, 0.0)
            above = key[:, None] >= candidates[None, :]
            reached += tl.sum(tl.where(above, weight[:, None], 0.0), 0)
        if MASS:
            reached += tl.where(candidates <= floor, floor_mass, 0.0)
        fits = (reached >= enough) | (choice == 0)
        best = tl.max(tl.where(fits, tl.arange(0, 16), 0), 0).to(tl.uint32)
        found = found | (best << shift)
    return found


@triton.jit
def weigh_above(line, vocab_size, heat, peak, threshold, MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the mass, or the count, of the keys above a threshold."""
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab_size, WIDTH):
        token = start + tl.arange(0, WIDTH)
        inside = token < vocab_size
        scaled = tl.load(line + token, mask=inside, other=float("-inf")) / heat
        weight = tl.full((WIDTH,), 1.0, tl.float32)
        if MASS:
            weight = tl.exp(scaled - peak)
        total += tl.sum(tl.where(inside & (ordered(scaled) > threshold), weight, 0.0), 0)
    return total


@triton.jit(do_not_specialize=["vocab_size"])
def sample_kernel(
    logits,  # [R, V]
    noise,  # [R, V] or None
    seeds,  # [R] or None, where there is noise
    positions,
    temperature,  # [R]
    top_k,
    top_p,
    min_p,
    out,  # [R]
    vocab_size,
    logits_by_row,  # strides, in elements
    noise_by_row,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Draw one row's token."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * logits_by_row
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)

    peak = tl.full((), float("-inf"), tl.float32)
    for start in range(0, vocab_size, WIDTH):
        token = start + tl.arange(0, WIDTH)
        x = tl.load(line + token, mask=token < vocab_size, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(x / heat, 0))

    # of the keys equal to a threshold the first `room` are kept; without a filter all are
    k_key = tl.full((), 0, tl.uint32)
    k_room = tl.full((), 4e9, tl.float32)
    if (k > 0) & (k < vocab_size):
        enough = k.to(tl.float32)
        k_key = find_threshold(line, vocab_size, heat, peak, enough, k_key, 0.0, False, WIDTH)
        k_room = enough - weigh_above(line, vocab_size, heat, peak, k_key, False, WIDTH)
    p_key = tl.full((), 0, tl.uint32)
    mass_above = tl.full((), 0.0, tl.float32)
    enough_mass = tl.full((), 4e9, tl.float32)
    if p < 1:
        k_value = tl.where(k_key == 0, float("-inf"), value_of(k_key))
        k_mass = tl.exp(k_value - peak) * tl.where(k_key == 0, 0.0, k_room)
        total = weigh_above(line, vocab_size, heat, peak, k_key, True, WIDTH) + k_mass
        enough_mass = total * p
        p_key = find_threshold(
            line, vocab_size, heat, peak, enough_mass, k_key, k_mass, True, WIDTH
        )
        mass_above = weigh_above(
            line, vocab_size, heat, peak, tl.maximum(p_key, k_key), True, WIDTH
        )
        mass_above += tl.where(p_key < k_key, k_mass, 0.0)

    best = tl.full((), float("-inf"), tl.float32)
    chosen = tl.full((), 0, tl.int32)
    k_seen = tl.full((), 0, tl.int32)
    p_seen = tl.full((), 0, tl.int32)
    seed = tl.full((), 0, tl.int64)
    position = seed
    if noise is None:
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
    for start in range(0, vocab_size, WIDTH):
        token = start + tl.arange(0, WIDTH)
        inside = token < vocab_size
        scaled = tl.load(line + token, mask=inside, other=float("-inf")) / heat
        key = ordered(scaled)
        at_k = (inside & (key == k_key)).to(tl.int32)
        at_p = (inside & (key == p_key)).to(tl.int32)
        k_place = k_seen + tl.cumsum(at_k, 0) - at_k
        p_place = p_seen + tl.cumsum(at_p, 0) - at_p
        weight = tl.exp(scaled - peak)
        kept = (key > k_key) | ((at_k == 1) & (k_place.to(tl.float32) < k_room))
        before = mass_above + p_place.to(tl.float32) * weight
        kept = kept & ((key > p_key) | ((at_p == 1) & (before < enough_mass)))
        kept = kept & (weight >= least)
        if noise is None:
            number = uniform(seed, position, token.to(tl.uint32), UNIT)
        else:
            number = tl.load(noise + row * noise_by_row + token, mask=inside, other=0.5)
        gumbel = -tl.log(-tl.log(tl.maximum(number, 1e-20)))
        score = tl.where(inside & kept, scaled + gumbel, float("-inf"))
        top = tl.max(score, 0)
        here = tl.min(tl.where(score == top, token, vocab_size), 0)
        chosen = tl.where(top > best, here, chosen)
        best = tl.maximum(best, top)
        k_seen += tl.sum(at_k, 0)
        p_seen += tl.sum(at_p, 0)
    tl.store(out + row, chosen.to(tl.int64))


@triton.jit
def value_of(key):
    """Return the float32 whose place in the order is `key`."""
    bits = tl.where((key >> 31) == 1, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


def shipped() -> Iterator[Variant]:
    """Iterate over what launches choose for usual vocabularies."""
    rows = dict.fromkeys(("temperature", "top_p", "min_p"), "*fp32")
    ids = dict.fromkeys(("seeds", "positions", "top_k", "out"), "*i64")
    loose = frozenset({"vocab_size"})
    sizes = {"WIDTH": MAX_WIDTH, "UNIT": TO_UNIT}
    for noise in (None, "*fp32"):
        given = {"noise": "*fp32"} if noise else {}
        absent = {"seeds": None, "positions": None} if noise else {"noise": None}
        types = {"logits": "*fp32", **rows, **{n: t for n, t in ids.items() if n not in absent}}
        yield Variant(
            sample_kernel,
            "noise given" if noise else "noise of seed and position",
            {**types, **given},
            {**sizes, **absent},
            num_warps=NUM_WARPS,
            loose=loose,
        )
    yield Variant(
        noise_kernel,
        "noise",
        {"seeds": "*i64", "positions": "*i64", "out": "*fp32"},
        {**sizes, "out_by_token": 1},
        loose=loose,
    )
