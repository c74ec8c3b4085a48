"""Whether freshly compiled kernels compute what they should: run as a program, by the compiler.

Owns: small inputs of the operations, whose results are known.  Does not know: the compiler.
Idea: a compiler that miscompiles does so in whole loops, so a small input of an odd size shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from kernels.extend_attention import extend_attention
from kernels.formats import BLOCKS, QuantisedWeight
from kernels.linear import linear, pack_weight
from kernels.norm_rope import rms_norm, silu_and_mul
from kernels.rotary_store import rotary_store_kv

_TILE_ROWS = 14  # of the largest tile of a product, see native/linear.c
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def faults() -> Iterator[str]:
    """Yield what is wrong, a line each.  Cost: milliseconds."""
    for dtype, tolerance in _TOLERANCE.items():
        yield from _dependent_rows(dtype)
        for name, got, wanted in (*_values(dtype), *_turned(dtype)):
            error = float((got.double() - wanted).abs().max() / wanted.abs().max())
            if not error <= tolerance:
                yield f"{name} in {dtype} is off by {error:.1e}"
    yield from _broken_rows()


def _values(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield results of the kernels beside what they should be."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(13, 96, generator=draw), torch.randn(70, 96, generator=draw)
    x, weight = x.to(dtype), weight.to(dtype)
    exact = x.double() @ weight.double().T
    yield "a product", linear(x, pack_weight(weight, backend="native"), backend="native"), exact
    scale = x.double().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    yield "a norm", rms_norm(x, x[0], eps=1e-5, backend="native"), x.double() * scale * x[0]
    gate, up = x.double().chunk(2, -1)
    yield "a gated SiLU", silu_and_mul(x, backend="native"), gate * gate.sigmoid() * up
    q, k, v = torch.randn(3, 80, 2, 16, generator=draw).to(dtype)
    table = torch.arange(5, dtype=torch.int32)[None]
    got = extend_attention(
        q,
        k.view(5, 16, 2, 16),
        v.view(5, 16, 2, 16),
        table,
        torch.tensor([80], dtype=torch.int32),
        torch.tensor([0, 80], dtype=torch.int32),
        scale=0.25,
        backend="native",
    )
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.25
    hidden = torch.ones(80, 80, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    yield "attention", got, torch.einsum("hqk,khd->qhd", weights, v.double())


def _turned(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield queries that were turned, and keys and values as they were stored."""
    draw = torch.Generator().manual_seed(2)
    qkv = torch.randn(13, 4, 48, generator=draw).to(dtype)  # two heads of queries, one of keys
    angles = torch.randn(13, 24, generator=draw)
    pools = torch.zeros(2, 4, 4, 1, 48, dtype=dtype)
    slots = torch.arange(13) + 2
    k_pool, v_pool = pools
    q = rotary_store_kv(qkv, angles.cos(), angles.sin(), k_pool, v_pool, slots, backend="native")
    left, right = qkv.double().chunk(2, -1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    exact = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
    stored = pools.view(2, 16, 48)[:, slots]
    yield "a rotary query", q, exact[:, :2]
    yield "a stored key", stored[0], exact[:, 2]
    yield "a stored value", stored[1], qkv[:, 3].double()


def _dependent_rows(dtype: torch.dtype) -> Iterator[str]:
    """Yield operations that give a row other bits beside others, in tiles of any size."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(_TILE_ROWS, 96, generator=draw).to(dtype)
    packed = pack_weight(torch.randn(70, 96, generator=draw).to(dtype), backend="native")
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a product": lambda rows: linear(rows, packed, backend="native"),
        "a norm": lambda rows: rms_norm(rows, x[0], eps=1e-5, backend="native"),
        "a gated SiLU": lambda rows: silu_and_mul(rows, backend="native"),
    }
    for name, operation in operations.items():
        alone = torch.cat([operation(row[None]) for row in x])
        counts = range(2, _TILE_ROWS + 1)
        if not all(torch.equal(alone[:count], operation(x[:count])) for count in counts):
            yield f"{name} in {dtype} depends on the rows beside it"


def _broken_rows() -> Iterator[str]:
    """Quantised products: values beside their own unpacked weights, and bits beside other rows."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(13, 256, generator=draw)
    for name, block in BLOCKS.items():
        raw = torch.randint(0, 256, (40, 256 // block.inputs * block.num_bytes), generator=draw)
        raw = raw.to(torch.uint8)
        for at in block.half_bytes:
            raw.view(-1, block.num_bytes)[:, at + 1] = 0x28  # scales of about 0.03
        for int8 in (False, True):
            packed = pack_weight(QuantisedWeight(raw, name, (40, 256)), int8=int8, backend="native")
            assert not isinstance(packed, torch.Tensor)
            got = linear(x, packed, backend="native")
            exact = x.double() @ packed.plain().double().T
            error = float((got.double() - exact).abs().max() / exact.abs().max())
            if not error <= (2e-2 if int8 else 1e-4):
                yield f"a product with {name} is off by {error:.1e}"
            if not torch.equal(linear(x[5:6], packed, backend="native")[0], got[5]):
                yield f"a product with {name} depends on the rows beside it"


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = list(faults())
    print("; ".join(found), file=sys.stderr)
    sys.exit(bool(found))
