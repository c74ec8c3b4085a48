"""Products with weights that stay as a model file stores them."""

from __future__ import annotations

import pytest
import torch

from kernels import PackedWeight, QuantisedWeight, linear, native, pack_weight
from kernels.formats import BLOCKS
from tests.support.quantised import meaning, random_quantised

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS = pytest.mark.parametrize("kind", BLOCKS)
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 13, 40, 96, 97)


def packed(*weights: torch.Tensor | QuantisedWeight, **options: object) -> PackedWeight:
    made = pack_weight(list(weights), backend="native", **options)  # type: ignore[arg-type]
    assert isinstance(made, PackedWeight)
    return made


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as 8-bit products see them, in float64."""
    blocks = x.float().view(len(x), -1, 32)
    peak = blocks.abs().amax(-1, keepdim=True)
    whole = (blocks.double() * (127 / peak).double()).round().nan_to_num()
    return (whole * (peak / 127).double()).view(x.shape)


@KINDS
@DTYPES
def test_numbers_are_bit_for_bit_those_that_the_format_defines(
    kind: str, dtype: torch.dtype
) -> None:
    weight = random_quantised(kind, 70, 512)
    got = packed(weight, dtype=dtype)
    assert got.formats == (kind,)
    assert torch.equal(got.plain(), meaning(weight).to(dtype))
    ids = torch.tensor([69, 0, 31, 32, 33, 0])
    assert torch.equal(got.rows(ids), meaning(weight)[ids].to(dtype))


@KINDS
@DTYPES
def test_products_have_the_bits_of_products_with_dequantised_weights(
    kind: str, dtype: torch.dtype
) -> None:
    weight = random_quantised(kind, 70, 768)
    kept, converted = packed(weight, dtype=dtype), packed(meaning(weight).to(dtype))
    x, bias = torch.randn(97, 768).to(dtype), torch.randn(70).to(dtype)
    for rows in ROWS:
        expected = linear(x[:rows], converted, bias, backend="native")
        assert torch.equal(linear(x[:rows], kept, bias, backend="native"), expected), rows


@KINDS
@DTYPES
def test_8_bit_products_are_those_of_rounded_rows_and_batch_invariant(
    kind: str, dtype: torch.dtype
) -> None:
    weight = random_quantised(kind, 70, 512)
    kept = packed(weight, dtype=dtype, int8=True)
    assert kept.int8
    x = torch.randn(97, 512).to(dtype)
    x[3, 64:96] = 0  # a block without a scale
    whole = linear(x, kept, backend="native")
    exact = rounded(x) @ meaning(weight).double().T
    error = (whole.double() - exact).abs() / exact.abs().max()
    assert error.median() < (1e-7 if dtype == torch.float32 else 1e-3)
    assert error.max() < 5e-3  # a number between two integers may go to the other one
    for rows in ROWS:
        chosen = torch.randperm(97)[:rows]
        assert torch.equal(linear(x[chosen], kept, backend="native"), whole[chosen]), rows


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@KINDS
def test_a_number_that_is_not_finite_stays_so_in_its_row_alone(
    kind: str, wrong: float, int8: bool
) -> None:
    kept = packed(random_quantised(kind, 40, 512), int8=int8)
    x = torch.randn(5, 512)
    clean = linear(x, kept, backend="native")
    x[2, 100] = wrong
    got = linear(x, kept, backend="native")
    assert not got[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("int8", [False, True])
def test_parts_of_several_formats_are_one_weight(int8: bool) -> None:
    """As q, k and v of a file that stores v in more bits; none fills its last panel."""
    parts = [random_quantised(k, n, 256, seed=n) for k, n in (("Q4_K", 40), ("Q6_K", 24))]
    numbers = torch.randn(33, 256)
    whole = packed(*parts, numbers, int8=int8)
    assert whole.shape == (97, 256)
    x, bias = torch.randn(9, 256), torch.randn(97)
    got = linear(x, whole, bias, backend="native")
    alone = [linear(x, packed(part, int8=int8), backend="native") for part in (*parts, numbers)]
    assert torch.equal(got, torch.cat(alone, 1) + bias)
    assert torch.equal(whole.plain(), torch.cat([*map(meaning, parts), numbers]))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16], ids=str)
@DTYPES
def test_16_bit_weights_multiply_rows_of_another_dtype(
    kept: torch.dtype, dtype: torch.dtype
) -> None:
    weight = torch.randn(70, 101).to(kept)
    got = packed(weight, dtype=dtype)
    assert torch.equal(got.plain(), weight.to(dtype))
    x = torch.randn(13, 101).to(dtype)
    expected = linear(x, packed(weight.to(dtype)), backend="native")
    assert torch.equal(linear(x, got, backend="native"), expected)


def test_packed_blocks_take_what_the_file_takes() -> None:
    for kind in BLOCKS:
        weight = random_quantised(kind, 64, 1024)
        assert packed(weight).nbytes <= 1.03 * weight.raw.numel()


def test_weights_that_cannot_be_are_refused() -> None:
    raw = torch.zeros(4, 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="format is 'Q9_X': choose one of Q4_0, Q4_1"):
        QuantisedWeight(raw, "Q9_X", (4, 32))
    with pytest.raises(ValueError, match="rows of 40 numbers are no multiple of Q4_1's 32"):
        QuantisedWeight(raw, "Q4_1", (4, 40))
    with pytest.raises(ValueError, match=r"raw is torch.uint8 \[4, 20\], expected uint8 \[4, 40\]"):
        QuantisedWeight(raw, "Q4_1", (4, 64))
    weight = QuantisedWeight(raw, "Q4_1", (4, 32))
    with pytest.raises(TypeError, match="weight is quantised, and the torch backend"):
        pack_weight(weight, backend="torch")
    with pytest.raises(ValueError, match="weights have rows of 32 and 64"):
        pack_weight([weight, torch.randn(4, 64)], backend="native")


@KINDS
def test_scales_that_are_not_finite_are_seen(kind: str) -> None:
    for at in BLOCKS[kind].half_bytes:
        for bad in (torch.nan, torch.inf, -torch.inf):
            weight = random_quantised(kind, 3, 512)
            assert weight.has_finite_scales()
            blocks = weight.raw.view(-1, BLOCKS[kind].num_bytes)
            blocks[4, at : at + 2] = torch.tensor([bad]).half().view(torch.uint8)
            assert not weight.has_finite_scales()
