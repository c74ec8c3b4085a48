"""Other engines' prefix caches behind the verbs of core_ours.py: which there are, and vLLM's.

Runs in the peers' environments, where radixcache is not installed.

    SGLang   radix_cache.RadixCache, unified_radix_cache.UnifiedRadixCache on its Python and its
             Rust core, and the Rust core called directly
    vLLM     v1.core.kv_cache_manager.KVCacheManager: block pool, hashes, one full-attention group
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from peers_sglang import SGLangClassic, SGLangRust, SGLangRustRaw, SGLangUnifiedPython


class _Sequence:
    """One running request: vLLM's record, what it found, and its blocks until they are taken."""

    __slots__ = ("blocks", "found", "request")

    def __init__(self, request: Any, blocks: Any, found: int) -> None:
        self.request, self.blocks, self.found = request, blocks, found


class VLLM:
    """vLLM's manager of KV blocks.  A request keeps its ids as a list, and hashes its blocks."""

    name = "vllm"
    by_turns = False  # no tree: a prompt published by turns leaves what it leaves published once
    token_bytes = 0  # it keeps hashes

    def build(self, block_size: int, num_blocks: int) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import torch

        torch.set_num_threads(1)
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        init_none_hash(sha256)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # one is its null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        self.request, self.block_size, self.num_requests = Request, block_size, 0
        self.hasher: Callable[..., Any] = get_request_block_hasher(block_size, sha256)
        self.params = SamplingParams(max_tokens=1)
        self.evicted: list[Any] = []

    def run_of(self, ids: Any) -> Any:
        return ids.tolist()

    def head(self, run: Any, num_tokens: int) -> Any:
        return run[:num_tokens]

    def key_of_list(self, ids: list[int]) -> Any:
        return self.key(ids)

    def key(self, run: Any) -> Any:
        if self.evicted:
            self.manager.block_pool.free_blocks(self.evicted)
            self.evicted = []
        self.num_requests += 1
        name = str(self.num_requests)
        return self.request(name, run, self.params, None, block_hasher=self.hasher)

    def match(self, key: Any) -> int:
        blocks, num_tokens, _ = self.manager.get_computed_blocks(key)
        blocks.get_block_ids()
        return num_tokens

    def begin(self, run: Any) -> Any:
        request = self.key(run)
        blocks, num_tokens, _ = self.manager.get_computed_blocks(request)
        return _Sequence(request, blocks, num_tokens)

    def found(self, sequence: Any) -> tuple[int, int]:
        return sequence.found, sequence.found

    def publish(self, sequence: Any, end: int | None = None) -> None:
        request, blocks = sequence.request, sequence.blocks
        if end is None:
            end = request.num_tokens
        if blocks is None:
            taken = self.manager.allocate_slots(request, end - request.num_computed_tokens)
        else:
            found, sequence.blocks = sequence.found, None
            taken = self.manager.allocate_slots(request, end - found, found, blocks)
        assert taken is not None, "the pool is too small"
        request.num_computed_tokens = end

    def extend(self, sequence: Any, run: Any) -> None:
        request = sequence.request
        request.append_output_token_ids(run)
        taken = self.manager.allocate_slots(request, len(run))
        assert taken is not None, "the pool is too small"
        request.num_computed_tokens = request.num_tokens

    def end(self, sequence: Any) -> None:
        self.manager.free(sequence.request)

    def evict(self, num_blocks: int) -> None:
        pool = self.manager.block_pool
        self.evicted += pool.get_new_blocks(num_blocks)  # the oldest leave the cache; held, or
        # they would be the next to be taken

    def num_cached_tokens(self) -> int:
        return len(self.manager.block_pool.cached_block_hash_to_block) * self.block_size


PEERS = {
    "sglang": (SGLangClassic, SGLangUnifiedPython, SGLangRust, SGLangRustRaw),
    "vllm": (VLLM,),
}
"""Peers by the distribution that must be installed."""


def installed() -> list[str]:
    """Return the names of the peers that this environment can run."""
    return [
        peer.name
        for package, peers in PEERS.items()
        if importlib.util.find_spec(package) is not None
        for peer in peers
    ]


def make(name: str) -> Any:
    """Return a peer by name, not built yet."""
    return next(peer for peers in PEERS.values() for peer in peers if peer.name == name)()
