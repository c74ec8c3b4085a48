"""Windows, sinks, soft caps, trees, scales and the log-sum-exp, on whichever backend this has.

Values agree with a float64 reference that knows no tiles; bits do not tell the list of work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import SharedPrefixes, extend_attention
from kernels.backend import QUANTISED_DTYPES
from tests.kernels.conftest import INTERPRETED
from tests.kernels.test_decode_attention import (
    HEADS,
    NUM_HEADS,
    SCALE,
    cascaded,
    decoded,
    extended,
    small_splits,
)
from tests.support.paged_attention import Step, Suffix, build_step, random_suffix

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Wish:
    """Options of a call; what belongs to tokens is given by sequence."""

    window: int | None = None
    sinks: torch.Tensor | None = None
    soft_cap: float | None = None
    trees: list[torch.Tensor] | None = None  # [n] int64 of each sequence

    def options(self) -> dict[str, object]:
        """Return the keywords of a call."""
        trees = None if self.trees is None else torch.cat(self.trees)
        return {
            "window": self.window,
            "sinks": self.sinks,
            "soft_cap": self.soft_cap,
            "tree_mask": trees,
        }

    def reference(self, suffix: Suffix, index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of one sequence, in float64."""
        num_queries, num_heads, _ = suffix.q.shape
        seq_len, num_kv_heads, _ = suffix.k.shape
        group = num_heads // num_kv_heads
        k, v = (x.double().repeat_interleave(group, 1) for x in (suffix.k, suffix.v))
        scores = torch.einsum("qhd,khd->qhk", suffix.q.double(), k) * SCALE
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        first_new = seq_len - num_queries
        for row in range(num_queries):
            for key in range(seq_len):
                hidden = key > first_new + row
                if self.trees is not None and 0 <= key - first_new < 64:
                    hidden |= not int(self.trees[index][row]) >> (key - first_new) & 1
                if hidden:
                    scores[row, :, key] = -math.inf
            if self.window is not None:
                seen = scores[row, 0].isfinite().nonzero().squeeze(1)
                scores[row, :, seen[: -self.window]] = -math.inf
        if self.sinks is not None:
            sink = self.sinks.double().expand(num_queries, -1)[..., None]
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., :seq_len]
        return torch.einsum("qhk,khd->qhd", weights, v), scores.logsumexp(-1)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(got.double(), expected, rtol=0, atol=tolerance)


def check_values(step: Step, suffixes: list[Suffix], wish: Wish, backend: str) -> torch.Tensor:
    lse = torch.full((step.q.shape[0], NUM_HEADS), float("nan"))
    got = extended(step, backend, lse=lse, **wish.options())
    pairs = [wish.reference(suffix, index) for index, suffix in enumerate(suffixes)]
    assert close(got, torch.cat([out for out, _ in pairs]), TOLERANCE[got.dtype])
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-3
    assert close(lse, torch.cat([norm for _, norm in pairs]), tolerance)
    return got


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    sinks = draw(st.sampled_from([None, -2.0, 5.0]))
    return Wish(
        window=draw(st.sampled_from([None, 1, 16, 40])),
        sinks=None if sinks is None else torch.linspace(sinks, 2.0, NUM_HEADS),
        soft_cap=draw(st.sampled_from([None, 2.0, 30.0])),
    )


def test_options_match_a_float64_reference_on_ragged_steps(backend: str) -> None:
    sequence = st.tuples(st.integers(0, 6), st.integers(0, 80))

    @settings(max_examples=12 if INTERPRETED else 40, deadline=None, database=None)
    @given(
        st.lists(sequence, min_size=1, max_size=3),
        wishes(),
        st.sampled_from(list(TOLERANCE)),
        st.sampled_from([1, 8]),
    )
    def check(
        pairs: list[tuple[int, int]], wish: Wish, dtype: torch.dtype, block_size: int
    ) -> None:
        generator = torch.Generator().manual_seed(len(pairs))
        suffixes = [
            random_suffix(generator, n, max(1, n + before), heads=HEADS, dtype=dtype)
            for n, before in pairs
        ]
        step = build_step(suffixes, generator, block_size=block_size)
        with small_splits():
            got = check_values(step, suffixes, wish, backend)
            lse = torch.empty(step.q.shape[0], NUM_HEADS)
            assert torch.equal(decoded(step, backend, lse=lse, **wish.options()), got)

    check()


WISHES = [
    Wish(window=37),
    Wish(soft_cap=3.0),
    Wish(sinks=torch.linspace(-1.0, 6.0, NUM_HEADS)),
    Wish(window=50, soft_cap=9.0, sinks=torch.linspace(-1.0, 1.0, NUM_HEADS)),
]


@pytest.mark.parametrize("wish", WISHES, ids=["window", "soft cap", "sinks", "all"])
def test_options_leave_the_bits_to_the_row(
    backend: str, wish: Wish, generator: torch.Generator
) -> None:
    length = 110 if backend == "triton" else 600
    whole = random_suffix(generator, length, length, heads=HEADS, dtype=torch.float32)
    options = wish.options()
    company = random_suffix(generator, 3, 44, heads=HEADS, dtype=torch.float32)
    with small_splits(widening=4):
        expected = extended(build_step([whole], generator), backend, **options)
        for end, count in [(length, 30), (101, 7), (65, 1)]:
            suffixes = [company, whole.first(end, count)]
            step = build_step(suffixes, generator, block_size=4)
            rows = expected[end - count : end]
            assert torch.equal(extended(step, backend, **options)[3:], rows)
            assert torch.equal(decoded(step, backend, **options)[3:], rows)


@pytest.mark.parametrize("wish", WISHES, ids=["window", "soft cap", "sinks", "all"])
def test_options_leave_the_bits_to_the_row_behind_a_common_prefix(
    backend: str, wish: Wish, generator: torch.Generator
) -> None:
    members = [
        random_suffix(generator, 1, n, heads=HEADS, dtype=torch.float32) for n in (70, 99, 140)
    ]
    for member in members[1:]:
        member.k[:68], member.v[:68] = members[0].k[:68], members[0].v[:68]
    step = build_step(members, generator, block_size=4)
    step.block_table[1:, :17] = step.block_table[0, :17]
    prefixes = SharedPrefixes.of([([2, 0, 1], 68)])
    with small_splits():
        expected = extended(step, backend, **wish.options())
        assert torch.equal(cascaded(step, prefixes, backend, **wish.options()), expected)
    outputs = [wish.reference(member)[0] for member in members]
    assert close(expected, torch.cat(outputs), 1e-5)


def test_blocks_before_the_window_may_be_gone(backend: str, generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 3, 90, heads=HEADS, dtype=torch.float32)
    step = build_step([suffix], generator, block_size=4)
    wish = Wish(window=21)
    lowest = 90 - 3 - 21 + 1
    for ordinal in range(lowest // 4 + 1):
        block = step.block_table[0, ordinal]
        for pool in (step.k_pool, step.v_pool):
            pool[block, : max(0, lowest - ordinal * 4)] = float("nan")
    step.block_table[0, : lowest // 4] = -1
    with small_splits():
        got = check_values(step, [suffix], wish, backend)
        assert torch.equal(decoded(step, backend, **wish.options()), got)


def test_drafts_of_a_tree_see_their_ancestors_only(
    backend: str, generator: torch.Generator
) -> None:
    # 0 ── 1 ── 3      4 is a second child of 0's, a sibling of 1; 2 is another root
    rows = [0b00001, 0b00011, 0b00100, 0b01011, 0b10001]
    tree = torch.tensor(rows, dtype=torch.int64)
    drafts = random_suffix(generator, 5, 75, heads=HEADS, dtype=torch.float32)
    prompt = random_suffix(generator, 70, 70, heads=HEADS, dtype=torch.float32)
    step = build_step([prompt, drafts], generator, block_size=4)
    wish = Wish(trees=[torch.full((70,), -1), tree])
    with small_splits():
        got = check_values(step, [prompt, drafts], wish, backend)
        assert torch.equal(decoded(step, backend, **wish.options()), got)


@pytest.mark.parametrize("window", [1, 2, 3, 20, 71])
def test_a_window_counts_the_keys_of_a_drafts_own_path(
    backend: str, window: int, generator: torch.Generator
) -> None:
    rows = [0b00001, 0b00011, 0b00100, 0b01011, 0b10001]
    drafts = random_suffix(generator, 5, 75, heads=HEADS, dtype=torch.float32)
    # the prompt's last rows are past the 64 tokens that bits tell of
    prompt = random_suffix(generator, 70, 73, heads=HEADS, dtype=torch.float32)
    step = build_step([prompt, drafts], generator, block_size=4)
    scattered = torch.full((70,), -1)
    scattered[60:64] = 0b1001_0110 - (1 << 63)
    for row in (60, 61, 62):
        scattered[row] |= 1 << row
    wish = Wish(window=window, trees=[scattered, torch.tensor(rows)])
    with small_splits():
        got = check_values(step, [prompt, drafts], wish, backend)
        assert torch.equal(decoded(step, backend, **wish.options()), got)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2.0, 2.0, NUM_HEADS)])
@pytest.mark.parametrize(("window", "length"), [(1, 75), (None, 3)])
def test_a_row_that_sees_nothing_is_zeros_and_no_nan(
    backend: str,
    window: int | None,
    length: int,
    sinks: torch.Tensor | None,
    generator: torch.Generator,
) -> None:
    """The second row's own bit is clear, and so are all others'; others keep their bits."""
    drafts = random_suffix(generator, 3, length, heads=HEADS, dtype=torch.float32)
    step = build_step([drafts], generator)
    options = {"window": window, "sinks": sinks}
    with small_splits():
        masks = [torch.tensor([0b001, second, 0b100]) for second in (0b000, 0b010)]
        lse = torch.full((3, NUM_HEADS), float("nan"))
        blind = extended(step, backend, tree_mask=masks[0], lse=lse, **options)
        usual = extended(step, backend, tree_mask=masks[1], **options)
        assert torch.equal(decoded(step, backend, tree_mask=masks[0], **options), blind)
    assert torch.equal(blind[[0, 2]], usual[[0, 2]])
    assert not blind[1].any()
    nothing = torch.full((NUM_HEADS,), float("-inf")) if sinks is None else sinks
    assert torch.allclose(lse[1], nothing)


def test_a_windowed_chain_has_the_bits_of_a_window_alone(
    backend: str, generator: torch.Generator
) -> None:
    drafts = random_suffix(generator, 5, 75, heads=HEADS, dtype=torch.float32)
    step = build_step([drafts], generator)
    ancestors = torch.tensor([0b00001, 0b00011, 0b00111, 0b01111, 0b11111])
    with small_splits():
        for window in (2, 40):
            plain = extended(step, backend, window=window)
            assert torch.equal(extended(step, backend, window=window, tree_mask=ancestors), plain)


def test_a_tree_that_is_a_chain_has_the_bits_of_plain_attention(
    backend: str, generator: torch.Generator
) -> None:
    drafts = random_suffix(generator, 5, 75, heads=HEADS, dtype=torch.float32)
    step = build_step([drafts], generator)
    ancestors = torch.tensor([0b00001, 0b00011, 0b00111, 0b01111, 0b11111])
    with small_splits():
        lse = torch.empty(5, NUM_HEADS)  # keeps the torch backend on one path
        plain = extended(step, backend, lse=lse)
        assert torch.equal(extended(step, backend, tree_mask=ancestors), plain)
        assert torch.equal(extended(step, backend, tree_mask=torch.full((5,), -1)), plain)


def quantised(
    step: Step, dtype: torch.dtype, by_slot: bool, generator: torch.Generator
) -> tuple[Step, dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Store a step in eight bits; return it, its scales, and what its pools mean."""
    shape = step.k_pool.shape[:3] if by_slot else step.k_pool.shape[2:3]
    scales = {
        name: torch.rand(shape, generator=generator) / 64 + 0.01 for name in ("k_scale", "v_scale")
    }
    pools, meanings = [], []
    for pool, scale in zip((step.k_pool, step.v_pool), scales.values(), strict=True):
        poison = pool.isnan()
        values = (pool / scale[..., None]).clamp(-127, 127)
        stored = values.nan_to_num(127.0).round().to(dtype)
        meanings.append(stored.float() * scale[..., None])
        if dtype != torch.int8:
            stored = stored.float().masked_fill(poison, float("nan")).to(dtype)
        if by_slot:
            scale.masked_fill_(poison[..., 0], float("nan"))
        pools.append(stored)
    return replace(step, k_pool=pools[0], v_pool=pools[1]), scales, (meanings[0], meanings[1])


@pytest.mark.parametrize("by_slot", [False, True], ids=["by head", "by slot and head"])
@pytest.mark.parametrize("kv_dtype", QUANTISED_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_keys_and_values_mean_stored_times_scale(
    backend: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    by_slot: bool,
    generator: torch.Generator,
) -> None:
    suffixes = [
        random_suffix(generator, n, length, heads=HEADS, dtype=torch.float32)
        for n, length in [(2, 70), (9, 40)]
    ]
    step = build_step(suffixes, generator, block_size=4)
    step, scales, meanings = quantised(step, kv_dtype, by_slot, generator)
    step.q = step.q.to(dtype)
    for row, suffix in enumerate(suffixes):
        at = torch.arange(suffix.k.shape[0])
        blocks = step.block_table[row, at // 4].long()
        suffix.k, suffix.v = (pool[blocks, at % 4] for pool in meanings)
        suffix.q = suffix.q.to(dtype)
    with small_splits():
        got = extended(step, backend, **scales)
        outputs = [Wish().reference(suffix)[0] for suffix in suffixes]
        assert close(got, torch.cat(outputs), TOLERANCE[dtype])
        assert torch.equal(decoded(step, backend, **scales), got)


WRONG = {
    "window is 0, expected at least 1": {"window": 0},
    "window is True, expected at least 1": {"window": True},
    "soft_cap is -1.0, expected more than 0": {"soft_cap": -1.0},
    "soft_cap is inf, expected more than 0": {"soft_cap": float("inf")},
    "scale is nan, expected a finite number": {"scale": float("nan")},
    r"sinks has shape \[5\], expected \[\d\]": {"sinks": torch.zeros(5)},
    r"tree_mask has shape \[3\], expected \[2\]": {"tree_mask": torch.zeros(3, dtype=torch.int64)},
    r"lse has shape \[2\], expected \[2, \d\]": {"lse": torch.zeros(2)},
    r"lse has strides \(1, 2\)": {"lse": torch.zeros(NUM_HEADS, 2).T},
    "k_scale is given, but pools of torch.float32": {"k_scale": torch.ones(HEADS[0])},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_option_that_does_not_fit_is_named(message: str, generator: torch.Generator) -> None:
    suffix = random_suffix(generator, 2, 9, heads=HEADS, dtype=torch.float32)
    step = build_step([suffix], generator)
    with pytest.raises(ValueError, match=message):
        step.run(extend_attention, **{"scale": 1.0, "backend": "torch"} | WRONG[message])
