"""The least work of an op, counted by hand for small shapes."""

from __future__ import annotations

from kernels.roofline import (
    Ceilings,
    Heads,
    Work,
    attention_work,
    copy_work,
    least_seconds,
    linear_work,
    mla_work,
    norm_work,
    rotary_store_work,
    sample_work,
    silu_work,
    store_work,
)

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)


def test_attention_multiplies_each_query_with_the_keys_it_sees() -> None:
    # 3 queries behind 2 keys see 3, 4 and 5 of them; a lone one sees its 7
    work = attention_work([3, 1], [5, 7], HEADS)
    assert work.flop == 2 * 2 * (3 + 4 + 5 + 7) * 4 * 8
    assert work.bytes == 2 * (2 * 4 * 4 * 8) + 2 * (2 * 12 * 2 * 8)


def test_a_shared_prefix_is_read_once_and_multiplied_for_all() -> None:
    alone = attention_work([1] * 3, [10] * 3, HEADS)
    together = attention_work([1] * 3, [10] * 3, HEADS, shared=8)
    assert together.flop == alone.flop
    assert alone.bytes - together.bytes == 2 * 2 * 16 * 2 * 8


def test_smaller_keys_halve_what_is_read_and_nothing_else() -> None:
    wide = attention_work([1], [100], HEADS)
    small = attention_work([1], [100], HEADS, kv_bytes=1)
    assert wide.bytes - small.bytes == 2 * 100 * 2 * 8


def test_a_latent_is_read_once_for_all_heads_and_as_key_and_value() -> None:
    # 3 queries behind 2 tokens see 3, 4 and 5 of them; a key is 8 + 2 numbers, a value 8
    work = mla_work([3, 1], [5, 7], 4, latent_dim=8, rope_dim=2)
    assert work.flop == 2 * (3 + 4 + 5 + 7) * 4 * (10 + 8)
    assert work.bytes == 2 * 4 * 4 * (10 + 8) + 2 * 12 * 10
    together = mla_work([3, 1], [5, 7], 4, latent_dim=8, rope_dim=2, shared=2, latent_bytes=1)
    assert together.bytes == 2 * 4 * 4 * (10 + 8) + 10 * 10


def test_the_row_ops_move_each_number_once() -> None:
    assert store_work(3, HEADS, kv_bytes=1).bytes == 3 * 32 * (2 + 1)
    assert copy_work(3, 5, HEADS).bytes == 3 * 5 * 32 * 2 * 2
    assert linear_work(3, 5, 7) == Work(bytes=2 * (15 + 35 + 21), flop=210)
    assert norm_work(3, 8, residual=False).bytes == 3 * 8 * 2 * 2
    assert norm_work(3, 8, residual=True).bytes == 3 * 8 * 2 * 4
    assert silu_work(3, 8).bytes == 3 * 24 * 2
    assert rotary_store_work(1, HEADS).bytes == 2 * 32 * 2 + 32 * 4 + 8 * 4
    assert sample_work(2, 100).bytes == 800


def test_the_slower_of_memory_and_arithmetic_decides() -> None:
    ceilings = Ceilings(bytes_s=10.0, flop_s=100.0)
    assert least_seconds(Work(bytes=50, flop=100), ceilings) == 5.0
    assert least_seconds(Work(bytes=50, flop=1000), ceilings) == 10.0
