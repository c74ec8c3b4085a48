"""Merging attention states in Triton: one program joins the parts of one row."""

# Triton's decorator and the functions below it are untyped: their types are Triton's own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.backend import device_guard
from kernels.variant import Variant


def merge_triton(
    parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Fill `out` and `lse` as `merge_state` says, without waiting for the device."""
    num_parts, num_tokens, num_heads, head_dim = parts.shape
    with device_guard(parts.device):
        merge_state_kernel[(num_tokens, num_heads)](
            parts,
            lses,
            out,
            lse,
            num_parts,
            *parts.stride()[:3],
            *lses.stride()[:2],
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
            HEAD_DIM=head_dim,
            DIM=triton.next_power_of_2(head_dim),
            LSE=lse is not None,
            num_warps=1,
            enable_fp_fusion=True,
        )


@triton.jit(do_not_specialize=["num_parts"])
def merge_state_kernel(
    parts,  # [P, T, H, D]
    lses,  # [P, T, H]
    out,  # [T, H, D]
    lse,  # [T, H]
    num_parts,
    by_part,  # strides, in elements
    by_token,
    by_head,
    lses_by_part,
    lses_by_token,
    out_by_token,
    out_by_head,
    lse_by_token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    LSE: tl.constexpr,
):
    """Join the parts of one token and head, in their order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    in_head = dim < HEAD_DIM
    own = lses + token * lses_by_token + head + tl.arange(0, 1)
    peak = tl.full((1,), float("-inf"), tl.float32)
    for part in range(num_parts):
        peak = tl.maximum(peak, tl.load(own + part * lses_by_part))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    mass = tl.full((1,), 0.0, tl.float32)
    total = tl.full((DIM,), 0.0, tl.float32)
    row = parts + token * by_token + head * by_head
    for part in range(num_parts):
        share = tl.exp(tl.load(own + part * lses_by_part) - base)
        # a part without keys may hold anything, NaN included
        present = in_head & (share > 0.0)
        values = tl.load(row + part * by_part + dim, mask=present, other=0.0).to(tl.float32)
        mass = mass + share
        total = total + values * share
    if LSE:
        # the largest share is 1, so a mass is 0 or at least 1
        whole = tl.where(mass > 0.0, base + tl.log(tl.maximum(mass, 1.0)), peak)
        tl.store(lse + token * lse_by_token + head + tl.arange(0, 1), whole)
    result = (total / tl.where(mass == 0.0, 1.0, mass)).to(out.dtype.element_ty)
    tl.store(out + token * out_by_token + head * out_by_head + dim, result, mask=in_head)


def shipped() -> Iterator[Variant]:
    """Iterate over what is compiled and proven before a release."""
    for name in ("fp32", "fp16", "bf16"):
        for head_dim in (64, 128, 256):
            yield Variant(
                kernel=merge_state_kernel,
                label=f"{name} D {head_dim}",
                types={
                    **dict.fromkeys(("parts", "out"), f"*{name}"),
                    **dict.fromkeys(("lses", "lse"), "*fp32"),
                },
                constants={"HEAD_DIM": head_dim, "DIM": head_dim, "LSE": True},
                num_warps=1,
                loose=frozenset({"num_parts", "lses_by_part", "lses_by_token", "lse_by_token"}),
            )
