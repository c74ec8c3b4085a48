"""A row of a product has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import PackedWeight, linear, native, pack_weight
from kernels.linear import RowLayout, default_layout
from kernels.row_check import Product, find_layout

SHAPES = [(576, 960), (576, 1536), (1536, 576), (576, 3072), (64, 96), (100, 37)]
Weight = torch.Tensor | PackedWeight
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 17, 31, 33, 63)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("packing", ["plain", "torch", "native"])
def test_a_row_has_the_same_bits_whatever_the_batch(
    dtype: torch.dtype, k: int, n: int, num_threads: int, packing: str
) -> None:
    if packing == "native" and not native.available():
        pytest.skip(native.build().reason)
    generator = torch.Generator().manual_seed(k * n)
    x = torch.randn(64, k, generator=generator).to(dtype)
    plain = torch.randn(n, k, generator=generator).to(dtype)
    wish = None if packing == "plain" else packing
    weight = pack_weight(plain, backend=wish) if wish else plain
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        parts = [(start, count) for count in COUNTS for start in (0, 64 - count)]
        assert_rows_have_their_own_bits(x, weight, parts, backend=wish or "torch")
    finally:
        torch.set_num_threads(before)


def assert_rows_have_their_own_bits(
    x: torch.Tensor, weight: Weight, parts: list[tuple[int, int]], *, backend: str
) -> None:
    """Each part (its first row, its number of rows) is the same bits alone and within the whole.

    Our kernels promise it.  Of torch's library the cheapest layout that is known is tried first;
    where a machine's library has other habits, the check at the start must find one that holds.
    """
    odd = parts_with_other_bits(x, weight, parts, backend=backend)
    if odd and backend == "torch":
        holds, layout, _ = find_layout([Product(weight)])
        assert holds
        assert layout is not None, "the check saw nothing of the default's other bits"
        odd = parts_with_other_bits(x, weight, parts, backend=backend, layout=layout)
    assert odd == []


def parts_with_other_bits(
    x: torch.Tensor,
    weight: Weight,
    parts: list[tuple[int, int]],
    *,
    backend: str,
    layout: RowLayout | None = None,
) -> list[tuple[int, int]]:
    whole = linear(x, weight, layout=layout, backend=backend)
    return [
        (start, count)
        for start, count in parts
        if not torch.equal(
            linear(x[start : start + count], weight, layout=layout, backend=backend),
            whole[start : start + count],
        )
    ]


def test_the_default_layouts_are_the_cheapest_that_the_known_libraries_need() -> None:
    plain = torch.zeros(4, 1536)
    assert default_layout(plain) == RowLayout(8)
    assert default_layout(plain.bfloat16()) == default_layout(plain.half()) == RowLayout(least=2)
    if isinstance(packed := pack_weight(plain, backend="torch"), PackedWeight):
        assert default_layout(packed) == RowLayout(least=2)
        assert default_layout(pack_weight(plain[:, :576], backend="torch")) == RowLayout()


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@settings(max_examples=25, deadline=None, database=None)
@given(
    st.integers(0, 70),
    st.sampled_from([1, 16, 37, 80]),
    st.sampled_from([1, 5, 32, 130]),
    st.sampled_from(list(TOLERANCE)),
    st.booleans(),
)
def check_product(
    backend: str, num_rows: int, inner: int, num_cols: int, dtype: torch.dtype, biased: bool
) -> None:
    # rows of wider tensors, with NaN where nothing may be read
    x, weight = (torch.full((n, inner + 8), float("nan")).to(dtype) for n in (num_rows, num_cols))
    x[:, :inner], weight[:, :inner] = torch.randn(num_rows, inner), torch.randn(num_cols, inner)
    x, weight = x[:, :inner], weight[:, :inner]
    bias = torch.randn(num_cols).to(dtype) if biased else None
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    got = linear(x, weight, bias, backend=backend)
    assert got.shape == (num_rows, num_cols)
    scale = inner**0.5
    bound = TOLERANCE[dtype] * scale
    assert torch.allclose(got.double(), expected, atol=bound, rtol=TOLERANCE[dtype])
    out = torch.full_like(got, float("nan"))
    assert linear(x, weight, bias, out=out, backend=backend) is out
    assert torch.equal(out, got)


def test_the_product_is_right_with_and_without_a_bias(backend: str) -> None:
    check_product(backend)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_row_has_its_own_bits_on_each_backend(backend: str, dtype: torch.dtype) -> None:
    x, weight = torch.randn(67, 80).to(dtype), torch.randn(70, 80).to(dtype)
    parts = [(0, 1), (66, 1), (3, 8), (30, 37), (0, 64)]
    assert_rows_have_their_own_bits(x, weight, parts, backend=backend)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("rows", "k", "n"), [(0, 8, 5), (1, 80, 70), (9, 37, 1), (70, 64, 96)])
def test_a_packed_weight_gives_the_product_of_the_plain_one(
    backend: str, dtype: torch.dtype, rows: int, k: int, n: int
) -> None:
    x = torch.full((rows, k + 8), float("nan")).to(dtype)[:, :k]
    x.copy_(torch.randn(rows, k))
    plain, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    packed = pack_weight(plain, backend=backend)
    if isinstance(packed, PackedWeight):
        assert torch.equal(packed.plain(), plain)
    out = torch.full((rows, n), float("nan")).to(dtype)
    for b in (None, bias):
        expected = x.double() @ plain.double().T + (0 if b is None else b.double())
        assert linear(x, packed, b, out=out, backend=backend) is out
        bound = TOLERANCE[dtype] * k**0.5
        assert torch.allclose(out.double(), expected, atol=bound, rtol=TOLERANCE[dtype])


def test_only_what_the_library_packs_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(6, 8)
    assert pack_weight(weight.half()).dtype == torch.float16
    assert isinstance(pack_weight(weight), PackedWeight)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert pack_weight(weight, backend="torch") is weight
    with pytest.raises(ValueError, match=r"^weight has shape \[6\], expected \[N, K\]"):
        pack_weight(weight[:, 0])
    with pytest.raises(TypeError, match=r"^weight has dtype torch\.int32"):
        pack_weight(weight.int())


def test_wrong_operands_are_named() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"^weight has shape \[3, 7\], expected \[N, 8\]"):
        linear(x, weight[:, :7])
    with pytest.raises(TypeError, match=r"^weight has dtype torch\.float16"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match=r"^bias has shape \[2\], expected \[3\]"):
        linear(x, weight, torch.zeros(2))
    with pytest.raises(ValueError, match=r"^out has shape \[3, 3\], expected \[2, 3\]"):
        linear(x, weight, out=torch.zeros(3, 3))
    packed = pack_weight(weight)
    with pytest.raises(ValueError, match=r"^weight has shape \[3, 8\], expected \[N, 7\]"):
        linear(x[:, :7], packed)
    with pytest.raises(TypeError, match=r"^weight has dtype torch\.float32"):
        linear(x.half(), packed)


def test_a_packed_weight_is_refused_by_the_other_backend(backend: str) -> None:
    theirs = "torch" if backend != "torch" else "native"
    if theirs == "native" and not native.available():
        pytest.skip(native.build().reason)
    weight, x = torch.zeros(3, 8), torch.zeros(2, 8)
    if backend != "triton":
        packed = pack_weight(weight, backend=backend)
        assert torch.equal(linear(x, packed, backend=backend), torch.zeros(2, 3))
    packed = pack_weight(weight, backend=theirs)
    with pytest.raises(TypeError, match=rf"^weight is packed for the {theirs} backend"):
        linear(x, packed, backend=backend)


def test_many_sizes_of_packed_weights_match_and_leave_what_is_beside_them_alone() -> None:
    if not native.available():
        pytest.skip(native.build().reason)
    for dtype in (torch.float32, torch.bfloat16):
        for rows, k, n in [(1, 1, 1), (15, 3, 31), (29, 17, 33), (400, 1537, 65), (14, 2, 32)]:
            x, plain = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype)
            packed = pack_weight(plain, backend="native")
            wide = torch.full((rows + 2, n + 3), float("nan")).to(dtype)
            linear(x, packed, out=wide[1:-1, :n], backend="native")
            expected = x.double() @ plain.double().T
            bound = TOLERANCE[dtype] * k**0.5
            assert torch.allclose(wide[1:-1, :n].double(), expected, atol=bound, rtol=bound)
            wide[1:-1, :n] = float("nan")
            assert wide.isnan().all(), (rows, k, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_a_packed_table_are_those_that_were_packed(dtype: torch.dtype) -> None:
    if not native.available():
        pytest.skip(native.build().reason)
    table = torch.randn(70, 37).to(dtype)
    packed = pack_weight(table, backend="native")
    assert isinstance(packed, PackedWeight)
    assert packed.has_rows
    for ids in ([], [0], [69, 0, 31, 32, 0]):
        wanted = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(packed.rows(wanted), table[wanted])
    with pytest.raises(IndexError, match="ids go from 3 to 70, of 70 rows"):
        packed.rows(torch.tensor([3, 70]))


def test_a_bias_of_any_stride_is_added() -> None:
    if not native.available():
        pytest.skip(native.build().reason)
    x, weight, biases = torch.randn(3, 64), torch.randn(64, 64), torch.randn(64, 2)
    packed = pack_weight(weight, backend="native")
    for _ in range(5):
        got = linear(x, packed, biases[:, 0], backend="native")
        assert torch.equal(got, linear(x, packed, biases[:, 0].clone(), backend="native"))
    assert pack_weight(torch.empty(4, 0), backend="native").shape == (4, 0)


def test_a_product_may_be_written_over_its_rows() -> None:
    if not native.available():
        pytest.skip(native.build().reason)
    x, packed = torch.randn(20, 64), pack_weight(torch.randn(64, 64), backend="native")
    expected = linear(x, packed, backend="native")
    assert linear(x, packed, out=x, backend="native") is x
    assert torch.equal(x, expected)
