"""One family of attention: decode, shared prefixes and extend give a row the same bits.

Small splits show many of them with few keys; a test with the shipped sizes follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import (
    Scratch,
    SharedPrefixes,
    decode_attention,
    extend_attention,
    plan_decode,
    plan_extend,
    plan_shared_prefix,
    shared_prefix_attention,
)
from tests.kernels.conftest import INTERPRETED, start_child
from tests.support.paged_attention import Step, Suffix, build_step, dense_attention, random_suffix

HEADS = (1 if INTERPRETED else 2, 3, 16)  # an interpreter runs key heads one by one
NUM_HEADS = HEADS[0] * HEADS[1]
SCALE = 0.25


@contextmanager
def small_splits(rows: int = 16, split: int = 32, widening: int = 1) -> Iterator[None]:
    """Shrink the tiles and splits of the Triton kernel."""
    if not INTERPRETED:  # the torch backend has one tile
        yield
        return
    from kernels import _attention_triton

    sizes = _attention_triton.Sizes(rows, 16, split, 4, 2, widening)
    with mock.patch.object(_attention_triton, "choose_sizes", return_value=sizes):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def family(
    generator: torch.Generator, shared: int, owns: list[int], *, num_queries: int = 1
) -> list[Suffix]:
    """Sequences that begin alike."""
    prefix = random_suffix(generator, 0, shared, heads=HEADS, dtype=torch.float32)
    members = []
    for own in owns:
        count = min(num_queries, own)
        member = random_suffix(generator, count, shared + own, heads=HEADS, dtype=torch.float32)
        member.k[:shared], member.v[:shared] = prefix.k, prefix.v
        members.append(member)
    return members


class PoisonedScratch(Scratch):
    """Partial results that nobody wrote are NaN."""

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return super().take(name, *shape).fill_(float("nan"))


def poisoned(step: Step) -> torch.Tensor:
    return torch.full_like(step.q, float("nan"))


def extended(step: Step, backend: str, **options: object) -> torch.Tensor:
    out = poisoned(step)
    step.run(extend_attention, scale=SCALE, backend=backend, out=out, **options)
    return out


def decoded(step: Step, backend: str, **options: object) -> torch.Tensor:
    out = poisoned(step)
    options.setdefault("scratch", PoisonedScratch(step.q.device))
    step.run(decode_attention, scale=SCALE, backend=backend, out=out, **options)
    return out


def cascaded(step: Step, prefixes: SharedPrefixes, backend: str, **options: object) -> torch.Tensor:
    out = poisoned(step)
    options.setdefault("scratch", PoisonedScratch(step.q.device))
    tables = (step.k_pool, step.v_pool, step.block_table, step.seq_lens, step.q_start)
    shared_prefix_attention(
        step.q, *tables, prefixes, scale=SCALE, backend=backend, out=out, **options
    )
    return out


def close(got: torch.Tensor, suffixes: list[Suffix]) -> bool:
    expected = torch.cat([dense_attention(suffix, SCALE) for suffix in suffixes])
    return torch.allclose(got.double(), expected, rtol=0, atol=2e-6)


def test_decode_is_extend_bit_for_bit_on_ragged_steps(backend: str) -> None:
    sequence = st.tuples(st.integers(0, 7), st.integers(0, 110))

    @settings(max_examples=12 if INTERPRETED else 40, deadline=None, database=None)
    @given(
        st.lists(sequence, min_size=1, max_size=3),
        st.sampled_from([1, 4, 64]),
        st.sampled_from([16, 32]),
    )
    def check(pairs: list[tuple[int, int]], block_size: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(len(pairs))
        suffixes = [
            random_suffix(generator, n, max(1, n + before), heads=HEADS, dtype=torch.float32)
            for n, before in pairs
        ]
        step = build_step(suffixes, generator, block_size=block_size)
        with small_splits():
            expected = extended(step, backend)
        with small_splits(rows=rows):
            got = decoded(step, backend)
        assert torch.equal(got, expected)
        assert close(got, suffixes)

    check()


def test_a_prompt_whole_in_chunks_token_by_token_and_split_has_the_same_bits(
    backend: str, generator: torch.Generator
) -> None:
    length = 120
    whole = random_suffix(generator, length, length, heads=HEADS, dtype=torch.float32)
    with small_splits(widening=4):
        expected = extended(build_step([whole], generator), backend)
        for end, count in [(length, 50), (101, 7), (64, 1), (65, 1), (length, 1), (1, 1)]:
            step = build_step([whole.first(end, count)], generator)
            rows = expected[end - count : end]
            assert torch.equal(extended(step, backend), rows)
            assert torch.equal(decoded(step, backend), rows)


@pytest.mark.parametrize("shared", [31, 64, 100])
def test_reading_a_common_prefix_once_changes_no_bit(
    backend: str, shared: int, generator: torch.Generator
) -> None:
    first = family(generator, shared, [1, 40, 3, 70, 8], num_queries=2)
    alone = [random_suffix(generator, 1, n, heads=HEADS, dtype=torch.float32) for n in (5, 90)]
    step = build_step([*first, *alone], generator, block_size=1)
    step.block_table[1:5, :shared] = step.block_table[0, :shared]
    prefixes = SharedPrefixes.of([([3, 0, 4, 1, 2], shared)])
    with small_splits():
        expected = decoded(step, backend)
        assert torch.equal(cascaded(step, prefixes, backend), expected)
        assert torch.equal(extended(step, backend), expected)
    assert close(expected, [*first, *alone])


def test_groups_may_be_many_empty_and_padded(backend: str, generator: torch.Generator) -> None:
    families = [family(generator, 70, [2, 9]), family(generator, 40, [1, 30, 4])]
    step = build_step([*families[0], *families[1]], generator, block_size=2)
    step.block_table[1, :35] = step.block_table[0, :35]
    step.block_table[3:, :20] = step.block_table[2, :20]
    # members past the last start are unused places of a captured graph
    prefixes = SharedPrefixes(
        *(
            torch.tensor(values, dtype=torch.int32)
            for values in ([1, 0, 2, 4, 3, 0, 0], [0, 0, 2, 5, 5], [99, 70, 40, 0])
        )
    )
    with small_splits():
        expected = decoded(step, backend)
        assert torch.equal(cascaded(step, prefixes, backend), expected)
        nobody = SharedPrefixes.of([])
        assert torch.equal(cascaded(step, nobody, backend), expected)
    assert close(expected, [*families[0], *families[1]])


def test_a_prefix_shared_beyond_the_queries_is_still_causal(
    backend: str, generator: torch.Generator
) -> None:
    members = family(generator, 96, [2, 2], num_queries=2)
    early = random_suffix(generator, 3, 50, heads=HEADS, dtype=torch.float32)
    early.k, early.v = members[0].k[:50], members[0].v[:50]
    step = build_step([*members, early], generator, block_size=1)
    step.block_table[1, :96] = step.block_table[0, :96]
    step.block_table[2, :50] = step.block_table[0, :50]
    with small_splits():
        got = cascaded(step, SharedPrefixes.of([([0, 1, 2], 96)]), backend)
        assert torch.equal(got, extended(step, backend))
    assert close(got, [*members, early])


def test_a_plan_and_its_scratch_serve_every_layer(backend: str, generator: torch.Generator) -> None:
    members = family(generator, 64, [3, 40, 20])
    step = build_step(members, generator, block_size=4)
    step.block_table[1:, :16] = step.block_table[0, :16]
    prefixes = SharedPrefixes.of([([0, 1, 2], 64)])
    tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
    scratch = PoisonedScratch(torch.device("cpu"))
    sizes = {"num_heads": NUM_HEADS, "num_tokens": 3, "backend": backend, "scratch": scratch}
    with small_splits():
        expected = extended(step, backend)
        plans = (plan_decode(*tables, **sizes), plan_extend(*tables, **sizes))
        cascade = plan_shared_prefix(*tables, prefixes, **sizes)
        for _ in range(2):
            assert torch.equal(decoded(step, backend, plan=plans[0]), expected)
            assert torch.equal(extended(step, backend, plan=plans[1]), expected)
            assert torch.equal(cascaded(step, prefixes, backend, plan=cascade), expected)
        step.q = step.q[:2]
        with pytest.raises(ValueError, match=r"q has 2 rows, but .* 3"):
            decoded(step, backend, plan=plans[0])


def test_rows_that_belong_to_no_sequence_are_left_alone(
    backend: str, generator: torch.Generator
) -> None:
    if backend != "triton":
        pytest.skip("the torch backend refuses them")
    suffix = random_suffix(generator, 2, 70, heads=HEADS, dtype=torch.float32)
    step = build_step([suffix], generator)
    step.q = torch.cat([step.q, step.q])
    with small_splits():
        for got in (decoded_padded(step, backend), extended_padded(step, backend)):
            assert close(got[:2], [suffix])
            assert got[2:].isnan().all()


def decoded_padded(step: Step, backend: str) -> torch.Tensor:
    tables = (step.k_pool, step.v_pool, step.block_table, step.seq_lens, step.q_start)
    return decode_attention(step.q, *tables, scale=SCALE, backend=backend, out=poisoned(step))


def extended_padded(step: Step, backend: str) -> torch.Tensor:
    tables = (step.k_pool, step.v_pool, step.block_table, step.seq_lens, step.q_start)
    return extend_attention(step.q, *tables, scale=SCALE, backend=backend, out=poisoned(step))


def test_a_bound_on_lengths_saves_splits_and_no_bits(
    backend: str, generator: torch.Generator
) -> None:
    suffix = random_suffix(generator, 1, 70, heads=HEADS, dtype=torch.float32)
    step = build_step([suffix], generator)
    with small_splits():
        expected = decoded(step, backend)
        assert torch.equal(decoded(step, backend, max_seq_len=70), expected)
        assert torch.equal(decoded(step, backend, max_seq_len=9999), expected)
        if backend == "triton":
            with pytest.raises(ValueError, match="max_seq_len is 0"):
                decoded(step, backend, max_seq_len=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_shipped_sizes_agree_across_splits(
    backend: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    suffix = random_suffix(generator, 45, 1100, heads=(1, 4, 64), dtype=dtype)
    expected = extended(build_step([suffix], generator), backend)
    got = decoded(build_step([suffix.last(2)], generator, block_size=64), backend)
    assert torch.equal(got, expected[-2:])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_size_matches_the_reference_on_every_list(
    backend: str, head_dim: int, generator: torch.Generator
) -> None:
    heads = (1, 8 if head_dim == 128 else 2, head_dim)
    first = random_suffix(generator, 3, 520, heads=heads, dtype=torch.bfloat16)
    second = random_suffix(generator, 1, 515, heads=heads, dtype=torch.bfloat16)
    second.k[:512], second.v[:512] = first.k[:512], first.v[:512]
    step = build_step([first, second], generator, block_size=256)
    step.block_table[1, :2] = step.block_table[0, :2]
    got = extended(step, backend)
    outputs = [dense_attention(suffix, SCALE) for suffix in (first, second)]
    assert torch.allclose(got.double(), torch.cat(outputs), rtol=0, atol=1.6e-2)
    assert torch.equal(decoded(step, backend), got)
    prefixes = SharedPrefixes.of([([0, 1], 512)])
    assert torch.equal(cascaded(step, prefixes, backend), got)


def test_wide_and_narrow_tiles_give_a_warp_the_same_rows_and_instructions(
    tmp_path: Path,
) -> None:
    pytest.importorskip("triton")
    with start_child("tests.kernels.tile_layouts", TRITON_CACHE_DIR=str(tmp_path)) as run:
        output, _ = run.communicate()
    assert run.returncode == 0, output
    wide, narrow = (json.loads(line) for line in output.splitlines())
    assert (wide["rows"], narrow["rows"]) == (128, 64)
    # warps share out the rows, 16 for each, and never the columns of a row
    assert wide["warps"] == [[8, 1]]
    assert narrow["warps"] == [[4, 1]]
    assert wide["instructions"] == narrow["instructions"]
