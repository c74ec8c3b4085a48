"""The shape of a model, in our words, whatever file it came from.

Owns: the numbers that decide compute and K/V memory.  Does not know: files, tensors, torch.
Idea: each file format translates into this one record, and nothing else reads its keys.
"""

from __future__ import annotations

import math

import msgspec

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_len",
)


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rotary frequencies are changed for contexts longer than the trained one.

    kind                   "linear" (divide every frequency by `factor`) or "llama3"
                           (divide low frequencies, keep high ones, blend between)
    factor                 by how much the context is stretched
    low_freq_factor, high_freq_factor, original_max_len   of "llama3"
    Errors: ValueError for another kind or for numbers that no model can have.
    Source: Chen et al. 2023 (position interpolation); Llama 3.1 model card.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope scaling {self.kind!r} is neither 'linear' nor 'llama3'")
        if not self.factor > 0 or self.original_max_len < 1:
            raise ValueError(f"rope scaling has factor {self.factor}, must be positive")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"rope scaling has low_freq_factor {self.low_freq_factor} and high_freq_factor "
                f"{self.high_freq_factor}; the second must be the larger, and both positive"
            )


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions and constants of one decoder-only transformer.

    max_len            longest sequence that the model was trained for, in tokens
    attention_bias     whether the q, k, v and o projections add a bias
    rope_freq_factors  divisor of each rotary frequency, head_dim / 2 of them, as a GGUF stores
                       them in place of `rope_scaling`; None where there are none
    Errors: ValueError for numbers that no model can have.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_freq_factors: tuple[float, ...] | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but rotary pairs need it even")
        if not (0 < self.rope_theta < math.inf and 0 < self.rms_norm_eps < math.inf):
            raise ValueError(
                f"rope_theta {self.rope_theta} and rms_norm_eps {self.rms_norm_eps} "
                "must be positive and finite"
            )
        factors = self.rope_freq_factors
        if factors is not None and (
            len(factors) != self.head_dim // 2 or not all(0 < f < math.inf for f in factors)
        ):
            raise ValueError(f"rope_freq_factors must be {self.head_dim // 2} positive numbers")

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of K and V that one token keeps, over all layers.

        2 (K and V) × layers × kv heads × head dim × bytes of one number.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
