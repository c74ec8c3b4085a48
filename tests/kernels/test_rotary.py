"""Rotary positions, alone and fused with the store, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import rms_norm, rotary, rotary_store_kv, rotary_table, store_kv
from kernels.backend import QUANTISED_DTYPES
from kernels.rotary_scaling import (
    rotary_frequencies,
    scale_linear,
    scale_llama3,
    scale_yarn,
    yarn_magnitude,
)
from tests.support.paged_attention import LAYOUTS, new_pool

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def angles(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_table(rotary_frequencies(head_dim, theta=1e4), 100)
    positions = torch.randint(0, 100, (num_tokens,))
    return cos[positions], sin[positions]


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Turn pairs as complex numbers, in float64."""
    num_tokens, num_heads, dim = x.shape
    if interleaved:
        pairs = x.double().reshape(num_tokens, num_heads, dim // 2, 2)
    else:
        pairs = x.double().reshape(num_tokens, num_heads, 2, dim // 2).transpose(-1, -2)
    turn = torch.complex(cos.double(), sin.double())[:, None]
    got = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    return (got if interleaved else got.transpose(-1, -2)).reshape(x.shape)


@settings(max_examples=40, deadline=None, database=None)
@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.sampled_from([2, 16, 64, 80, 96, 192]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def check_rotary(
    backend: str, num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype, interleaved: bool
) -> None:
    x = torch.randn(num_tokens, num_heads + 2, dim).to(dtype)[:, 1 : num_heads + 1]
    cos, sin = angles(num_tokens, dim)
    got = rotary(x, cos, sin, interleaved=interleaved, backend=backend)
    assert got.dtype == dtype
    expected = turned(x, cos, sin, interleaved)
    assert torch.allclose(got.double(), expected, atol=TOLERANCE[dtype])
    out = torch.full_like(got, float("nan"))
    assert rotary(x, cos, sin, interleaved=interleaved, out=out, backend=backend) is out
    assert torch.equal(out, got)


def test_pairs_are_turned_by_their_angles(backend: str) -> None:
    check_rotary(backend)


@settings(max_examples=30, deadline=None, database=None)
@given(
    st.integers(0, 3),
    st.sampled_from([(1, 1, 16), (4, 2, 80), (6, 3, 64), (9, 3, 8)]),
    st.sampled_from(DTYPES),
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.booleans(),
)
def check_fused(
    backend: str,
    num_tokens: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    layout: str,
    interleaved: bool,
    normed: bool,
) -> None:
    num_heads, num_kv_heads, dim = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim).to(dtype)
    cos, sin = angles(num_tokens, dim)
    slots = torch.tensor([5, -1, 2])[:num_tokens]
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else None
    pools = [new_pool(3, 2, num_kv_heads, dim, dtype, layout) for _ in range(4)]
    q = rotary_store_kv(
        qkv, cos, sin, *pools[:2], slots, interleaved=interleaved, norms=norms, backend=backend
    )
    want_q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if norms is not None:
        want_q, k = (
            rms_norm(x.flatten(0, 1), norm, eps=1e-6, backend=backend).view(x.shape)
            for x, norm in zip((want_q, k), norms, strict=True)
        )
    want_q = rotary(want_q, cos, sin, interleaved=interleaved, backend=backend)
    k = rotary(k, cos, sin, interleaved=interleaved, backend=backend)
    store_kv(k, v, *pools[2:], slots, backend=backend)
    # the two sum a head's squares in different orders
    loose = 2**-6 if dtype == torch.bfloat16 else 2**-9 if dtype == torch.float16 else 1e-5
    exact = {"atol": 0.0, "rtol": 0.0} if not normed else {"atol": 4 * loose, "rtol": loose}
    torch.testing.assert_close(q, want_q, **exact)
    for got, want in zip(pools[:2], pools[2:], strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **exact)


def test_the_fused_op_gives_what_its_parts_give(backend: str) -> None:
    check_fused(backend)


@pytest.mark.parametrize("dtype", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("by_slot", [False, True])
def test_the_fused_op_quantises_as_store_kv_does(
    backend: str, dtype: torch.dtype, by_slot: bool
) -> None:
    qkv = torch.randn(3, 8, 32).bfloat16() * 3
    cos, sin = angles(3, 32)
    slots = torch.tensor([3, 0, -1])
    pools = torch.zeros(4, 2, 2, 2, 32).to(dtype)
    scales = torch.zeros(4, 2, 2, 2) if by_slot else torch.full((4, 2), 0.01)
    rotary_store_kv(
        qkv, cos, sin, *pools[:2], slots, k_scale=scales[0], v_scale=scales[1], backend=backend
    )
    k = rotary(qkv[:, 4:6], cos, sin, backend=backend)
    store_kv(
        k, qkv[:, 6:], *pools[2:], slots, k_scale=scales[2], v_scale=scales[3], backend=backend
    )
    assert torch.equal(pools[:2].view(torch.uint8), pools[2:].view(torch.uint8))
    assert torch.equal(scales[:2], scales[2:])
    assert pools.view(torch.uint8).count_nonzero() > 0


def test_wrong_heads_and_angles_are_named() -> None:
    pools, slots = torch.zeros(2, 1, 1, 2, 8), torch.tensor([0])
    cos, sin = torch.zeros(2, 1, 4)
    with pytest.raises(ValueError, match=r"qkv has 4 heads, expected more than 2 \* 2"):
        rotary_store_kv(torch.zeros(1, 4, 8), cos, sin, *pools, slots)
    with pytest.raises(ValueError, match=r"^cos has shape \[1, 4\], expected \[1, 3\]"):
        rotary(torch.zeros(1, 4, 6), cos, sin)
    with pytest.raises(ValueError, match="a head has 7 numbers"):
        rotary(torch.zeros(1, 4, 7), cos, sin)
    norms = (torch.zeros(8), torch.zeros(7))
    with pytest.raises(ValueError, match=r"norms\[1\] has shape \[7\]"):
        rotary_store_kv(torch.zeros(1, 6, 8), cos, sin, *pools, slots, norms=norms)


FREQ = rotary_frequencies(128, theta=1e4)


def test_linear_scaling_stretches_every_wave() -> None:
    assert torch.equal(scale_linear(FREQ, factor=4.0) * 4, FREQ)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaled = scale_llama3(
        FREQ, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192
    )
    turns = 8192 * FREQ / (2 * torch.pi)
    assert torch.equal(scaled[turns >= 4], FREQ[turns >= 4])
    assert torch.allclose(scaled[turns <= 1] * 8, FREQ[turns <= 1], rtol=1e-12)
    assert (scaled.diff() <= 0).all()


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    scaled = scale_yarn(FREQ, factor=4.0, theta=1e4, original_max_len=4096)
    turns = 4096 * FREQ / (2 * torch.pi)
    assert torch.equal(scaled[turns >= 40], FREQ[turns >= 40])
    assert torch.allclose(scaled[turns <= 0.8] * 4, FREQ[turns <= 0.8], rtol=1e-12)
    between = (scaled / FREQ)[(turns < 25) & (turns > 1.2)]
    assert ((between > 0.25) & (between < 1)).all()


def test_the_table_takes_the_magnitude_of_yarn() -> None:
    cos, sin = rotary_table(FREQ, 50, magnitude=yarn_magnitude(4.0))
    assert torch.allclose(cos.square() + sin.square(), torch.tensor(yarn_magnitude(4.0) ** 2))
    assert yarn_magnitude(1.0) == 1.0
