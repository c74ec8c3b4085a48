"""The row-wise ops around the products: RMS norm, rotary positions, gated SiLU.

Owns: their arithmetic, in float32, a row at a time.  Does not know: layers, caches, batches.
Idea: nothing here mixes rows, so no batch can change a row's bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from kernels._rows_native import rms_norm_native, silu_and_mul_native, takes
from kernels.backend import (
    FLOAT_DTYPES,
    check_dense,
    check_dtype,
    check_out,
    check_shape,
    check_tensor,
    check_unit_stride,
    choose_backend,
)

SHARE: Final = 32768
"""Numbers that torch gives a thread at least; at::internal::GRAIN_SIZE."""


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scale each row to a root mean square of 1, then by `weight`.

    x         [T, D]
    weight    [D] in x.dtype
    residual  [T, D] in x.dtype, or None; x is added to it in place, and the sum is what is scaled
    out       [T, D] written and returned; allocated when None; may be x
    returns   [T, D] in x.dtype; computed in float32

    Cost: one pass over the rows.  Source: Zhang and Sennrich 2019.
    """
    check_shape("x", x, ("T", "D"))
    check_tensor("weight", weight, x.shape[1:], x.dtype, x.device)
    if residual is not None:
        check_tensor("residual", residual, x.shape, x.dtype, x.device)
    chosen = choose_backend(x.device, backend)
    if chosen == "native" and takes(x, weight, residual, out):
        out = check_out(out, x.shape, x)
        rms_norm_native(x, weight, eps, residual, out)
        return out
    if chosen == "triton":
        out = check_out(out, x.shape, x)
        check_dtype("x", x, FLOAT_DTYPES)
        for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
            if tensor is not None:
                check_unit_stride(name, tensor)
        if x.shape[0]:
            from kernels._rows_triton import rms_norm_triton  # optional: not on every platform

            rms_norm_triton(x, weight, eps, residual, out)
        return out
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _placed((wide * scale).to(x.dtype) * weight, out)


def rotary_table(
    inv_freq: torch.Tensor, max_len: int, *, magnitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tabulate cosine and sine of every position.

    inv_freq   [D/2] radians a position, scaled as kernels/rotary_scaling.py offers
    magnitude  factor on both, for YaRN
    returns    cos, sin, each [max_len, D/2] float32
    """
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * inv_freq.double()[None, :]
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Turn the pairs of each head by its position's angles.

    x            [T, H, D], D even
    cos, sin     [T, D/2] float32, the table's rows at each token's position
    interleaved  False: pair i is (i, i + D/2), as in the Llama weights on Hugging Face;
                 True: (2i, 2i + 1), as in the paper
    out          [T, H, D] written and returned; allocated when None; may be x
    returns      [T, H, D] in x.dtype; computed in float32

    Cost: one pass.  Source: Su et al. 2021.
    """
    check_shape("x", x, ("T", "H", "D"))
    check_angles(x.shape[0], x.shape[2], cos, sin, x.device)
    if choose_backend(x.device, backend) == "triton":
        out = check_out(out, x.shape, x)
        check_dtype("x", x, FLOAT_DTYPES)
        check_unit_stride("x", x)
        if x.shape[0]:
            from kernels._rotary_triton import rotary_triton  # optional: not on every platform

            rotary_triton(x, cos, sin, out, interleaved=interleaved)
        return out
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        left, right = x[..., 0::2].float(), x[..., 1::2].float()
        pairs = torch.stack((left * cos - right * sin, right * cos + left * sin), -1)
        return _placed(pairs.flatten(-2).to(x.dtype), out)
    half = x.shape[-1] // 2
    left, right = x[..., :half].float(), x[..., half:].float()
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    return _placed(turned.to(x.dtype), out)


def silu_and_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Multiply SiLU of the first half of each row with the second half.

    gate_up  [T, 2·F]
    out      [T, F] written and returned; allocated when None
    returns  [T, F] in gate_up.dtype

    Cost: one pass.  Source: Shazeer 2020 (SwiGLU).
    """
    check_shape("gate_up", gate_up, ("T", "2F"))
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[1]}, expected an even number")
    chosen = choose_backend(gate_up.device, backend)
    if chosen == "native" and takes(gate_up, out):
        out = check_out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up)
        silu_and_mul_native(gate_up, out)
        return out
    if chosen == "triton":
        out = check_out(out, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up)
        check_dtype("gate_up", gate_up, FLOAT_DTYPES)
        check_unit_stride("gate_up", gate_up)
        if gate_up.shape[0]:
            from kernels._rows_triton import silu_and_mul_triton  # optional, as Triton is

            silu_and_mul_triton(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, -1)
    parts = [functional.silu(part) for part in torch.split(gate, _whole_rows(gate))]
    return _placed((parts[0] if len(parts) == 1 else torch.cat(parts)).mul_(up), out)


def _whole_rows(x: torch.Tensor) -> list[int]:
    """Cut rows into parts in which no two threads share a row.

    returns  rows of each part; on a CPU with one thread, or another device, all in one

    An elementwise operation of torch gives each thread an equal share of all numbers, and the last
    few of a run to a scalar loop, whose exponential has other last bits than the vector one.  So a
    row's bits would follow from where in the batch it stands; where shares end with rows they do
    not.  Source: at::parallel_for and TensorIterator's vectorized loop.
    """
    rows, width = x.shape
    parts: list[int] = []
    while rows or not parts:
        part = rows
        while part % max(1, _num_shares(part * width, x.device)):
            part -= 1
        parts.append(part)
        rows -= part
    return parts


def _num_shares(num_elements: int, device: torch.device) -> int:
    return 1 if device.type != "cpu" else min(torch.get_num_threads(), -(-num_elements // SHARE))


def check_angles(
    num_tokens: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor, device: torch.device
) -> None:
    """Raise unless cos and sin are [T, D/2] float32 on `device`, with D even."""
    if head_dim % 2:
        raise ValueError(f"a head has {head_dim} numbers, expected an even number of them")
    for name, table in (("cos", cos), ("sin", sin)):
        check_dense(name, table, (num_tokens, head_dim // 2), torch.float32, device)


def _placed(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return result
    check_tensor("out", out, result.shape, result.dtype, result.device)
    return out.copy_(result)
