"""Latent attention: one slot is key and value of every head, and a row's bits are its own.

Small splits and tiles show many of them with few keys; a test with the shipped sizes follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import SharedPrefixes, copy_blocks, mla_attention, plan_mla, store_kv
from tests.kernels.conftest import INTERPRETED
from tests.kernels.test_decode_attention import PoisonedScratch
from tests.support.paged_attention import LAYOUTS, Step, Suffix, build_step, random_suffix

NUM_HEADS, LATENT, ROPE = 3, 24, 8
SCALE = 0.2
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@contextmanager
def small_splits(rows: int = 16, split: int = 32, budget: int = 1 << 29) -> Iterator[None]:
    """Shrink the tiles, splits and partial results of the Triton kernel."""
    if not INTERPRETED:  # the torch backend has one tile
        yield
        return
    from kernels import _mla_triton, _mla_work

    sizes = _mla_triton.LatentSizes(rows, 16, 4, 2)
    with (
        mock.patch.object(_mla_triton, "choose_latent_sizes", return_value=sizes),
        mock.patch.object(_mla_triton, "SPLIT", split),
        mock.patch.object(_mla_work, "BUDGET", budget),
    ):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(6)


def sequence(
    generator: torch.Generator,
    num_queries: int,
    seq_len: int,
    *,
    num_heads: int = NUM_HEADS,
    dims: tuple[int, int] = (LATENT, ROPE),
    dtype: torch.dtype = torch.float32,
) -> Suffix:
    """Draw absorbed queries and stored rows of a sequence: latent, then rotary part."""
    heads = (1, num_heads, sum(dims))
    return random_suffix(generator, num_queries, seq_len, heads=heads, dtype=dtype)


def attended(step: Step, backend: str, latent_dim: int = LATENT, **options: object) -> torch.Tensor:
    """Attend over the K pool of a step, whose V pool is not looked at."""
    q_latent, q_rope = step.q[..., :latent_dim], step.q[..., latent_dim:]
    out = torch.full(q_latent.shape, float("nan"), dtype=step.q.dtype)
    options.setdefault("scratch", PoisonedScratch(step.q.device))
    tables = (step.block_table, step.seq_lens, step.q_start)
    got = mla_attention(
        q_latent, q_rope, step.k_pool, *tables, scale=SCALE, backend=backend, out=out, **options
    )
    assert got is out
    return out


def reference(rows: Suffix, latent_dim: int = LATENT) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one sequence, in float64."""
    stored = rows.k[:, 0].double()
    num_queries, seq_len = rows.q.shape[0], len(stored)
    first_new = seq_len - num_queries
    scores = torch.einsum("qhd,kd->qhk", rows.q.double(), stored) * SCALE
    key = torch.arange(seq_len)
    hidden = key > torch.arange(first_new, seq_len)[:, None]
    scores.masked_fill_(hidden[:, None], -math.inf)
    out = torch.einsum("qhk,kd->qhd", scores.softmax(-1), stored[:, :latent_dim])
    return out, scores.logsumexp(-1)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(got.double(), expected, rtol=0, atol=tolerance)


def test_latents_match_a_float64_reference_on_ragged_steps(backend: str) -> None:
    lengths = st.tuples(st.integers(0, 6), st.integers(0, 80))

    @settings(max_examples=8 if INTERPRETED else 40, deadline=None, database=None)
    @given(
        st.lists(lengths, min_size=1, max_size=3),
        st.sampled_from(list(TOLERANCE)),
        st.sampled_from([1, 2, 16, 64]),
        st.sampled_from(LAYOUTS),
        st.sampled_from([1, NUM_HEADS, 20]),
        st.sampled_from([(LATENT, ROPE), (32, 16), (48, 2)]),
    )
    def check(
        pairs: list[tuple[int, int]],
        dtype: torch.dtype,
        block_size: int,
        layout: str,
        num_heads: int,
        dims: tuple[int, int],
    ) -> None:
        generator = torch.Generator().manual_seed(len(pairs))
        rows = [
            sequence(generator, n, max(1, n + before), num_heads=num_heads, dims=dims, dtype=dtype)
            for n, before in pairs
        ]
        step = build_step(rows, generator, block_size=block_size, layout=layout)
        lse = torch.full((step.q.shape[0], num_heads), float("nan"))
        pairs_of = [reference(one, dims[0]) for one in rows]
        expected = torch.cat([out for out, _ in pairs_of])
        with small_splits():
            for wish in ({"lse": lse}, {})[: 1 if INTERPRETED else 2]:  # Triton has one path
                assert close(attended(step, backend, dims[0], **wish), expected, TOLERANCE[dtype])
        norms = torch.cat([norm for _, norm in pairs_of])
        assert close(lse, norms, 1e-5 if dtype == torch.float32 else 1e-3)

    check()


def test_it_is_attention_over_the_keys_and_values_that_latents_stand_for(
    backend: str, generator: torch.Generator
) -> None:
    head_dim, seq_len, num_queries = 10, 90, 4
    w_k, w_v = (
        torch.randn(NUM_HEADS, LATENT, head_dim, generator=generator).double() / 5 for _ in "kv"
    )
    plain = torch.randn(num_queries, NUM_HEADS, head_dim, generator=generator).double()
    rows = sequence(generator, num_queries, seq_len)
    q_rope = rows.q[..., LATENT:].double()
    rows.q[..., :LATENT] = torch.einsum("qhd,hrd->qhr", plain, w_k)
    with small_splits():
        got = attended(build_step([rows], generator, block_size=4), backend)
    got = torch.einsum("qhr,hrd->qhd", got.double(), w_v)

    latent, k_rope = rows.k[:, 0].double().split([LATENT, ROPE], -1)
    k = torch.einsum("kr,hrd->khd", latent, w_k)
    v = torch.einsum("kr,hrd->khd", latent, w_v)
    k = torch.cat([k, k_rope[:, None].expand(-1, NUM_HEADS, -1)], -1)
    q = torch.cat([plain, q_rope], -1)
    visible = torch.ones(num_queries, seq_len).tril(seq_len - num_queries).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=visible, scale=SCALE
    )
    assert close(got, expected.transpose(0, 1))


@pytest.mark.parametrize("options", ["none", "lse"])
def test_a_prompt_whole_in_chunks_token_by_token_and_in_company_has_the_same_bits(
    backend: str, options: str, generator: torch.Generator
) -> None:
    if backend == "triton" and options == "none":
        pytest.skip("the triton backend has one path")
    length = 75 if backend == "triton" else 600
    whole = sequence(generator, length, length)
    company = [sequence(generator, 3, 44), sequence(generator, 1, 70)]

    def bits(rows: list[Suffix], block_size: int) -> torch.Tensor:
        step = build_step(rows, generator, block_size=block_size)
        wish = {"lse": torch.empty(step.q.shape[:2])} if options == "lse" else {}
        return attended(step, backend, **wish)

    with small_splits():
        expected = bits([whole], 16)
        for end, count in [(length, 12), (64, 1), (65, 3), (1, 1)]:
            part = whole.first(end, count)
            rows = expected[end - count : end]
            assert torch.equal(bits([part], 1), rows)
            assert torch.equal(bits([company[0], part, company[1]], 64)[3:-1], rows)
    assert close(expected, reference(whole)[0])


@pytest.mark.parametrize("num_heads", [NUM_HEADS, 20])
def test_rows_taken_in_chunks_have_the_same_bits(
    backend: str, num_heads: int, generator: torch.Generator
) -> None:
    rows = [sequence(generator, n, n + 40, num_heads=num_heads) for n in (4, 0, 6, 1)]
    step = build_step(rows, generator, block_size=4)
    with small_splits():
        expected = attended(step, backend)
    with small_splits(budget=1):  # a tile of rows at a time
        assert torch.equal(attended(step, backend), expected)
    assert close(expected, torch.cat([reference(one)[0] for one in rows]))


def test_reading_a_common_prefix_once_changes_no_bit(
    backend: str, generator: torch.Generator
) -> None:
    prefix = sequence(generator, 0, 70)
    members = [sequence(generator, min(2, own), 70 + own) for own in (1, 40, 3)]
    for member in members:
        member.k[:70] = prefix.k
    step = build_step([*members, sequence(generator, 1, 90)], generator, block_size=1)
    step.block_table[1:3, :70] = step.block_table[0, :70]
    prefixes = SharedPrefixes.of([([2, 0, 1], 70)])
    with small_splits():
        expected = attended(step, backend)
        assert torch.equal(attended(step, backend, prefixes=prefixes), expected)
        nobody = SharedPrefixes.of([])
        assert torch.equal(attended(step, backend, prefixes=nobody), expected)
    assert close(expected[:5], torch.cat([reference(member)[0] for member in members]))


def test_a_plan_and_its_scratch_serve_every_layer(backend: str, generator: torch.Generator) -> None:
    step = build_step([sequence(generator, 1, n) for n in (66, 9)], generator, block_size=4)
    tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
    sizes = {"num_heads": NUM_HEADS, "num_tokens": 2, "backend": backend}
    with small_splits():
        expected = attended(step, backend)
        bounded = plan_mla(*tables, max_seq_len=66, **sizes)
        for plan in (plan_mla(*tables, scratch=PoisonedScratch(step.q.device), **sizes), bounded):
            for _ in range(2):
                assert torch.equal(attended(step, backend, plan=plan), expected)
        other = plan_mla(*tables, **{**sizes, "num_heads": 1})
        with pytest.raises(
            ValueError, match=r"number of heads .*is not what the plan was made for"
        ):
            attended(step, backend, plan=other)
        step.q = step.q[:1]
        with pytest.raises(ValueError, match=r"q_latent has 1 rows, but .* 2"):
            attended(step, backend, plan=bounded)


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scaled_latent_means_stored_times_scale(
    backend: str, dtype: torch.dtype, pool_dtype: torch.dtype, generator: torch.Generator
) -> None:
    rows = [sequence(generator, n, length) for n, length in [(2, 70), (9, 40)]]
    scale = torch.tensor([0.03])
    for one in rows:
        stored = (one.k / scale).clamp(-127, 127).round().to(pool_dtype)
        one.k, one.q = stored.float(), one.q.to(dtype)
    step = build_step(rows, generator, block_size=4)
    pool = step.k_pool.nan_to_num(127.0) if pool_dtype == torch.int8 else step.k_pool
    step = replace(step, k_pool=pool.to(pool_dtype))
    with small_splits():
        got = attended(step, backend, pool_scale=scale)
        last = replace(step, q=step.q[1:2], q_start=torch.tensor([0, 1, 1], dtype=torch.int32))
        assert torch.equal(attended(last, backend, pool_scale=scale), got[1:2])
    meant = [replace(one, k=one.k * scale) for one in rows]
    assert close(got, torch.cat([reference(one)[0] for one in meant]), TOLERANCE[dtype])


def test_the_halves_of_a_slot_are_stored_and_copied_as_keys_and_values(
    backend: str, generator: torch.Generator
) -> None:
    rows = sequence(generator, 2, 11)
    pool = torch.full((6, 4, 1, LATENT + ROPE), float("nan"))
    k_pool, v_pool = pool.chunk(2, -1)
    slots = torch.tensor([2 * 4, 9, 10, 11, 0, 1, 2, 3, 16, 17, 18])
    store_kv(*rows.k.chunk(2, -1), k_pool, v_pool, slots, backend=backend)
    source, target, num_slots = (torch.tensor([n]) for n in (4, 5, 3))
    copy_blocks(k_pool[None], v_pool[None], source, target, num_slots, backend=backend)
    table = torch.tensor([[2, 0, 4], [2, 0, 5]], dtype=torch.int32)
    lens, starts = (torch.tensor(n, dtype=torch.int32) for n in ([11, 11], [0, 2, 4]))
    step = Step(torch.cat([rows.q, rows.q]), pool, pool, table, lens, starts)
    with small_splits():
        got = attended(step, backend)
    assert close(got[:2], reference(rows)[0])
    assert torch.equal(got[:2], got[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_shipped_sizes_agree_across_splits_and_companies(
    backend: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    rows = sequence(generator, 9, 1033, num_heads=2, dims=(512, 64), dtype=dtype)
    rows.q /= 4  # 576 products a score
    step = build_step([rows], generator, block_size=64)
    expected = attended(step, backend, 512)
    assert close(expected, reference(rows, 512)[0], TOLERANCE[dtype])
    for count in (1, 2):
        got = attended(build_step([rows.last(count)], generator), backend, 512)
        assert torch.equal(got, expected[-count:])


WRONG = {
    r"q_rope has shape \[2, 4, 8\], expected \[2, 3, P\]": {"q_rope": torch.zeros(2, 4, 8)},
    r"pool has shape \[3, 4, 2, 32\], expected \[N, B, 1, 32\]": {"pool": torch.zeros(3, 4, 2, 32)},
    r"pool has shape \[3, 4, 1, 31\], expected \[N, B, 1, 32\]": {"pool": torch.zeros(3, 4, 1, 31)},
    r"q_latent has dtype torch.bfloat16": {"q_latent": torch.zeros(2, 3, 24, dtype=torch.bfloat16)},
    r"q_rope has dtype torch.float16": {"q_rope": torch.zeros(2, 3, 8, dtype=torch.float16)},
    "pool has stride 2 in its last": {"pool": torch.zeros(3, 4, 1, 64)[..., ::2]},
    r"out has shape \[2, 3, 32\], expected \[2, 3, 24\]": {"out": torch.zeros(2, 3, 32)},
    "pool_scale is given, but a pool of torch.float32": {"pool_scale": torch.ones(1)},
    "pool_scale is None, but a pool of torch.int8": {"pool": torch.zeros(3, 4, 1, 32).char()},
    r"pool_scale has shape \[2\], expected \[1\]": {
        "pool": torch.zeros(3, 4, 1, 32).char(),
        "pool_scale": torch.ones(2),
    },
    r"lse has shape \[2\], expected \[2, 3\]": {"lse": torch.zeros(2)},
    "q_rope is on meta, expected cpu": {"q_rope": torch.zeros(2, 3, 8, device="meta")},
    r"seq_lens has dtype torch.int64": {"seq_lens": torch.tensor([5])},
    "plan is a ExtendPlan, not one of plan_mla": {"plan": "another"},
    "q_latent has 2 rows, but q_start ends at 1": {"q_start": torch.tensor([0, 1]).int()},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_that_does_not_fit_is_named(message: str) -> None:
    from kernels import ExtendPlan

    arguments = {
        "q_latent": torch.zeros(2, 3, 24),
        "q_rope": torch.zeros(2, 3, 8),
        "pool": torch.zeros(3, 4, 1, 32),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([5], dtype=torch.int32),
        "q_start": torch.tensor([0, 2], dtype=torch.int32),
        **WRONG[message],
    }
    if "plan" in arguments:
        arguments["plan"] = ExtendPlan(2)
    with pytest.raises((ValueError, TypeError), match=message):
        mla_attention(**arguments, scale=1.0, backend="torch")


def test_latents_too_wide_for_a_tile_are_refused(backend: str, generator: torch.Generator) -> None:
    rows = sequence(generator, 1, 2, dims=(513, 8))
    step = build_step([rows], generator)
    if backend != "triton":  # which has no tiles of values
        assert close(attended(step, backend, 513), reference(rows, 513)[0])
        return
    with pytest.raises(ValueError, match="q_latent has latents of 513; the triton backend takes"):
        attended(step, backend, 513)
