"""radixcache: a radix tree of token prefixes over refcounted KV blocks.

The core decides what is cached, shared and evicted; it moves no bytes and needs no torch.

    cache = RadixCache(CacheConfig(num_blocks=1024, block_size=16))
    lease = cache.acquire(PrefixKey.of(prompt_ids))     # lease.num_cached tokens are there already
    …compute K/V of the rest into the blocks of lease.block_table…
    cache.commit(lease, lease.num_tokens)               # publish it
    cache.release(lease)                                # stays cached until its room is needed
"""

from radixcache.accounts import Quota
from radixcache.cache import RadixCache
from radixcache.config import CacheConfig
from radixcache.deadlines import Hold
from radixcache.errors import (
    BrokenSeal,
    CacheError,
    CallerError,
    InvalidConfig,
    InvalidLease,
    InvalidSnapshot,
    InvalidTokens,
    InvalidTrace,
    InvariantViolation,
    OutOfBlocks,
    StaleEpoch,
)
from radixcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventRecorder,
    encode_batch,
)
from radixcache.explain import Cause, Explanation
from radixcache.ghosts import Evicted, GhostMemory
from radixcache.hashing import BlockHasher
from radixcache.lease import BlockCopy, Commit, Lease, Match, PrefixKey
from radixcache.namespace import DEFAULT_NAMESPACE, Namespace
from radixcache.node import NodeFacts
from radixcache.observer import TreeObserver
from radixcache.policy import (
    FIFO,
    LFU,
    LRU,
    MRU,
    POLICIES,
    SLRU,
    CostAware,
    EvictionPolicy,
    Priority,
)
from radixcache.retention import Retention
from radixcache.seal import Seal, Seals, seals_of, tree_seals
from radixcache.snapshot import dump_tree, load_tree
from radixcache.stats import CacheStats, NamespaceStats
from radixcache.tokens import pack_tokens, unpack_tokens
from radixcache.view import NodeView, TreeView, render_text

__all__ = [
    "DEFAULT_NAMESPACE",
    "FIFO",
    "LFU",
    "LRU",
    "MRU",
    "POLICIES",
    "SLRU",
    "AllBlocksCleared",
    "BlockCopy",
    "BlockHasher",
    "BlockRemoved",
    "BlockStored",
    "BrokenSeal",
    "CacheConfig",
    "CacheError",
    "CacheStats",
    "CallerError",
    "Cause",
    "Commit",
    "CostAware",
    "EventRecorder",
    "Evicted",
    "EvictionPolicy",
    "Explanation",
    "GhostMemory",
    "Hold",
    "InvalidConfig",
    "InvalidLease",
    "InvalidSnapshot",
    "InvalidTokens",
    "InvalidTrace",
    "InvariantViolation",
    "Lease",
    "Match",
    "Namespace",
    "NamespaceStats",
    "NodeFacts",
    "NodeView",
    "OutOfBlocks",
    "PrefixKey",
    "Priority",
    "Quota",
    "RadixCache",
    "Retention",
    "Seal",
    "Seals",
    "StaleEpoch",
    "TreeObserver",
    "TreeView",
    "dump_tree",
    "encode_batch",
    "load_tree",
    "pack_tokens",
    "render_text",
    "seals_of",
    "tree_seals",
    "unpack_tokens",
]
