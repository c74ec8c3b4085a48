"""The check at the start sees an operation whose rows depend on their company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch
from torch.nn import functional

from kernels import PackedWeight, native, pack_weight, row_check
from kernels.linear import SLOWER_LAYOUTS, RowLayout, linear
from kernels.row_check import (
    AttentionShape,
    Product,
    check_attention,
    check_products,
    check_rows,
    find_layout,
    same_bits,
)

LINEAR = import_module("kernels.linear")  # its function has the name
DTYPES = [torch.float32, torch.bfloat16]
SMALL = AttentionShape(6, 2, 16)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def weights(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in ((96, 64), (64, 160))]


def products(dtype: torch.dtype = torch.float32) -> list[Product]:
    return [Product(weight) for weight in weights(dtype)]


def off_by_one_bit(result: torch.Tensor) -> torch.Tensor:
    """The next number in each place."""
    kind = {2: torch.int16, 4: torch.int32}[result.element_size()]
    return (result.view(kind) + 1).view(result.dtype)


def plant(monkeypatch: pytest.MonkeyPatch, is_odd: Callable[[int, int], bool]) -> None:
    """Make the library's product give other bits for some (number of rows, row)."""
    real = LINEAR._product

    def product(
        x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        result = real(x, weight, bias)
        odd = torch.tensor([is_odd(len(x), row) for row in range(len(x))], dtype=torch.bool)
        return torch.where(odd[:, None], off_by_one_bit(result), result)

    monkeypatch.setattr(LINEAR, "_product", product)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_of_this_machine_pass_and_its_library_in_some_layout(
    dtype: torch.dtype,
) -> None:
    like = torch.zeros(1, dtype=dtype)
    plain = weights(dtype)
    packed = find_layout([Product(pack_weight(weight)) for weight in plain])
    if native.available():  # our own kernels promise it; a library is free to need another layout
        assert packed == (True, None, [])
    assert packed.holds
    assert find_layout(list(map(Product, plain))).holds
    assert check_rows(48, 80, 16, like) == []
    assert check_attention(SMALL, like) == []


def test_the_library_without_padding_is_caught() -> None:
    weights = [torch.randn(n, 576) for n in (960, 1536)]
    x = torch.randn(64, 576)
    odd = {
        f"product 576 × {len(weight)}"
        for weight in weights
        if not torch.equal(functional.linear(x[:1], weight), functional.linear(x, weight)[:1])
    }
    if not odd:
        pytest.skip("the library of this machine needs no padding")
    faults = check_products([Product(weight) for weight in weights], RowLayout())
    assert odd <= {fault.operation for fault in faults}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("is_odd", "expected"),
    [
        (lambda n, row: n % 16 > 0, RowLayout(16)),
        (lambda n, row: n % 64 > 0, RowLayout(64)),
        (lambda n, row: n > 64, RowLayout(64, most=64)),
        (lambda n, row: row > n // 2, RowLayout(most=1)),
    ],
    ids=["other in 16s", "other in 64s", "other beyond 64", "other by place"],
)
def test_a_library_with_other_habits_gets_the_cheapest_layout_that_holds(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    is_odd: Callable[[int, int], bool],
    expected: RowLayout,
) -> None:
    plant(monkeypatch, is_odd)
    holds, layout, faults = find_layout(products(dtype))
    assert (holds, layout) == (True, expected)
    assert [fault.operation for fault in faults] == ["product 64 × 96", "product 160 × 64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_lone_row_that_the_library_cuts_otherwise_is_caught(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS", "torch")  # our own cut none otherwise
    packed = pack_weight(torch.randn(512, 1536).to(dtype))
    x = torch.randn(400, 1536).to(dtype)
    whole = linear(x, packed, layout=RowLayout())
    alone = torch.cat([linear(row[None], packed, layout=RowLayout()) for row in x])
    if torch.equal(alone, whole):
        pytest.skip("the library of this machine cuts a lone row as it cuts many")
    faults = check_products([Product(packed)], RowLayout())
    assert [fault.num_rows for fault in faults] == [1]


def test_a_library_whose_rows_depend_on_their_place_gets_no_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(10**6))

    def product(x: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
        return torch.full((len(x), len(weight)), float(next(calls)))

    monkeypatch.setattr(LINEAR, "_product", product)
    holds, layout, faults = find_layout(products())
    assert (holds, layout) == (False, None)
    assert "row" in str(faults[0])


def test_every_layout_gives_the_same_product() -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(130, 64, generator=draw), torch.randn(32, 64, generator=draw)
    for count in (0, 1, 9, 130):
        for layout in SLOWER_LAYOUTS:
            result = linear(x[:count], weight, layout=layout)
            assert torch.allclose(result, functional.linear(x[:count], weight), atol=1e-5)


def test_attention_in_tiles_relative_to_the_batch_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(q, k, v, table, lens, starts, *, scale):  # type: ignore[no-untyped-def]
        """Whole softmax over as many keys as the batch's longest sequence has."""
        keys = k[table[0].long()].flatten(0, 1)[: int(lens.max())].repeat_interleave(3, 1)
        values = v[table[0].long()].flatten(0, 1)[: int(lens.max())].repeat_interleave(3, 1)
        counts = starts.diff()
        last = [int(n) - int(c) + i for n, c in zip(lens, counts, strict=True) for i in range(c)]
        scores = torch.einsum("thd,shd->hts", q, keys) * scale
        hidden = torch.arange(len(keys)) > torch.tensor(last)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values)

    monkeypatch.setattr(row_check, "extend_attention", attend)
    faults = check_attention(SMALL, torch.zeros(1))
    assert [fault.operation for fault in faults] == ["attention of 6 heads on 2 of 16"]


def test_a_norm_over_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return x / x.square().mean().sqrt() * weight

    monkeypatch.setattr(row_check, "rms_norm", norm)
    assert [fault.operation for fault in check_rows(48, 80, 16, torch.zeros(1))] == ["norm of 48"]


def test_a_gate_whose_rows_are_shared_by_threads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        """Numbers where the second of two threads begins take another loop."""
        gate, up = gate_up.chunk(2, -1)
        result = (functional.silu(gate) * up).flatten()
        begin = result.numel() // 2
        if result.numel() > 32768:
            result[begin - 3 : begin] = off_by_one_bit(result[begin - 3 : begin])
        return result.view_as(gate)

    monkeypatch.setattr(row_check, "silu_and_mul", gated)
    faults = check_rows(48, 1536, 16, torch.zeros(1))
    assert [fault.operation for fault in faults] == ["gated SiLU of 1536"]


def test_bits_tell_zeros_apart_and_nan_equals_itself() -> None:
    a = torch.tensor([0.0, torch.nan, 1.0])
    b = torch.tensor([-0.0, torch.nan, 1.0])
    assert same_bits(a, b).tolist() == [False, True, True]
