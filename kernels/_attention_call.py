"""The arguments of an attention operation, checked once for every backend and list of work.

Owns: what fits together, and the wording where it does not.  Does not know: how attention is
computed.
Idea: extend, decode and shared-prefix attention take the same arguments, so they share this record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels._extend_cut import Heads
from kernels.backend import (
    check_dense,
    check_for_pool,
    check_out,
    check_pools,
    check_scales,
    check_shape,
    check_tensor,
    check_unit_stride,
)


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What changes which keys a row sees, or how much they weigh; see `extend_attention`."""

    window: int | None = None
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None
    tree_mask: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    @property
    def are_plain(self) -> bool:
        """Whether nothing departs from causal attention over keys stored as they are."""
        return all(getattr(self, name) is None for name in self.__slots__)

    def check(self, q: torch.Tensor, k_pool: torch.Tensor) -> None:
        """Raise ValueError or TypeError for an option that does not fit q and the pools."""
        self.check_rows(q)
        check_scales(k_pool, self.k_scale, self.v_scale)
        if self.k_scale is not None and self.v_scale is not None:
            strides = (self.k_scale.stride(), self.v_scale.stride())
            if strides[0] != strides[1]:
                raise ValueError(f"k_scale has strides {strides[0]} and v_scale {strides[1]}")

    def check_rows(self, q: torch.Tensor) -> None:
        """Raise ValueError or TypeError for an option, scales aside, that does not fit q."""
        num_tokens, num_heads, _ = q.shape
        window, soft_cap = self.window, self.soft_cap
        if window is not None and (isinstance(window, bool) or window < 1):
            raise ValueError(f"window is {window}, expected at least 1, or None")
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise ValueError(f"soft_cap is {soft_cap}, expected more than 0, or None")
        if self.sinks is not None:
            check_dense("sinks", self.sinks, (num_heads,), torch.float32, q.device)
        if self.tree_mask is not None:
            check_dense("tree_mask", self.tree_mask, (num_tokens,), torch.int64, q.device)
        if self.lse is not None:
            check_tensor("lse", self.lse, (num_tokens, num_heads), torch.float32, q.device)
            if not self.lse.is_contiguous():
                raise ValueError(f"lse has strides {self.lse.stride()}, expected contiguous")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One attention operation whose arguments fit together."""

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor
    scale: float
    out: torch.Tensor
    options: Options

    @property
    def heads(self) -> Heads:
        """Key heads, query heads of each, and their size."""
        _, num_heads, head_dim = self.q.shape
        num_kv_heads = self.k_pool.shape[2]
        return Heads(num_kv_heads, num_heads // num_kv_heads, head_dim)


def check_call(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None,
    options: Options,
) -> Call:
    """Return the call, with an output of its own where none is given.

    Raises ValueError or TypeError, naming the argument and its value.
    """
    check_shape("q", q, ("T", "H", "D"))
    check_for_pool("q", q, k_pool)
    check_unit_stride("q", q)
    check_paged(k_pool, block_table, seq_lens, q_start, q.shape[1])
    check_pools("k_pool", k_pool, "v_pool", v_pool)
    check_shape("k_pool", k_pool, ("N", "B", "Hkv", q.shape[2]))
    options.check(q, k_pool)
    out = check_out(out, q.shape, q)
    if 0 in out.stride() and out.numel() > 1:
        raise ValueError(f"out has strides {out.stride()}: rows would be written over one another")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, expected a finite number")
    return Call(q, k_pool, v_pool, block_table, seq_lens, q_start, scale, out, options)


def check_paged(
    k_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_start: torch.Tensor,
    num_heads: int,
    pool_name: str = "k_pool",
) -> Heads:
    """Raise unless the index tensors fit the pool and each other; return the head sizes."""
    check_shape(pool_name, k_pool, ("N", "B", "Hkv", "D"))
    num_kv_heads, head_dim = k_pool.shape[2:]
    if not k_pool.numel():
        raise ValueError(f"{pool_name} has shape {list(k_pool.shape)}, which holds nothing")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"q has {num_heads} heads, not a multiple of the {num_kv_heads} of {pool_name}"
        )
    for name, tensor, shape in (
        ("block_table", block_table, ("S", "M")),
        ("seq_lens", seq_lens, block_table.shape[:1]),
        ("q_start", q_start, (block_table.shape[0] + 1,)),
    ):
        check_dense(name, tensor, shape, torch.int32, k_pool.device)
    return Heads(num_kv_heads, num_heads // num_kv_heads, head_dim)
