"""The arguments that shared prefixes and decode add; their bits are in test_decode_attention.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import (
    SharedPrefixes,
    decode_attention,
    extend_attention,
    plan_decode,
    plan_extend,
    plan_shared_prefix,
    shared_prefix_attention,
)
from kernels._attention_work import Tiling, decode_work, extend_work
from kernels.scratch import Scratch
from tests.support.paged_attention import Step, build_step, random_suffix

PREFIXES = SharedPrefixes.of([([0, 1], 64)])
CPU = torch.device("cpu")


@pytest.fixture
def step() -> Step:
    generator = torch.Generator().manual_seed(7)
    suffixes = [
        random_suffix(generator, 1, n, heads=(1, 2, 16), dtype=torch.float32) for n in (70, 90)
    ]
    return build_step(suffixes, generator)


def test_groups_are_named_where_they_do_not_fit(step: Step) -> None:
    tables = (step.k_pool, step.v_pool, step.block_table, step.seq_lens, step.q_start)
    cases = {
        r"prefixes\.starts has shape \[2\], expected \[3\]": replace(
            PREFIXES, lens=torch.zeros(2, dtype=torch.int32)
        ),
        r"prefixes\.members has shape \[1, 2\], expected \[P\]": replace(
            PREFIXES, members=PREFIXES.members[None]
        ),
    }
    for message, prefixes in cases.items():
        with pytest.raises(ValueError, match=message):
            shared_prefix_attention(step.q, *tables, prefixes, scale=1.0)
    with pytest.raises(TypeError, match=r"prefixes\.lens has dtype torch\.int64"):
        shared_prefix_attention(
            step.q, *tables, replace(PREFIXES, lens=PREFIXES.lens.long()), scale=1.0
        )


def test_a_member_past_the_batch_is_found_when_debugging(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXCACHE_KERNELS_DEBUG", "1")
    tables = (step.k_pool, step.v_pool, step.block_table, step.seq_lens, step.q_start)
    with pytest.raises(IndexError, match=r"prefixes\.members\[1\] is 5, expected 0 to 1"):
        shared_prefix_attention(step.q, *tables, SharedPrefixes.of([([0, 5], 64)]), scale=1.0)


def test_the_kernel_finds_ids_past_their_range_when_debugging(
    step: Step, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend != "triton":
        pytest.skip("the torch backend reads ids, and is refused by torch")
    monkeypatch.setenv("RADIXCACHE_KERNELS_DEBUG", "1")
    step.block_table[1, 2] = 99
    for attention in (extend_attention, decode_attention):
        with pytest.raises(IndexError, match=r"block_table\[1, 2\] is 99, expected -1 to"):
            step.run(attention, scale=1.0, backend=backend)


def test_a_plan_of_another_backend_is_refused(step: Step) -> None:
    work = extend_work(
        step.seq_lens, step.q_start, num_tokens=2, tiling=Tiling(8, 64), scratch=Scratch(CPU)
    )
    with pytest.raises(TypeError, match="plan is a WorkPlan, made for another backend than torch"):
        step.run(extend_attention, scale=1.0, backend="torch", plan=work)


def test_every_plan_serves_every_operation_on_the_torch_backend(step: Step) -> None:
    tables = (step.k_pool, step.block_table, step.seq_lens, step.q_start)
    sizes = {"num_heads": 2, "num_tokens": 2, "backend": "torch"}
    plans = [
        plan_extend(*tables, **sizes),
        plan_decode(*tables, **sizes),
        plan_shared_prefix(*tables, PREFIXES, **sizes),
    ]
    [expected] = {tuple(run_with(step, plan).flatten().tolist()) for plan in plans}
    assert len(expected) == step.q.numel()


def run_with(step: Step, plan: object) -> torch.Tensor:
    return torch.cat(step.run(decode_attention, scale=1.0, backend="torch", plan=plan))


def items(work: object) -> list[list[int]]:
    """The items that have queries."""
    return [item for item in work.items.tolist() if item[4]]


def test_a_common_prefix_is_on_the_list_once() -> None:
    seq_lens = torch.tensor([300, 200, 140], dtype=torch.int32)
    q_start = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    prefixes = SharedPrefixes.of([([2, 0], 130)])
    work = decode_work(
        seq_lens,
        q_start,
        prefixes,
        num_tokens=5,
        max_seq_len=300,
        tiling=Tiling(8, 64),
        scratch=Scratch(CPU),
    )
    # sequence, first split, end split, first entry of tokens, number of tokens, end of keys
    assert items(work) == [
        [2, 0, 1, 0, 4, 64],
        [2, 1, 2, 0, 4, 128],
        [1, 0, 1, 7, 1, 200],
        [1, 1, 2, 7, 1, 200],
        [0, 2, 3, 5, 2, 300],
        [1, 2, 3, 7, 1, 200],
        [2, 2, 3, 8, 2, 140],
        [0, 3, 4, 5, 2, 300],
        [1, 3, 4, 7, 1, 200],
        [0, 4, 5, 5, 2, 300],
    ]
    group, rest = work.tokens.split(5)
    assert group[:4].tolist() == [3, 4, 0, 1]
    assert rest.tolist() == [0, 1, 2, 3, 4]
    assert work.positions.tolist() == [298, 299, 199, 138, 139]
    assert work.first_news.tolist() == [298, 298, 199, 138, 138]


@pytest.mark.parametrize(
    ("common", "groups"),
    [
        ([], []),
        ([0], []),
        ([0, 511, 511], []),
        ([0, 1024, 700], [([7, 6], 1024)]),
        ([0, 512, 512, 512], [([7, 6, 5, 4], 512)]),
        ([0, 1536, 0, 512], [([7, 6], 1536), ([5, 4], 512)]),
    ],
)
def test_neighbours_are_grouped_where_whole_splits_are_read_once(
    common: list[int], groups: list[tuple[list[int], int]]
) -> None:
    found = SharedPrefixes.among([7, 6, 5, 4][: len(common)], common)
    expected = SharedPrefixes.of(groups)
    for name in ("members", "starts", "lens"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
