"""Namespaces: disjoint trees over one pool."""

from __future__ import annotations

import itertools

import pytest

from radixcache import DEFAULT_NAMESPACE, InvalidConfig, Namespace
from tests.core.serving import acquire, insert, match, num_owned

A, B = Namespace(salt="a"), Namespace(salt="b")


def test_equal_tokens_in_three_namespaces_are_three_entries(cache):
    served = {space: insert(cache, [1, 2, 3], space) for space in (A, B, DEFAULT_NAMESPACE)}
    assert num_owned(cache) == 9
    for space, ours in served.items():
        assert ours.reused == 0
        assert match(cache, [1, 2, 3], space).block_ids == ours.block_ids
    assert match(cache, [1, 2, 3], Namespace(salt="c")).num_tokens == 0


FIELDS = [
    {"model": "ab"},
    {"adapter": "ab"},
    {"salt": "ab"},
    {"model": "a", "adapter": "b"},
    {"model": "a", "salt": "b"},
    {"adapter": "a", "salt": "b"},
    {"adapter": "bc", "salt": "a"},
    {"adapter": "c", "salt": "ab"},
    {"adapter": "abc"},
    {"epoch": 1},
    {"salt": "1"},
    {"salt": "ab", "epoch": 1},
    {},
]


def test_no_two_ways_of_spelling_names_share(make_cache):
    cache = make_cache(num_blocks=64)
    spaces = [Namespace(**fields) for fields in FIELDS]
    assert all(x != y for x, y in itertools.combinations(spaces, 2))
    for space in spaces:
        assert insert(cache, [1, 2], space).reused == 0
    assert num_owned(cache) == 2 * len(spaces)


def test_a_namespace_made_anew_from_equal_fields_is_the_same_one(cache):
    insert(cache, [1, 2, 3], Namespace(model="m", salt="s", epoch=2))
    assert match(cache, [1, 2, 3], Namespace(model="m", salt="s", epoch=2)).num_tokens == 3


def test_a_raised_epoch_hides_what_was_cached_before(cache):
    insert(cache, [1, 2, 3], Namespace(epoch=1))
    assert acquire(cache, [1, 2, 3, 4], Namespace(epoch=2)).num_cached == 0


def test_what_one_namespace_evicts_of_another_is_only_what_lru_says(cache):
    insert(cache, [1, 2, 3], A)
    insert(cache, [1, 2, 3], B)
    assert cache.evict(3) == 3
    assert match(cache, [1, 2, 3], A).num_tokens == 0
    assert match(cache, [1, 2, 3], B).num_tokens == 3


def test_an_emptied_namespace_is_forgotten(cache):
    for number in range(16):
        insert(cache, [1, 2, 3], Namespace(salt=str(number)))
    assert len(cache.tree.roots) <= 16 // 3 + 1
    cache.evict(16)
    assert cache.tree.roots == {}


def test_a_namespace_without_a_cached_block_lives_as_long_as_a_lease(make_cache):
    cache = make_cache(block_size=4)
    lease = acquire(cache, [1], A)
    branch = cache.fork(lease)
    cache.release(lease)
    assert list(cache.tree.roots) == [A]
    cache.release(branch)
    assert cache.tree.roots == {}


def test_a_namespace_can_not_be_changed():
    with pytest.raises(AttributeError):
        A.salt = "b"


@pytest.mark.parametrize(
    "fields",
    [{"salt": "\ud800"}, {"salt": 5}, {"adapter": None}, {"epoch": -1}, {"epoch": "1"}],
    ids=str,
)
def test_a_namespace_of_anything_but_text_and_an_epoch_is_refused(fields):
    with pytest.raises(InvalidConfig):
        Namespace(**fields)
