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

    Raises InvalidConfig for numbers below 1.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfig(f"{name} must be an integer of at least 1, not {value!r}")
        if self.num_blocks > MAX_BLOCKS:
            raise InvalidConfig(f"num_blocks is {self.num_blocks}: at most {MAX_BLOCKS}")
        if not isinstance(self.enable_prefix_cache, bool):
            raise InvalidConfig("enable_prefix_cache must be True or False")
