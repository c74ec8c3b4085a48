"""Joining attention over disjoint sets of keys by their log-sum-exp.

Owns: the contract and both backends.  Does not know: where the parts come from.
Idea: a part's share is exp(lse - the whole's lse).  Parts are added in the order given, so a row's
bits depend on its own parts alone.
"""

from __future__ import annotations

import math

import torch

from kernels.backend import (
    FLOAT_DTYPES,
    check_dense,
    check_dtype,
    check_out,
    check_shape,
    check_unit_stride,
    choose_backend,
)


def merge_state(
    parts: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the attention over all keys from the attentions over parts of them.

    parts    [P, T, H, D]          outputs, each normalised over its own keys
    lses     [P, T, H] float32     log of the sum of exp(score) of each; -inf for a part without
                                   keys, whose output is not looked at
    out      [T, H, D]             written and returned; allocated when None
    lse      [T, H] float32        written if given: that of the whole
    returns  [T, H, D] in the dtype of parts; zeros where no part has keys

    Raises ValueError or TypeError for arguments that do not fit together, before anything runs.
    Sinks belong to one part only.  Cost: one pass over parts.
    """
    check_shape("parts", parts, ("P", "T", "H", "D"))
    check_dtype("parts", parts, FLOAT_DTYPES)
    check_unit_stride("parts", parts)
    check_dense("lses", lses, parts.shape[:3], torch.float32, parts.device)
    out = check_out(out, parts.shape[1:], parts)
    if lse is not None:
        check_dense("lse", lse, parts.shape[1:3], torch.float32, parts.device)
    if choose_backend(parts.device, backend) != "triton":
        _merge_torch(parts, lses, out, lse)
    elif out.numel():
        from kernels._merge_triton import merge_triton  # optional: not on every platform

        merge_triton(parts, lses, out, lse)
    return out


def _merge_torch(
    parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    peak = lses.new_full(lses.shape[1:], -math.inf)
    for part_lse in lses:
        peak = torch.maximum(peak, part_lse)
    base = peak.masked_fill(peak == -math.inf, 0.0)
    mass = torch.zeros_like(base)
    total = torch.zeros(out.shape, device=out.device)
    for part, part_lse in zip(parts, lses, strict=True):
        share = (part_lse - base).exp()
        mass = mass + share
        total += (part.float() * share[..., None]).masked_fill((share == 0)[..., None], 0.0)
    if lse is not None:
        lse.copy_(base + mass.log())
    out.copy_(total / mass.masked_fill(mass == 0, 1.0)[..., None])
