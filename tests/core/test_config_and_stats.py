"""The configuration that builds a cache, the counters it keeps, and the errors it raises."""

from __future__ import annotations

import msgspec
import pytest

from radixcache import (
    CacheConfig,
    CacheError,
    CacheStats,
    CallerError,
    InvalidConfig,
    InvalidLease,
    InvalidTokens,
    InvariantViolation,
    OutOfBlocks,
    RadixCache,
    pack_tokens,
)
from tests.core.serving import acquire, insert


@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None])
def test_a_size_that_is_no_integer_of_at_least_one_is_the_callers_mistake(name, value):
    with pytest.raises(InvalidConfig, match=f"{name} must be an integer of at least 1"):
        CacheConfig(**{"num_blocks": 4, name: value})


def test_a_field_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="num_block"):
        CacheConfig(num_block=4)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"num_blocks": 4, "size": 1}', type=CacheConfig)


def test_a_config_can_not_be_changed():
    with pytest.raises(AttributeError):
        CacheConfig(num_blocks=4).num_blocks = 5


def test_the_smallest_cache_works():
    cache = RadixCache(CacheConfig(num_blocks=1, block_size=1))
    assert insert(cache, [1]).reused == 0
    assert insert(cache, [2]).reused == 0
    cache.check()


def test_stats_count_what_happened(make_cache):
    cache = make_cache(num_blocks=6, block_size=2)
    insert(cache, [1, 2, 3, 4, 5])
    first, second = acquire(cache, [1, 2, 3, 4, 6, 7]), acquire(cache, [1, 2, 3, 4, 6, 7])
    cache.commit(first, 6)
    cache.commit(second, 6)
    with pytest.raises(OutOfBlocks):
        acquire(cache, range(50, 60))
    cache.release(first)
    cache.append(second, pack_tokens([8]))
    cache.evict(6)
    assert cache.stats() == CacheStats(
        num_blocks=6,
        num_free=2,
        num_private=1,
        num_pinned=3,
        num_evictable=0,
        num_nodes=2,
        num_leases=1,
        num_holds=0,
        queries=3,
        query_tokens=5 + 6 + 6,
        hit_tokens=4 + 4,
        published_blocks=2 + 1,
        twin_blocks=1,
        evicted_blocks=0,
        trims=0,
        out_of_blocks=1,
    )
    cache.release(second)
    assert cache.evict(2) == 2
    assert cache.stats().evicted_blocks == 2


def test_stats_are_a_record_that_later_calls_do_not_change(cache):
    before = cache.stats()
    insert(cache, [1, 2])
    assert before.num_free == 16
    with pytest.raises(AttributeError):
        before.num_free = 0


def test_errors_tell_whose_doing_it_is():
    for mistake in (InvalidTokens, InvalidConfig, InvalidLease):
        assert issubclass(mistake, CallerError)
        assert issubclass(mistake, ValueError)
    for other in (OutOfBlocks, InvariantViolation):
        assert issubclass(other, CacheError)
        assert not issubclass(other, CallerError)


def test_a_refusal_says_how_much_was_missing_and_what_to_do(make_cache):
    cache = make_cache(num_blocks=2)
    with pytest.raises(OutOfBlocks) as refusal:
        acquire(cache, [1, 2, 3])
    assert (refusal.value.needed, refusal.value.free, refusal.value.evictable) == (3, 2, 0)
    assert str(refusal.value) == (
        "3 blocks needed, but only 2 are free and 0 evictable: release a lease or use a larger pool"
    )
