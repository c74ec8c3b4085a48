"""Every argument is checked before anything runs, and the error names it and its value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from kernels import copy_blocks, extend_attention, store_kv
from kernels.backend import check_float8

Arguments = dict[str, torch.Tensor]


def attend(a: Arguments) -> None:
    paged = (a["k_pool"], a["v_pool"], a["block_table"], a["seq_lens"], a["q_start"])
    extend_attention(a["q"], *paged, scale=1.0, out=a["out"])


def store(a: Arguments) -> None:
    store_kv(a["k"], a["v"], a["k_pool"], a["v_pool"], a["slot_mapping"])


def copy(a: Arguments) -> None:
    copy_blocks(a["k_pools"], a["v_pools"], a["src"], a["dst"], a["num_slots"])


def arguments() -> Arguments:
    return {
        "q": torch.zeros(3, 4, 8),
        "out": torch.zeros(3, 4, 8),
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
        "k_pool": torch.zeros(5, 4, 2, 8),
        "v_pool": torch.zeros(5, 4, 2, 8),
        "k_pools": torch.zeros(1, 5, 4, 2, 8),
        "v_pools": torch.zeros(1, 5, 4, 2, 8),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.tensor([5], dtype=torch.int32),
        "q_start": torch.tensor([0, 3], dtype=torch.int32),
        "slot_mapping": torch.arange(3),
        "src": torch.tensor([0]),
        "dst": torch.tensor([1]),
        "num_slots": torch.tensor([1]),
    }


def misshapen(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*tensor.shape, 1), dtype=tensor.dtype)


def mistyped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


TAKES = {
    attend: ["q", "k_pool", "v_pool", "block_table", "seq_lens", "q_start", "out"],
    store: ["k", "v", "k_pool", "v_pool", "slot_mapping"],
    copy: ["k_pools", "v_pools", "src", "dst", "num_slots"],
}
CASES = [
    pytest.param(call, name, id=f"{call.__name__} {name}")
    for call, names in TAKES.items()
    for name in names
]


@pytest.mark.parametrize(("call", "name"), CASES)
def test_a_wrong_shape_is_named(call: Callable[[Arguments], None], name: str) -> None:
    wrong = arguments()
    wrong[name] = misshapen(wrong[name])
    with pytest.raises(ValueError, match=rf"^{name} has shape \[.*, 1\], expected"):
        call(wrong)


@pytest.mark.parametrize(("call", "name"), CASES)
def test_a_wrong_dtype_is_named(call: Callable[[Arguments], None], name: str) -> None:
    wrong = arguments()
    wrong[name] = mistyped(wrong[name])
    # a pool sets the dtype of the others, so a wrong one may show in them
    with pytest.raises(TypeError, match=r"^\w+ has dtype torch\.float\d+, expected"):
        call(wrong)


@pytest.mark.parametrize(("call", "name"), CASES)
def test_a_wrong_device_is_named(call: Callable[[Arguments], None], name: str) -> None:
    wrong = arguments()
    wrong[name] = elsewhere(wrong[name])
    with pytest.raises(ValueError, match=r"^\w+ is on \w+, expected \w+"):
        call(wrong)


@pytest.mark.parametrize("name", ["q", "k_pool", "v_pool", "out", "block_table"])
def test_a_last_dimension_with_gaps_is_named(name: str) -> None:
    wrong = arguments()
    wrong[name] = torch.stack([wrong[name]] * 2, -1)[..., 0]
    with pytest.raises(ValueError, match=rf"^{name} has stride 2 in its last dimension"):
        attend(wrong)


def test_query_heads_are_a_multiple_of_key_heads() -> None:
    wrong = arguments()
    wrong["q"] = torch.zeros(3, 5, 8)
    with pytest.raises(ValueError, match="q has 5 heads, not a multiple of the 2 of k_pool"):
        attend(wrong)


def test_a_pool_that_holds_nothing_is_named() -> None:
    for shape in ((0, 4, 2, 8), (5, 4, 0, 8), (5, 0, 2, 8)):
        wrong = arguments() | {name: torch.zeros(shape) for name in ("k_pool", "v_pool")}
        with pytest.raises(ValueError, match=r"^k_pool has shape \[.*\], which holds nothing"):
            attend(wrong)


def test_an_output_whose_rows_are_one_is_named() -> None:
    wrong = arguments()
    wrong["out"] = torch.zeros(1, 4, 8).expand(3, 4, 8)
    with pytest.raises(ValueError, match=r"^out has strides \(0, 8, 1\)"):
        attend(wrong)


def test_the_last_start_is_the_number_of_rows() -> None:
    wrong = arguments()
    wrong["q_start"] = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="q has 3 rows, but q_start ends at 2"):
        attend(wrong)


def test_a_refused_call_leaves_the_output_alone() -> None:
    wrong = arguments()
    wrong["out"].fill_(7)
    wrong["seq_lens"] = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(ValueError, match="sequence 0 has seq_lens 2 and 3 queries"):
        attend(wrong)
    assert (wrong["out"] == 7).all()


@pytest.mark.parametrize(
    ("capability", "hip", "has_them"),
    [((8, 0), None, False), ((8, 9), None, True), ((9, 0), None, True), ((9, 4), "6.4", False)],
)
def test_float8_pools_are_refused_by_gpus_without_such_numbers(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, has_them: bool
) -> None:
    class OnGpu(NamedTuple):
        dtype: torch.dtype
        device: torch.device = torch.device("cuda")

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    for dtype in (torch.int8, torch.bfloat16):
        check_float8("k_pool", OnGpu(dtype))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        with nullcontext() if has_them else pytest.raises(ValueError, match="this GPU has no such"):
            check_float8("k_pool", OnGpu(dtype))
