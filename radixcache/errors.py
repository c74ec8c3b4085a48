"""Errors of the cache core, drawn as a tree: whose doing is it?

CacheError
├── CallerError            the caller's mistake; nothing was changed
│   ├── InvalidTokens         token ids that can't be packed
│   ├── InvalidConfig         a cache that can't be built
│   ├── InvalidLease          a lease that is released, foreign, or asked for the impossible
│   ├── StaleEpoch            a namespace whose epoch was raised since
│   ├── InvalidSnapshot       a manifest that is damaged, or does not fit this cache
│   └── InvalidTrace          a trace that can't be read or replayed
├── OutOfBlocks            the world: the pool is too small right now; nothing was changed
└── InvariantViolation     our bug; the cache can't be trusted any more
    └── BrokenSeal            a block is used for other tokens than it was published for
"""


class CacheError(Exception):
    """Base of every error that the core raises on purpose."""


class CallerError(CacheError, ValueError):
    """The caller's mistake.  The cache is as it was before the call."""


class InvalidTokens(CallerError):
    """Token ids that are not integers from 0 to 2³¹ − 1."""


class InvalidConfig(CallerError):
    """A configuration from which no cache can be built."""


class InvalidLease(CallerError):
    """A lease that is released, belongs to another cache, or is asked for the impossible."""


class StaleEpoch(CallerError):
    """A namespace whose epoch was raised since: use the one that `raise_epoch` returned."""


class InvalidSnapshot(CallerError):
    """A manifest that is damaged, or does not fit this cache; nothing of it was taken."""


class InvalidTrace(CallerError):
    """A trace that can't be read, or not in this way; the message names the line."""


class OutOfBlocks(CacheError):
    """The pool has too few blocks that are free or evictable.

    The lease is as it was before the call.  Release a lease (preempt a sequence), or use a larger
    pool, and try again.

    needed     blocks that the call needs beside those it could share
    free       blocks free right now
    evictable  cached blocks that could be evicted for this call: not those of another
               namespace's share
    quota      the namespace's quota where its hard limit is what refuses the call, of which
               `free` is left; else None
    """

    def __init__(
        self, *, needed: int, free: int, evictable: int, quota: object | None = None
    ) -> None:
        have = f"{needed} blocks needed, but only {free} are free and {evictable} evictable"
        super().__init__(
            f"{have}: release a lease or use a larger pool"
            if quota is None
            else f"{have} within {quota}: release a lease of this namespace or raise its hard limit"
        )
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.quota = quota


class InvariantViolation(CacheError, AssertionError):
    """The cache's own state contradicts itself: a bug in the cache, not in its caller."""


class BrokenSeal(InvariantViolation):
    """A block is about to be used for other tokens than it was published for; found by `Seals`."""
