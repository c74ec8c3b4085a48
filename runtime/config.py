"""Settings of the runtime, their defaults and limits.

Owns: every number that a user can set.  Does not know: models, devices, what a setting costs.
"""

from __future__ import annotations

import msgspec

from radixcache.policy import POLICIES
from runtime.errors import InvalidSetting
from runtime.exactness.promise import EXACT, Exact
from runtime.scheduler.ordering import ORDERINGS

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that `radixcache pull` fetches and every command uses unless told otherwise."""

MAX_THREADS = 1024

DTYPES = ("auto", "float32", "bfloat16", "float16")

WEIGHTS = ("auto", "file", "float32", "bfloat16")

ACTIVATIONS = ("full", "int8")


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a runtime is built from.

    model                the embedded model's name, a .gguf file, a Hugging Face folder or hub name
    device               "auto" (CUDA where there is one, else the CPU), "cpu", "cuda", "cuda:1" …
    dtype                of activations and the KV cache, by name; "auto" is bfloat16 where the
                         device computes it faster, float32 elsewhere
    weights              how they are kept in memory: "file" (as the file stores them, quantised
                         or in 16 bits), "float32", "bfloat16"; "auto" is "file" where the kernels
                         compute with such weights, else `dtype`.  Results are the same bits as
                         with weights that were converted to `dtype`
    activations          "full", or "int8": products with quantised weights round their rows to 8
                         bits, block by block, and multiply integers; faster, less exact
    kv_memory_bytes      memory for K/V, in bytes
    num_blocks           blocks of the pool, instead of `kv_memory_bytes`
    block_size           tokens a block; prefixes are published in whole blocks
    enable_prefix_cache  False computes every prompt whole
    eviction_policy      which cached blocks go first: lru, lfu, slru, fifo, mru, cost, priority
                         or adaptive
    max_ghosts           evicted blocks that are remembered, about 150 bytes each, to tell in an
                         explanation what was evicted from what was never seen; 0: none
    max_len              longest sequence in tokens; None takes what model and pool allow
    max_step_tokens      tokens computed in one step, over all sequences (the token budget)
    max_chunk_tokens     tokens of one prompt computed in one step; 0: as many as the budget has
    max_running          sequences computed together
    max_waiting          requests that may wait; more are refused
    ordering             who waits less: fcfs, longest_prefix, depth_first or priority
    max_overtaken        how many later requests may be admitted before one that waits
    watermark            share of the pool that stays free for running sequences to grow into when
                         another is admitted
    debug_seals          check each block against its seal before a step reads it; slow
    num_threads          threads of the CPU kernels; 0 leaves the choice to torch
    exact                what to do where a token's bits depend on its batch on this machine:
                         "require" (don't start), "warn", or "off" (don't check)

    Raises InvalidSetting that names the field.
    """

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    activations: str = "full"
    kv_memory_bytes: int = 1 << 30
    num_blocks: int | None = None
    block_size: int = 16
    enable_prefix_cache: bool = True
    eviction_policy: str = "lru"
    max_ghosts: int = 65_536
    max_len: int | None = None
    max_step_tokens: int = 512
    max_chunk_tokens: int = 0
    max_running: int = 64
    max_waiting: int = 1024
    ordering: str = "fcfs"
    max_overtaken: int = 64
    watermark: float = 0.01
    num_threads: int = 0
    exact: Exact = "warn"
    debug_seals: bool = False

    def __post_init__(self) -> None:
        for name, choices in (
            ("dtype", DTYPES),
            ("weights", WEIGHTS),
            ("activations", ACTIVATIONS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise InvalidSetting(f"{name} is {value!r}: choose one of {', '.join(choices)}")
        if self.eviction_policy not in POLICIES:
            raise InvalidSetting(
                f"eviction_policy is {self.eviction_policy!r}: choose one of {', '.join(POLICIES)}"
            )
        if self.exact not in EXACT:
            raise InvalidSetting(f"exact is {self.exact!r}: choose one of {', '.join(EXACT)}")
        for name in ("enable_prefix_cache", "debug_seals"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSetting(f"{name} must be True or False")
        for name in ("kv_memory_bytes", "block_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("num_blocks", "max_len"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        for name in ("num_threads", "max_ghosts"):
            _at_least(name, getattr(self, name), 0)
        if self.num_threads > MAX_THREADS:
            raise InvalidSetting(f"num_threads is {self.num_threads}: at most {MAX_THREADS}")
        self.engine(max_len=self.max_len or 1)  # checks the rest

    def engine(self, *, max_len: int) -> EngineConfig:
        """Return the engine's part of the settings.  Raises InvalidSetting."""
        return EngineConfig(
            max_len=max_len,
            max_step_tokens=self.max_step_tokens,
            max_chunk_tokens=self.max_chunk_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            ordering=self.ordering,
            max_overtaken=self.max_overtaken,
            watermark=self.watermark,
        )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine needs of the settings; see `RuntimeConfig` for each.

    Raises InvalidSetting that names the field.
    """

    max_len: int
    max_step_tokens: int = 512
    max_chunk_tokens: int = 0
    max_running: int = 64
    max_waiting: int = 1024
    ordering: str = "fcfs"
    max_overtaken: int = 64
    watermark: float = 0.01

    def __post_init__(self) -> None:
        if self.ordering not in ORDERINGS:
            raise InvalidSetting(
                f"ordering is {self.ordering!r}: choose one of {', '.join(ORDERINGS)}"
            )
        if not isinstance(self.watermark, int | float) or not 0 <= self.watermark < 1:
            raise InvalidSetting(f"watermark must be from 0 to below 1, not {self.watermark!r}")
        _at_least("max_overtaken", self.max_overtaken, 0)
        for name in ("max_len", "max_step_tokens", "max_running", "max_waiting"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_chunk_tokens", self.max_chunk_tokens, 0)
        if self.max_step_tokens <= self.max_running:
            raise InvalidSetting(
                f"max_step_tokens ({self.max_step_tokens}) must exceed max_running "
                f"({self.max_running}), so that prompts advance while every sequence decodes"
            )


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidSetting(f"{name} must be a whole number of at least {least}, not {value!r}")
