"""Configuration of the cache core.

Owns: the numbers that a cache is built from, and their limits.  Does not know: bytes or devices.
"""

from __future__ import annotations

import msgspec

from radixcache.errors import InvalidConfig

MAX_BLOCKS = 2**31 - 1
"""Block ids are int32."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `RadixCache` is built from.

    num_blocks           blocks in the pool, at least 1
    block_size           tokens a block, at least 1; prefixes are published in whole blocks
    enable_prefix_cache  False: every prompt is computed whole, nothing is published
    max_ghosts           evicted blocks that are remembered, so that `explain` can tell what was
                         evicted from what was never seen, about 150 bytes each; 0: none

    Raises InvalidConfig for numbers below these.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_cache: bool = True
    max_ghosts: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("block_size", 1), ("max_ghosts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidConfig(f"{name} must be an integer of at least {least}, not {value!r}")
        if self.num_blocks > MAX_BLOCKS:
            raise InvalidConfig(f"num_blocks is {self.num_blocks}: at most {MAX_BLOCKS}")
        if not isinstance(self.enable_prefix_cache, bool):
            raise InvalidConfig("enable_prefix_cache must be True or False")
