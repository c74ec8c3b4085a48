"""SGLang's prefix caches behind the verbs of core_ours.py.

Owns: which of SGLang's calls make up one request, as its scheduler makes them.  Page ids come from
a thin stack in numpy, faster than SGLang's own allocators: the comparison is of trees.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from peers_import import import_sglang


class PageStack:
    """Free pages as a stack of ids; the part of SGLang's allocators that its trees call."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        import torch

        self._from_numpy = torch.from_numpy
        self.device = torch.device("cpu")
        self.page_size = page_size
        self.stack = np.arange(num_pages, 0, -1, dtype=np.int64)
        self.top = num_pages

    def available_size(self) -> int:
        return self.top * self.page_size

    def alloc(self, num_tokens: int) -> Any:
        size = self.page_size
        count = -(-num_tokens // size)
        assert count <= self.top, "the pool is too small"
        pages = self.stack[self.top - count : self.top][::-1].copy()
        self.top -= count
        if size > 1:
            pages = (pages[:, None] * size + np.arange(size)).reshape(-1)
        return self._from_numpy(pages)

    def free(self, slots: Any) -> None:
        pages = slots.numpy()[:: self.page_size] // self.page_size
        self.stack[self.top : self.top + len(pages)] = pages
        self.top += len(pages)

    def free_segment(self, slots: Any, *, start_pos: int) -> None:
        self.free(slots)

    def mamba_full_cache_donor(self) -> None:
        return None


class _Sequence:
    """One running request: its tokens, its slots, what of them is the tree's, and its lock."""

    __slots__ = ("lock", "owned", "slots", "tokens")


class SGLang:
    """What SGLang's caches share.  A request keeps its ids as an array of int64."""

    name = ""
    by_turns = True
    token_bytes = 8

    def build(self, block_size: int, num_blocks: int) -> None:
        import_sglang()
        import torch

        torch.set_num_threads(1)
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.page, self.base, self.new_key = block_size, base, RadixKey
        self.cat, self.no_slots = torch.cat, torch.empty(0, dtype=torch.int64)
        self.pool = PageStack(num_blocks, block_size)
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def run_of(self, ids: Any) -> Any:
        return array("q", ids.astype(np.int64).tobytes())

    def head(self, run: Any, num_tokens: int) -> Any:
        return run[:num_tokens]

    def key_of_list(self, ids: list[int]) -> Any:
        return self.new_key(array("q", ids))

    def key(self, run: Any) -> Any:
        return self.new_key(run)

    def match(self, key: Any) -> int:
        num_tokens, node = self.find(key)
        self.slots(node)
        return num_tokens

    def match_len(self, key: Any) -> int:
        return self.find(key)[0]

    def find(self, key: Any) -> tuple[int, Any]:
        found = self.tree.match_prefix(self.base.MatchPrefixParams(key=key))
        return found.device_prefix_len, found.last_device_node

    def slots(self, node: Any) -> Any:
        return self.tree.path_device_indices(node)

    def insert(self, run: Any, slots: Any, owned: int) -> Any:
        raise NotImplementedError

    def lock(self, node: Any) -> Any:
        raise NotImplementedError

    def unlock(self, lock: Any) -> None:
        raise NotImplementedError

    def _room(self, num_tokens: int) -> Any:
        short = num_tokens - self.pool.available_size()
        if short > 0:
            self.evict(-(-short // self.page))
        return self.pool.alloc(num_tokens)

    def begin(self, run: Any) -> Any:
        sequence = _Sequence()
        num_tokens, node = self.find(self.key(run[:-1]))  # the last token is always computed
        sequence.lock, sequence.tokens, sequence.owned = self.lock(node), run, num_tokens
        fresh = self._room(-(-(len(run) - num_tokens) // self.page) * self.page)
        sequence.slots = self.cat([self.slots(node), fresh])
        return sequence

    def found(self, sequence: Any) -> tuple[int, int]:
        return sequence.owned, sequence.owned

    def publish(self, sequence: Any, end: int | None = None) -> None:
        whole = (len(sequence.tokens) if end is None else end) // self.page * self.page
        node = self.insert(sequence.tokens[:whole], sequence.slots[:whole], sequence.owned)
        lock = self.lock(node)
        self.unlock(sequence.lock)
        sequence.lock, sequence.owned = lock, whole

    def extend(self, sequence: Any, run: Any) -> None:
        sequence.tokens = sequence.tokens + run
        need = -(-(len(sequence.tokens) - len(sequence.slots)) // self.page) * self.page
        if need > 0:
            sequence.slots = self.cat([sequence.slots, self._room(need)])

    def end(self, sequence: Any) -> None:
        whole = len(sequence.tokens) // self.page * self.page
        if whole > sequence.owned:
            self.insert(sequence.tokens[:whole], sequence.slots[:whole], sequence.owned)
        if len(sequence.slots) > whole:
            self.pool.free(sequence.slots[whole:])
        self.unlock(sequence.lock)

    def evict(self, num_blocks: int) -> None:
        self.tree.evict(self.base.EvictParams(num_tokens=num_blocks * self.page))

    def num_cached_tokens(self) -> int:
        total = self.tree.total_size()
        return total[0] if isinstance(total, tuple) else total


def _init_params(cache: SGLang, **more: Any) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=cache.pool,
        page_size=cache.page,
        eviction_policy="lru",
        **more,
    )


class SGLangClassic(SGLang):
    """The older tree, in Python."""

    name = "sglang-classic"

    def open(self) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.tree = RadixCache(_init_params(self))

    def insert(self, run: Any, slots: Any, owned: int) -> Any:
        done = self.tree.insert(self.base.InsertParams(key=self.key(run), value=slots))
        if done.prefix_len > owned:  # as its caller in the same file does
            self.pool.free(slots[owned : done.prefix_len])
        return done.last_device_node

    def lock(self, node: Any) -> Any:
        self.tree.inc_lock_ref(node)
        return node

    def unlock(self, lock: Any) -> None:
        self.tree.dec_lock_ref(lock)


class SGLangUnifiedPython(SGLang):
    """The present tree on its core in Python."""

    name = "sglang-python"
    core = "python"

    def open(self) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        full = (ComponentType.FULL,)
        self.tree = UnifiedRadixCache(
            _init_params(self, tree_components=full, tree_core_backend=self.core)
        )

    def insert(self, run: Any, slots: Any, owned: int) -> Any:
        params = self.base.InsertParams(key=self.key(run), value=slots, prev_prefix_len=owned)
        return self.tree.insert(params).last_device_node

    def lock(self, node: Any) -> Any:
        return self.tree.lock(node)

    def unlock(self, lock: Any) -> None:
        self.tree.unlock(lock)


class SGLangRust(SGLangUnifiedPython):
    """The present tree on its core in Rust: SGLang's default."""

    name = "sglang-rust"
    core = "rust"


class SGLangRustRaw(SGLang):
    """The Rust core called directly: what a caller without SGLang's controller could reach."""

    name = "sglang-rust-raw"

    def open(self) -> None:
        from sglang.srt.mem_cache.rust_tree_core.extension import bindings

        self.bindings = bindings
        params = bindings.TreeCoreInitParamsBinding(
            eviction_policy="lru",
            slru_protected_threshold=2,
            tlru_tail_budget=0,
            tlru_float_config=None,
            page_size=self.page,
            is_write_back=False,
            enable_hicache=False,
            write_through_threshold=256,
            device="cpu",
            swa_sliding_window_size=None,
            swa_req_ring=False,
            enable_kv_cache_events=False,
            dynamo_kv_event_format=False,
            mamba_cache_chunk_size=None,
            mamba_max_states_per_path=None,
        )
        self.tree = bindings.RustUnifiedTreeCoreBinding(params, [0])
        self.root = self.tree.empty_match_result().last_device_node_id

    def key_of_list(self, ids: list[int]) -> Any:
        return array("q", ids)

    def key(self, run: Any) -> Any:
        return run

    def find(self, key: Any) -> tuple[int, Any]:
        params = self.bindings.MatchParamsBinding(key=key, extra_key=None, cache_salt=None)
        found = self.tree.match_prefix(params)
        return found.device_prefix_len, found.last_device_node_id

    def slots(self, node: Any) -> Any:
        return self.tree.collect_full_device_indices(node, self.root)

    def insert(self, run: Any, slots: Any, owned: int) -> Any:
        step = self.tree.begin_insert(
            self.bindings.InsertParamsBinding(
                key=run,
                value=slots,
                extra_key=None,
                cache_salt=None,
                session_id=None,
                mamba_value=None,
                prev_prefix_len=owned,
                swa_evicted_seqlen=0,
                swa_branching_seqlen=None,
                inserted_len=0,
                priority=0,
                track_adopted_ranges=False,
                rotation_base=None,
            )
        )
        while True:
            for action in step.actions:
                if action[0] == "free_device_kv":
                    for freed in action[1]:
                        self.pool.free(freed)
            if step.result is not None:
                return step.result.last_device_node
            step = self.tree.resume_insert()

    def lock(self, node: Any) -> Any:
        held = self.tree.inc_lock_ref(node, [])
        return node, self.bindings.DecLockRefParamsBinding(
            node_id=held.node_id,
            skipped_lock_components=held.skipped_lock_components,
            component_lock_uuids=held.component_lock_uuids,
            component_host_lock_uuids=held.component_host_lock_uuids,
        )

    def unlock(self, lock: Any) -> None:
        self.tree.dec_lock_ref(lock[0], lock[1], False)

    def evict(self, num_blocks: int) -> None:
        tree, done = self.tree, {0: 0}
        tree.evict_device_start(0, num_blocks * self.page)
        while True:
            step = tree.evict_device_next_node(0, done)
            if step.node_id is None:
                if not step.made_progress:
                    break
                continue
            leaf = tree.evict_device_leaf(step.node_id)
            for freed in leaf.new_device_frees.values():
                for slots in freed:
                    self.pool.free(slots)
            for component, count in leaf.tracker.items():
                done[component] += count
        tree.evict_device_end(0)
