"""The shape of a model, in our words, whatever file it came from.

Owns: the numbers that decide compute and K/V memory.  Does not know: files, tensors, torch.
Idea: each file format translates into this one record, and nothing else reads its keys.
"""

from __future__ import annotations

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rotary frequencies are changed for contexts longer than the trained one.

    kind                   "linear" (divide every frequency by `factor`) or "llama3"
                           (divide low frequencies, keep high ones, blend between)
    factor                 by how much the context is stretched
    low_freq_factor, high_freq_factor, original_max_len   of "llama3"
    Source: Chen et al. 2023 (position interpolation); Llama 3.1 model card.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dimensions and constants of one decoder-only transformer.

    max_len  longest sequence that the model was trained for, in tokens
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
    tie_embeddings: bool = False
    attention_bias: bool = False

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of K and V that one token keeps, over all layers.

        2 (K and V) × layers × kv heads × head dim × bytes of one number.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
