"""Fixtures of the core's tests: every cache that a test makes is checked when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from radixcache import CacheConfig, RadixCache


def new_cache(num_blocks: int = 16, block_size: int = 1, **config: bool) -> RadixCache:
    """A cache of 16 blocks of one token, unless asked otherwise."""
    return RadixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size, **config))


@pytest.fixture
def make_cache() -> Iterator[Callable[..., RadixCache]]:
    """`new_cache`, with a check of each when the test ends."""
    made: list[RadixCache] = []

    def make(*sizes: int, **config: int) -> RadixCache:
        made.append(new_cache(*sizes, **config))
        return made[-1]

    yield make
    for cache in made:
        cache.check()


@pytest.fixture
def cache(make_cache: Callable[..., RadixCache]) -> RadixCache:
    """A cache of 16 blocks of one token."""
    return make_cache()
