"""Where a prompt leaves the cache inside a block, the head of that block is found and copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixcache import BlockCopy, CacheConfig, PrefixKey, RadixCache
from tests.core.serving import acquire, insert


def test_a_prompt_that_ends_inside_a_cached_block_finds_all_but_its_last_token(make_cache):
    cache = make_cache(block_size=4)
    served = insert(cache, range(8))
    lease = acquire(cache, range(7))
    assert (lease.num_cached, lease.num_committed) == (6, 4)
    assert lease.copy_owed == BlockCopy(served.block_ids[1], lease.block_table[1], 2)


def test_a_prompt_that_parts_inside_an_edge_finds_the_common_tokens(make_cache):
    cache = make_cache(block_size=4)
    served = insert(cache, range(12))
    lease = acquire(cache, [*range(6), 99, 98, 97])
    assert lease.num_cached == 6
    assert lease.copy_owed == BlockCopy(served.block_ids[1], lease.block_table[1], 2)
    cache.commit(lease, 9)
    assert cache.match(PrefixKey.of([*range(6), 99, 98])).num_tokens == 8
    assert cache.match(PrefixKey.of(list(range(12)))).num_tokens == 12


def test_a_prompt_that_parts_at_the_edge_of_a_block_owes_no_copy(make_cache):
    cache = make_cache(block_size=4)
    insert(cache, range(8))
    lease = acquire(cache, [*range(4), 99])
    assert (lease.num_cached, lease.copy_owed) == (4, None)


def test_blocks_of_one_token_never_owe_a_copy(make_cache):
    cache = make_cache(block_size=1)
    insert(cache, range(8))
    lease = acquire(cache, [*range(5), 99, 98])
    assert (lease.num_cached, lease.copy_owed) == (5, None)


def test_large_blocks_find_as_many_tokens_as_small_ones():
    prompts = [[*range(50), *range(100 * i, 100 * i + 30)] for i in range(1, 5)]
    found = {}
    for block_size in (1, 4, 16, 64):
        cache = RadixCache(CacheConfig(num_blocks=1024, block_size=block_size))
        found[block_size] = []
        for prompt in prompts:
            # A sequence that grew to whole blocks, as the output behind a prompt does.
            whole = [*prompt, *[7] * (-len(prompt) % block_size)]
            lease = acquire(cache, whole)
            found[block_size].append(lease.num_cached)
            cache.commit(lease, len(whole))
            cache.release(lease)
        cache.check()
    assert found[1] == found[4] == found[16] == found[64] == [0, 50, 50, 50]


def test_the_source_of_a_copy_may_be_evicted_by_the_same_call(make_cache):
    cache = make_cache(num_blocks=2, block_size=4)
    served = insert(cache, range(8))
    lease = acquire(cache, [*range(2), 90, 91, 92])
    assert lease.num_cached == 2
    assert lease.copy_owed is not None
    assert lease.copy_owed.src == served.block_ids[0]
    assert sorted(lease.block_table) == [0, 1]
    cache.check()


@given(
    children=st.sets(st.lists(st.integers(0, 300), min_size=3, max_size=3).map(tuple), max_size=40),
    dropped=st.integers(0, 20),
    query=st.lists(st.integers(0, 300), min_size=1, max_size=3),
)
def test_among_many_children_the_nearest_is_found(children, dropped, query):
    cache = RadixCache(CacheConfig(num_blocks=64, block_size=3))
    for child in sorted(children, key=lambda tokens: tokens[::-1]):
        insert(cache, child)
        acquired = acquire(cache, [*query, 0])  # keeps the order in use while children come and go
        cache.release(acquired)
        cache.check()
    gone = max(0, min(dropped, len(children) - 1))
    cache.evict(gone)
    left = {tuple(n for n in key) for key in _cached_blocks(cache)}
    expected = max((_common(child, query) for child in left), default=0)
    lease = acquire(cache, [*query, 0])
    assert lease.num_cached == expected
    cache.release(lease)
    cache.check()


def _cached_blocks(cache: RadixCache) -> list[tuple[int, ...]]:
    return [tuple(_ids(node.tokens)) for node in cache.view().nodes if node.depth == 0]


def _ids(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]


def _common(left: tuple[int, ...], right: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
