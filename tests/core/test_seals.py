"""A hit is proven: by token ids, not by hashes, and in debugging by the seal of each block."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

import radixcache.tree
from radixcache import (
    DEFAULT_NAMESPACE,
    BrokenSeal,
    CacheConfig,
    CacheError,
    Namespace,
    PrefixKey,
    RadixCache,
    Seal,
    Seals,
    pack_tokens,
    seals_of,
    tree_seals,
)
from tests.core.serving import insert
from tests.core.test_state_machine import CacheMachine
from tests.support.histories import BOUNDED
from tests.support.planted import PLANTED_BUGS


def sealed_cache(num_blocks: int = 16, block_size: int = 2) -> tuple[RadixCache, Seals]:
    seals = Seals(block_size)
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return RadixCache(config, observers=[seals]), seals


def play(machine: type[RuleBasedStateMachine], *, max_examples: int = 60) -> None:
    """Play the bounded histories, without reducing a failure."""
    how = settings(BOUNDED, max_examples=max_examples, phases=[Phase.generate], print_blob=False)
    run_state_machine_as_test(machine, settings=how)


# By token ids.


class Alike(bytes):
    """Bytes whose hash is that of all others."""

    def __hash__(self) -> int:
        return 0


class Trusting(Alike):
    """And that are taken for equal because of it, as where a hash alone is compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trusting)

    __hash__ = Alike.__hash__


def test_prefixes_whose_hashes_collide_are_told_apart(monkeypatch):
    monkeypatch.setattr(radixcache.tree, "bytes", Alike, raising=False)
    assert hash(radixcache.tree.bytes(b"a")) == hash(radixcache.tree.bytes(b"b"))
    play(CacheMachine)


def test_namespaces_whose_hashes_collide_are_told_apart(monkeypatch):
    monkeypatch.setattr(Namespace, "__hash__", lambda self: 0)
    assert hash(Namespace(salt="a")) == hash(Namespace(salt="b"))
    play(CacheMachine)


def test_a_cache_that_trusts_hashes_alone_is_caught(monkeypatch):
    monkeypatch.setattr(radixcache.tree, "bytes", Trusting, raising=False)
    with pytest.raises((AssertionError, CacheError, LookupError, ValueError)):
        play(CacheMachine)


# By seals.


def test_a_seal_says_whose_block_it_is_where_it_begins_and_what_comes_before():
    tokens = [1, 2, 3, 4, 5, 6]
    first, second, third = seals_of(DEFAULT_NAMESPACE, pack_tokens([*tokens, 7]), 2)
    assert [seal.start for seal in (first, second, third)] == [0, 2, 4]
    assert seals_of(DEFAULT_NAMESPACE, pack_tokens(tokens), 2, first=1) == [second, third]
    (_, after_other) = seals_of(DEFAULT_NAMESPACE, pack_tokens([9, 2, 3, 4]), 2)
    assert after_other != second
    for other in (Namespace(salt="s"), Namespace(epoch=1), Namespace(adapter="a")):
        assert seals_of(other, pack_tokens(tokens), 2)[0] != first


def test_every_cached_block_has_the_seal_of_where_it_stands():
    cache, seals = sealed_cache()
    insert(cache, [1, 2, 3, 4, 5, 6])
    insert(cache, [1, 2, 3, 4, 9, 9])
    insert(cache, [1, 2])
    assert seals.by_block == tree_seals(cache)
    assert len(seals.by_block) == 4
    cache.evict(2)
    assert seals.by_block == tree_seals(cache)
    cache.drop(DEFAULT_NAMESPACE)
    assert seals.by_block == {}


def test_a_lease_under_anothers_seal_is_told_which_field_differs():
    cache, seals = sealed_cache()
    insert(cache, [1, 2, 3, 4, 5])
    lease = cache.acquire(PrefixKey.of([1, 2, 3, 4, 5]))
    seals.check_lease(lease)
    block = lease.block_table[1]
    right = seals.by_block[block]
    for field, value in (("namespace", Namespace(epoch=1)), ("start", 4), ("prefix", b"?")):
        kept = {name: getattr(right, name) for name in Seal.__struct_fields__}
        seals._by_block[block] = Seal(**kept | {field: value})
        with pytest.raises(
            BrokenSeal, match=f"uses block {block} for the tokens from 2 on.*{field}"
        ):
            seals.check_lease(lease)
    del seals._by_block[block]
    with pytest.raises(BrokenSeal, match=f"uses block {block}, which was never sealed"):
        seals.check_lease(lease)


class SealedMachine(CacheMachine):
    """Random histories in which seals alone are looked at."""

    eyes = frozenset()

    def new_cache(self, config: CacheConfig) -> RadixCache:
        self.seals = Seals(config.block_size)
        return RadixCache(config, observers=[self.seals])

    @invariant()
    def everything_holds(self) -> None:
        self.seals.check_tree(self.cache)
        for lease in self.cache.leases.values():
            self.seals.check_lease(lease)


def test_in_any_history_the_seals_hold():
    play(SealedMachine)


SEEN = (
    "an edge is trusted by its first block",
    "a twin is freed, but the block table still names it",
    "a twin is neither mapped away nor freed",
    "an edge grows in place under another lease",
    "an edge grows in place above its children",
    "a split gives the upper node the lower one's blocks",
    "a trim frees the first blocks of an edge",
)
BUGS = {bug.name: bug for bug in PLANTED_BUGS}


@pytest.mark.parametrize("name", SEEN)
def test_seals_alone_see_that(name, monkeypatch):
    BUGS[name].plant(monkeypatch)
    with pytest.raises((BrokenSeal, KeyError)):
        play(SealedMachine, max_examples=200)
