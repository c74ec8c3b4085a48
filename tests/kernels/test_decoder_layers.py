"""A stack of layers in one call has the bits of its operations one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels import (
    DecoderLayers,
    LayerWeights,
    Scratch,
    extend_attention,
    fuse_layers,
    linear,
    native,
    pack_weight,
    plan_extend,
    rms_norm,
    rotary_store_kv,
    rotary_table,
    silu_and_mul,
)
from kernels.linear import PackedWeight

HEADS, KV_HEADS, DIM, HIDDEN, FFN = 6, 2, 32, 80, 112
EPS, SCALE = 1e-5, DIM**-0.5

pytestmark = pytest.mark.skipif(not native.available(), reason=native.build().reason)


@dataclass
class Step:
    added: torch.Tensor
    residual: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    pools: torch.Tensor
    slots: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def copy(self) -> Step:
        tensors = {name: getattr(self, name).clone() for name in ("added", "residual", "pools")}
        return replace(self, **tensors)


def random_layers(count: int, dtype: torch.dtype, *, biased: bool) -> list[LayerWeights]:
    def matrix(outputs: int, inputs: int) -> torch.Tensor | PackedWeight:
        return pack_weight(
            (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype), backend="native"
        )

    width = (HEADS + 2 * KV_HEADS) * DIM
    return [
        LayerWeights(
            attention_norm=torch.rand(HIDDEN).to(dtype),
            qkv=matrix(width, HIDDEN),
            qkv_bias=torch.randn(width).to(dtype) if biased else None,
            out=matrix(HIDDEN, HEADS * DIM),
            out_bias=torch.randn(HIDDEN).to(dtype) if biased else None,
            ffn_norm=torch.rand(HIDDEN).to(dtype),
            gate_up=matrix(2 * FFN, HIDDEN),
            down=matrix(HIDDEN, FFN),
        )
        for _ in range(count)
    ]


def random_step(
    sizes: list[tuple[int, int]], dtype: torch.dtype, *, num_layers: int, block_size: int = 8
) -> Step:
    """Sequences of (cached, new) tokens; their cached K/V is noise, the rest of the pool is NaN."""
    blocks = [-(-(cached + new) // block_size) for cached, new in sizes]
    ids = torch.randperm(sum(blocks) + 3)
    pools = torch.full((num_layers, 2, len(ids), block_size, KV_HEADS, DIM), float("nan"))
    table = torch.full((len(sizes), max(blocks)), -1, dtype=torch.int32)
    positions, slots = [], []
    for i, (cached, new) in enumerate(sizes):
        own = ids[sum(blocks[:i]) : sum(blocks[: i + 1])]
        table[i, : blocks[i]] = own
        for position in range(cached + new):
            block, offset = int(own[position // block_size]), position % block_size
            if position < cached:
                pools[:, :, block, offset] = torch.randn(num_layers, 2, KV_HEADS, DIM)
            else:
                positions.append(position)
                slots.append(block * block_size + offset)
    counts = torch.tensor([0] + [new for _, new in sizes])
    cos, sin = rotary_table(torch.rand(DIM // 2), 1024)
    lens = torch.tensor([cached + new for cached, new in sizes], dtype=torch.int32)
    return Step(
        added=torch.randn(len(slots), HIDDEN).to(dtype),
        residual=torch.randn(len(slots), HIDDEN).to(dtype),
        cos=cos[positions],
        sin=sin[positions],
        pools=pools.to(dtype),
        slots=torch.tensor(slots, dtype=torch.int64),
        tables=(table, lens, counts.cumsum(0).to(torch.int32)),
    )


def one_by_one(layers: list[LayerWeights], step: Step) -> None:
    """The same layers by their operations, in place."""
    added, residual = step.added, step.residual
    for layer, pools in zip(layers, step.pools, strict=True):
        normed = rms_norm(added, layer.attention_norm, eps=EPS, residual=residual)
        mixed = linear(normed, layer.qkv, layer.qkv_bias).view(-1, HEADS + 2 * KV_HEADS, DIM)
        q = rotary_store_kv(mixed, step.cos, step.sin, pools[0], pools[1], step.slots)
        attended = extend_attention(q, pools[0], pools[1], *step.tables, scale=SCALE)
        added = linear(attended.flatten(1), layer.out, layer.out_bias)
        normed = rms_norm(added, layer.ffn_norm, eps=EPS, residual=residual)
        added = linear(silu_and_mul(linear(normed, layer.gate_up)), layer.down)
    step.added = added


def fused(layers: list[LayerWeights], dtype: torch.dtype) -> DecoderLayers:
    stack = fuse_layers(layers, dtype=dtype, head_dim=DIM, eps=EPS, scale=SCALE)
    assert stack is not None
    return stack


def run(stack: DecoderLayers, step: Step, scratch: Scratch) -> None:
    plan = plan_extend(step.pools[0, 0], *step.tables, num_heads=HEADS, scratch=scratch)
    stack.run(step.added, step.residual, step.cos, step.sin, step.pools, step.slots, plan)


@pytest.mark.parametrize("part_rows", [16, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_the_bits_are_those_of_the_operations_one_by_one(
    dtype: torch.dtype,
    biased: bool,
    part_rows: int,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.decoder_layers.PART_ROWS", part_rows)
    torch.manual_seed(3)
    layers = random_layers(3, dtype, biased=biased)
    stack, scratch = fused(layers, dtype), Scratch(torch.device("cpu"))
    for sizes in ([(0, 1)], [(300, 1), (17, 1), (64, 1)], [(5, 1), (130, 70), (0, 33)], [(0, 200)]):
        step = random_step(sizes, dtype, num_layers=3)
        expected = step.copy()
        one_by_one(layers, expected)
        run(stack, step, scratch)
        assert step.added.isfinite().all()
        assert torch.equal(step.added, expected.added)
        assert torch.equal(step.residual, expected.residual)
        same = (step.pools == expected.pools) | (step.pools.isnan() & expected.pools.isnan())
        assert same.all()


def test_a_slot_past_the_pool_is_named_before_anything_is_computed() -> None:
    step = random_step([(3, 4)], torch.float32, num_layers=2)
    stack = fused(random_layers(2, torch.float32, biased=False), torch.float32)
    step.slots[2] = step.pools.shape[2] * step.pools.shape[3]
    before = step.copy()
    with pytest.raises(IndexError, match=r"^slot_mapping\[2\] is \d+, and the pool has \d+ slots"):
        run(stack, step, Scratch(torch.device("cpu")))
    assert torch.equal(step.added, before.added)
    assert torch.equal(step.residual, before.residual)


def test_a_step_without_tokens_changes_nothing() -> None:
    step = random_step([(3, 0)], torch.float32, num_layers=1)
    stack = fused(random_layers(1, torch.float32, biased=False), torch.float32)
    run(stack, step, Scratch(torch.device("cpu")))
    assert step.added.shape == (0, HIDDEN)


def test_what_does_not_fit_is_named() -> None:
    step = random_step([(3, 4)], torch.float32, num_layers=2)
    stack = fused(random_layers(2, torch.float32, biased=False), torch.float32)
    scratch = Scratch(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^residual has shape"):
        run(stack, replace(step, residual=step.residual[1:]), scratch)
    with pytest.raises(TypeError, match=r"^added has dtype torch\.bfloat16"):
        run(stack, replace(step, added=step.added.bfloat16()), scratch)
    with pytest.raises(ValueError, match=r"^added has strides"):
        run(stack, replace(step, added=step.added.T.contiguous().T), scratch)
    with pytest.raises(ValueError, match=r"^pools has shape"):
        run(stack, replace(step, pools=step.pools[:1]), scratch)
    with pytest.raises(ValueError, match=r"^slot_mapping has shape"):
        run(stack, replace(step, slots=step.slots[1:]), scratch)
    with pytest.raises(ValueError, match=r"^cos has shape"):
        run(stack, replace(step, cos=step.cos[1:]), scratch)


def test_layers_of_which_some_operation_is_not_native_stay_apart() -> None:
    layers = random_layers(2, torch.float32, biased=False)
    facts = {"head_dim": DIM, "eps": EPS, "scale": SCALE}
    assert fuse_layers(layers, dtype=torch.float16, **facts) is None
    assert fuse_layers(layers, dtype=torch.float32, **(facts | {"head_dim": 20})) is None
    assert fuse_layers(layers, dtype=torch.float32, **facts, backend="torch") is None
    assert fuse_layers([], dtype=torch.float32, **facts) is None
    layers[1].down = torch.randn(HIDDEN, FFN)
    assert fuse_layers(layers, dtype=torch.float32, **facts) is None


def test_layers_that_do_not_fit_each_other_stay_apart() -> None:
    facts = {"head_dim": DIM, "eps": EPS, "scale": SCALE}
    layers = random_layers(2, torch.bfloat16, biased=True)
    assert fuse_layers(layers, dtype=torch.bfloat16, **facts) is not None
    assert fuse_layers(layers, dtype=torch.float32, **facts) is None
    layers[1].ffn_norm = layers[1].ffn_norm.float()
    assert fuse_layers(layers, dtype=torch.bfloat16, **facts) is None
    layers = random_layers(2, torch.float32, biased=True)
    assert layers[0].qkv_bias is not None
    layers[0].qkv_bias = layers[0].qkv_bias.repeat_interleave(2)[::2]
    assert fuse_layers(layers, dtype=torch.float32, **facts) is None


def test_a_plan_for_another_pool_is_refused() -> None:
    step = random_step([(3, 4)], torch.float32, num_layers=2)
    stack = fused(random_layers(2, torch.float32, biased=False), torch.float32)
    other = random_step([(3, 4)], torch.float32, num_layers=2, block_size=4)
    plan = plan_extend(other.pools[0, 0], *other.tables, num_heads=HEADS)
    assert plan is not None
    with pytest.raises(ValueError, match="pools are not what the plan was made for"):
        stack.run(step.added, step.residual, step.cos, step.sin, step.pools, step.slots, plan)


def test_angles_cut_from_wider_tables_turn_alike() -> None:
    torch.manual_seed(4)
    step = random_step([(3, 4)], torch.float32, num_layers=1)
    layers = random_layers(1, torch.float32, biased=False)
    expected = step.copy()
    one_by_one(layers, expected)
    wide = torch.full((4, DIM), float("nan"))
    wide[:, : DIM // 2] = step.cos
    run(
        fused(layers, torch.float32),
        replace(step, cos=wide[:, : DIM // 2]),
        Scratch(torch.device("cpu")),
    )
    assert torch.equal(step.added, expected.added)
