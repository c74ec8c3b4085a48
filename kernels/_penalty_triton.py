"""Penalties and masks in Triton."""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard
from kernels.variant import Variant

WIDTH: Final = 256  # listed tokens that a program takes at a time
PARTS: Final = 4  # programs a row; one that finds no tokens ends at once
MASK_WIDTH: Final = 4096  # logits that a program of mask_kernel masks


def penalise_triton(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    start: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Change logits as `penalise` says, without waiting for the device."""
    with device_guard(logits.device):
        penalise_kernel[(logits.shape[0], PARTS)](
            logits,
            token_ids,
            counts,
            start,
            repetition,
            frequency,
            presence,
            logits.stride(0),
            WIDTH=WIDTH,
            PARTS=PARTS,
            enable_fp_fusion=True,
        )


def mask_triton(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Mask logits as `mask_logits` says, without waiting for the device."""
    num_rows, vocab_size = logits.shape
    with device_guard(logits.device):
        mask_kernel[(num_rows, triton.cdiv(vocab_size, MASK_WIDTH))](
            logits,
            allowed,
            vocab_size,
            logits.stride(0),
            allowed.stride(0),
            WIDTH=MASK_WIDTH,
            enable_fp_fusion=True,
        )


@triton.jit
def penalise_kernel(
    logits,  # [R, V]
    token_ids,  # [n]
    counts,
    start,  # [R + 1]
    repetition,  # [R]
    frequency,
    presence,
    logits_by_row,  # stride, in elements
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Change every `PARTS`-th run of `WIDTH` listed tokens of one row."""
    row = tl.program_id(0)
    end = tl.load(start + row + 1)
    first = tl.load(start + row) + tl.program_id(1) * WIDTH
    by = tl.load(repetition + row)
    often = tl.load(frequency + row)
    once = tl.load(presence + row)
    line = logits + row.to(tl.int64) * logits_by_row
    for at in range(first, end, WIDTH * PARTS):
        place = at + tl.arange(0, WIDTH)
        inside = place < end
        ids = tl.load(token_ids + place, mask=inside, other=0)
        times = tl.load(counts + place, mask=inside, other=0).to(tl.float32)
        found = tl.load(line + ids, mask=inside, other=0.0)
        found = tl.where(found > 0, tl.div_rn(found, tl.zeros_like(found) + by), found * by)
        tl.store(line + ids, found - times * often - once, mask=inside)


@triton.jit
def mask_kernel(
    logits,  # [R, V]
    allowed,  # [R, ceil(V / 32)]
    vocab_size,
    logits_by_row,  # strides, in elements
    allowed_by_row,
    WIDTH: tl.constexpr,
):
    """Write minus infinity where a bit is not set, for `WIDTH` logits of one row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = token < vocab_size
    word = tl.load(allowed + row * allowed_by_row + token // 32, mask=inside, other=-1)
    hidden = (word >> (token % 32)) & 1 == 0
    nothing = tl.full((WIDTH,), float("-inf"), tl.float32)
    tl.store(logits + row * logits_by_row + token, nothing, mask=inside & hidden)


def shipped() -> Iterator[Variant]:
    """Iterate over what launches use."""
    lists = dict.fromkeys(("token_ids", "counts", "start"), "*i32")
    factors = dict.fromkeys(("repetition", "frequency", "presence"), "*fp32")
    yield Variant(
        penalise_kernel,
        "lists",
        {"logits": "*fp32", **lists, **factors},
        {"WIDTH": WIDTH, "PARTS": PARTS},
    )
    yield Variant(
        mask_kernel,
        "bits",
        {"logits": "*fp32", "allowed": "*i32"},
        {"WIDTH": MASK_WIDTH},
        loose=frozenset({"allowed_by_row"}),
    )
