"""Blocks that left the device come back bit for bit, to the place they are for, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from radixcache import CacheConfig, Namespace, PrefixKey, RadixCache, dump_tree, load_tree
from radixcache.seal import seals_of, tree_seals
from runtime.errors import BlockRefused
from runtime.kv.staging import BlockLayout, export_blocks, import_blocks, layout_of
from runtime.kv.store import KVStore
from runtime.models.config import ModelConfig
from tests.support.invisibility import CPU, differs
from tests.support.tiny_models import tiny_config

BLOCK_SIZE, NUM_BLOCKS = 4, 12
CONFIG = tiny_config(num_layers=3, num_kv_heads=2, num_heads=2, head_dim=8)
TOKENS = list(range(2, 22))


def store_of(dtype: torch.dtype = torch.bfloat16, config: ModelConfig = CONFIG) -> KVStore:
    store = KVStore(config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)
    store.pool.fill_(torch.nan)
    return store


def filled_cache(store: KVStore, namespace: Namespace) -> RadixCache:
    """A cache of two branches whose blocks hold random K/V."""
    cache = RadixCache(CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    for tokens in (TOKENS, TOKENS[:9] + TOKENS[:8]):
        lease = cache.acquire(PrefixKey.of(tokens, namespace))
        cache.commit(lease, len(tokens))
        cache.release(lease)
    store.pool.copy_(torch.randn(store.pool.shape, generator=torch.Generator().manual_seed(1)))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tree_and_its_blocks_come_back_bit_for_bit_in_other_places(dtype):
    namespace, store = Namespace(salt="s"), store_of(dtype)
    cache = filled_cache(store, namespace)
    sealed = tree_seals(cache)
    staged = export_blocks(store, list(sealed), list(sealed.values()))
    other, new_store = RadixCache(cache.config), store_of(dtype)
    other.room.allocate(other.accounts.open(namespace), 2)  # so that all blocks move
    moved = load_tree(other, dump_tree(cache))
    places = [moved[block_id] for block_id in sealed]
    wanted = tree_seals(other)
    import_blocks(new_store, staged, places, [wanted[place] for place in places])
    assert places != list(sealed)
    for old, new in moved.items():
        assert not differs(new_store.pool[:, :, new], store.pool[:, :, old])
    assert other.match_len(PrefixKey.of(TOKENS, namespace)) == len(TOKENS)


def staged_path(store: KVStore, namespace: Namespace = Namespace()):  # noqa: B008 frozen
    """The blocks of one path, exported, and the seals that they have."""
    cache = filled_cache(store, namespace)
    key = PrefixKey.of(TOKENS, namespace)
    seals = seals_of(namespace, key.tokens, BLOCK_SIZE)
    return export_blocks(store, cache.match(key).block_ids, seals), seals


def refused(store: KVStore, staged, wanted, why: str) -> None:
    """Nothing is written, and the error says why."""
    before = store.pool.clone()
    with pytest.raises(BlockRefused, match=why):
        import_blocks(store, staged, range(len(wanted)), wanted)
    assert not differs(store.pool, before)


@pytest.mark.parametrize("place", [0, 4])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_refused_and_nothing_is_written(place, bit):
    staged, seals = staged_path(store_of())
    words = staged.kv.view(torch.uint8)
    words[place, 1, 2, 3, 1, -1] ^= 1 << bit
    refused(store_of(), staged, seals, f"block {place} of 5 is damaged: its checksum")


@pytest.mark.parametrize(
    "namespace", [Namespace(epoch=1), Namespace(salt="other"), Namespace(model="m")]
)
def test_blocks_of_another_namespace_or_epoch_are_refused(namespace):
    staged, _ = staged_path(store_of())
    wanted = seals_of(namespace, PrefixKey.of(TOKENS).tokens, BLOCK_SIZE)
    refused(store_of(), staged, wanted, "block 0 of 5 is another .* 0: namespace differ")


def test_a_block_of_equal_tokens_behind_another_prefix_is_refused():
    staged, _ = staged_path(store_of())
    changed = [99, *TOKENS[1:]]
    wanted = seals_of(Namespace(), PrefixKey.of(changed).tokens, BLOCK_SIZE)
    last = replace(
        staged,
        kv=staged.kv[4:],
        seals=staged.seals[4:],
        checksums=staged.checksums[4:],
    )
    refused(store_of(), last, wanted[4:], "block 0 of 1 is another .* position 16: prefix differ")


def test_blocks_in_another_order_are_refused():
    staged, seals = staged_path(store_of())
    swapped = [seals[1], seals[0], *seals[2:]]
    refused(store_of(), staged, swapped, "block 0 .* position 4: start, prefix differ")


def test_a_seal_that_was_changed_with_its_bytes_in_place_is_refused():
    staged, _ = staged_path(store_of())
    renamed = tuple(seals_of(Namespace(epoch=1), PrefixKey.of(TOKENS).tokens, BLOCK_SIZE))
    refused(store_of(), replace(staged, seals=renamed), renamed, "block 0 of 5 is damaged")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (store_of(torch.float16), "dtype"),
        (
            store_of(config=tiny_config(num_layers=2, num_kv_heads=2, num_heads=2, head_dim=8)),
            "num_layers",
        ),
        (
            store_of(config=tiny_config(num_layers=3, num_kv_heads=1, num_heads=2, head_dim=16)),
            "num_kv_heads, head_dim",
        ),
    ],
)
def test_blocks_of_another_layout_are_refused(other, field):
    staged, seals = staged_path(store_of())
    refused(other, staged, seals, f"layout than this store: {field} differ")


def test_a_layout_says_how_bytes_are_read():
    assert layout_of(store_of()) == BlockLayout(
        dtype="bfloat16", num_layers=3, block_size=4, num_kv_heads=2, head_dim=8
    )


def test_a_block_without_a_seal_of_its_own_is_refused_and_not_written_unchecked():
    store = store_of()
    staged, wanted = staged_path(store)
    fewer = replace(staged, seals=staged.seals[:-1], checksums=staged.checksums[:-1])
    before = store.pool.clone()
    for came, want, places in (
        (fewer, wanted[:-1], range(len(wanted))),
        (fewer, wanted, range(len(wanted))),
        (staged, wanted, range(len(wanted) - 1)),
        (replace(staged, kv=staged.kv[:-1]), wanted, range(len(wanted))),
    ):
        with pytest.raises(BlockRefused, match="blocks are wanted for"):
            import_blocks(store, came, places, want)
    assert not differs(store.pool, before)


def test_no_blocks_are_exported_and_imported_as_well():
    staged = export_blocks(store_of(), [], [])
    import_blocks(store_of(), staged, [], [])
    assert staged.checksums == ()
