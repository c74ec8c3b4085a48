"""The contract of merge_state, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import extend_attention, merge_state
from tests.support.paged_attention import build_step, dense_attention, random_suffix

NAN = float("nan")


@settings(max_examples=25, deadline=None, database=None)
@given(
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([(2, 16), (1, 20)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 99),
)
def check_merge(
    backend: str,
    num_parts: int,
    num_tokens: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_parts, num_tokens, heads[0])
    lses = torch.randn(shape, generator=generator) * 20
    absent = torch.rand(shape, generator=generator) < 0.3
    lses[absent] = -torch.inf
    parts = torch.randn(*shape, heads[1], generator=generator).to(dtype)
    shares = lses.double().softmax(0).nan_to_num()
    expected = (parts.double() * shares[..., None]).sum(0)
    parts[absent] = NAN
    out = torch.full(parts.shape[1:], NAN, dtype=dtype)
    lse = torch.full(shape[1:], NAN)
    got = merge_state(parts, lses, out=out, lse=lse, backend=backend)
    assert got is out
    tolerance = 2e-6 if dtype == torch.float32 else 1.6e-2
    assert torch.allclose(got.double(), expected, rtol=0, atol=tolerance)
    whole = lses.double().logsumexp(0) if num_parts else lse.new_full(lse.shape, -torch.inf)
    assert torch.allclose(lse.double(), whole.double(), rtol=0, atol=1e-5)


def test_parts_weigh_by_their_log_sum_exp(backend: str) -> None:
    check_merge(backend)


def test_attention_over_two_halves_is_attention_over_the_whole(backend: str) -> None:
    generator = torch.Generator().manual_seed(5)
    whole = random_suffix(generator, 1, 90, heads=(1, 2, 16), dtype=torch.float32)
    halves = [
        whole.__class__(whole.q, whole.k[part], whole.v[part])
        for part in (slice(0, 40), slice(40, 90))
    ]
    parts, lses = torch.full((2, 1, 2, 16), NAN), torch.full((2, 1, 2), NAN)
    for half, out, lse in zip(halves, parts, lses, strict=True):
        step = build_step([half], generator)
        step.run(extend_attention, scale=0.3, backend=backend, out=out, lse=lse)
    got = merge_state(parts, lses, backend=backend)
    assert torch.allclose(got.double(), dense_attention(whole, 0.3), rtol=0, atol=2e-6)


def test_a_row_has_the_same_bits_in_any_company(backend: str) -> None:
    generator = torch.Generator().manual_seed(6)
    parts = torch.randn(3, 9, 2, 20, generator=generator)
    lses = torch.randn(3, 9, 2, generator=generator)
    together = merge_state(parts, lses, backend=backend)
    for row in range(9):
        alone = merge_state(parts[:, row : row + 1], lses[:, row : row + 1], backend=backend)
        assert torch.equal(alone[0], together[row])


def test_arguments_that_do_not_fit_are_named() -> None:
    parts, lses = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"lses has shape \[2, 3, 3\], expected \[2, 3, 4\]"):
        merge_state(parts, lses[..., :3])
    with pytest.raises(TypeError, match=r"lses has dtype torch\.float64"):
        merge_state(parts, lses.double())
    with pytest.raises(ValueError, match=r"out has shape \[3, 4\], expected \[3, 4, 8\]"):
        merge_state(parts, lses, out=torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"lse has shape \[3\], expected \[3, 4\]"):
        merge_state(parts, lses, lse=torch.zeros(3))
