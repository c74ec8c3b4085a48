"""Penalties, masks, noise and the draw, on whichever backend this process has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import mask_logits, penalise, sample, uniform_noise


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Philox 4x32-10 in plain Python."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        word = 0xFFFFFFFF
        counter = [
            high >> 32 ^ counter[1] ^ key[0],
            high & word,
            low >> 32 ^ counter[3] ^ key[1],
            low & word,
        ]
        key = (key[0] + 0x9E3779B9 & word, key[1] + 0xBB67AE85 & word)
    return counter


def test_the_generator_is_the_published_one() -> None:
    # the known answers that come with the authors' code
    assert philox((0, 0), [0, 0, 0, 0])[0] == 0x6627E8D5
    assert philox((0xFFFFFFFF,) * 2, [0xFFFFFFFF] * 4)[0] == 0x408F276D


def test_noise_is_a_function_of_seed_position_and_token(backend: str) -> None:
    seeds, positions = longs(0, 7, -1, 2**62 + 5), longs(0, 3, 2**40 + 1, 9)
    got = uniform_noise(seeds, positions, 70, backend=backend)
    for row in range(4):
        seed, position = int(seeds[row]) % 2**64, int(positions[row])
        key = (seed & 0xFFFFFFFF, seed >> 32)
        words = [
            philox(key, [t, position & 0xFFFFFFFF, position >> 32, 0])[0] >> 8 for t in range(70)
        ]
        assert torch.equal(got[row], torch.tensor(words).float() / 2**24)
    alone = uniform_noise(seeds[2:3], positions[2:3], 70, backend=backend)
    assert torch.equal(alone[0], got[2])


def test_noise_is_uniform(backend: str) -> None:
    noise = uniform_noise(torch.arange(8), torch.arange(8), 1000, backend=backend)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert abs(noise.mean() - 0.5) < 0.02
    assert abs(noise.var() - 1 / 12) < 0.005


@settings(max_examples=20, deadline=None, database=None)
@given(st.lists(st.lists(st.integers(0, 39), unique=True), min_size=1, max_size=4), st.data())
def check_penalties(backend: str, rows: list[list[int]], data: st.DataObject) -> None:
    logits = torch.randn(len(rows), 40)
    sizes = torch.tensor([len(row) for row in rows])
    ids = ints(*(i for row in rows for i in row))
    counts = torch.randint(1, 5, ids.shape, dtype=torch.int32)
    start = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    repetition, frequency, presence = (torch.rand(len(rows)) + least for least in (0.5, 0, 0))
    expected = logits.double()
    for r, row in enumerate(rows):
        for place, token in enumerate(row, int(start[r])):
            x = expected[r, token]
            x = x / repetition[r] if x > 0 else x * repetition[r]
            expected[r, token] = x - counts[place] * frequency[r] - presence[r]
    penalties = {"repetition": repetition, "frequency": frequency, "presence": presence}
    penalise(logits, ids, counts, start, **penalties, backend=backend)
    assert torch.allclose(logits.double(), expected, atol=1e-5)


def test_tokens_that_came_before_are_penalised_and_no_others(backend: str) -> None:
    check_penalties(backend)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 70, 4100])
def test_a_mask_hides_what_its_bits_leave_out(backend: str, vocab_size: int) -> None:
    wide = torch.randn(3, vocab_size + 2)
    logits, before = wide[:, :vocab_size], wide.clone()
    words = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab_size // 32)), dtype=torch.int32)
    words[1] = -1
    words[2] = 0
    mask_logits(logits, words, backend=backend)
    for row in range(3):
        for token in range(vocab_size):
            bit = int(words[row, token // 32]) >> token % 32 & 1
            assert logits[row, token] == (before[row, token] if bit else float("-inf"))
    assert torch.equal(wide[:, vocab_size:], before[:, vocab_size:])


def kept_tokens(logits: list[float], k: int, p: float, least: float) -> list[int]:
    """What the filters keep, token by token in float64; ties go to the lower id."""
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[: k or None]
    weights = [torch.tensor(logits[t] - max(logits), dtype=torch.float64).exp() for t in order]
    mass, kept = 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if not kept or ((p == 1 or mass < p * sum(weights)) and weight >= least):
            kept.append(token)
        mass += weight
    return kept


@settings(max_examples=25, deadline=None, database=None)
@given(
    st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=10),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.97, 0.613, 0.211, 1e-4]),
    st.sampled_from([0.0, 0.033, 0.29, 1.0]),
)
def check_filters(backend: str, logits: list[float], k: int, p: float, least: float) -> None:
    kept = kept_tokens(logits, k, p, least)
    # each row's noise all but forces one token, which is drawn if and only if it was kept
    size = len(logits)
    noise = torch.full((size, size), 1e-19) + torch.eye(size) * (1 - 1e-7)
    limits = {
        "temperature": torch.full((size,), 1.0),
        "top_k": torch.full((size,), k),
        "top_p": torch.full((size,), p),
        "min_p": torch.full((size,), least),
    }
    drawn = sample(torch.tensor([logits] * size), noise, **limits, backend=backend).tolist()
    assert {token for token, row in enumerate(drawn) if token == row} == set(kept)
    assert set(drawn) == set(kept)


def test_the_filters_keep_what_the_definition_keeps(backend: str) -> None:
    check_filters(backend)


@settings(max_examples=8, deadline=None, database=None)
@given(st.sampled_from([5, 64, 1500]), st.integers(0, 2**40))
def check_draws(backend: str, vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab_size, generator=generator) * 3
    logits[3, 1:] = float("-inf")
    seeds, positions = torch.arange(4) + seed, torch.tensor([1, 2, 3, seed])
    limits = {
        "temperature": torch.tensor([0.7, 1.0, 1.9, 1.0]),
        "top_k": longs(0, 3, 50, 2),
        "top_p": torch.tensor([1.0, 0.9, 0.95, 0.5]),
        "min_p": torch.tensor([0.0, 0.0, 0.01, 0.1]),
    }
    where = {"seeds": seeds, "positions": positions}
    drawn = sample(logits, **limits, **where, backend=backend)
    noise = uniform_noise(seeds, positions, vocab_size, backend=backend)
    assert torch.equal(sample(logits, noise, **limits, backend=backend), drawn)
    assert torch.equal(sample(logits, noise, **limits, backend="torch"), drawn)
    assert drawn[3] == 0
    for row in range(4):
        one = slice(row, row + 1)
        alone = sample(
            logits[one],
            **{name: value[one] for name, value in (limits | where).items()},
            backend=backend,
        )
        assert alone[0] == drawn[row]


def test_a_draw_is_its_rows_own_and_that_of_the_reference(backend: str) -> None:
    check_draws(backend)


def test_a_draw_needs_noise_or_its_origin() -> None:
    limits = {
        "temperature": torch.ones(1),
        "top_k": longs(0),
        "top_p": torch.ones(1),
        "min_p": torch.zeros(1),
    }
    with pytest.raises(ValueError, match="give seeds and positions, or the noise itself"):
        sample(torch.zeros(1, 4), **limits)
    with pytest.raises(ValueError, match=r"^noise has shape \[1, 3\], expected \[1, 4\]"):
        sample(torch.zeros(1, 4), torch.zeros(1, 3), **limits)
    with pytest.raises(ValueError, match=r"^allowed has shape \[1, 2\], expected \[1, 1\]"):
        mask_logits(torch.zeros(1, 4), torch.zeros(1, 2, dtype=torch.int32))
