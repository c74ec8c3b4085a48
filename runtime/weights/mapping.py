"""Names and shapes of the tensors of a Llama-like model.

Owns: the canonical names (those of Hugging Face's Llama), what each must measure, GGUF's names for
them.  Does not know: file formats, dtypes, torch.
Idea: a file is checked whole against the list that its own config implies, before any weight is
read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from runtime.errors import ModelFileError
from runtime.models.config import ModelConfig

_FROM_GGUF = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


def canonical_name(gguf_name: str) -> str | None:
    """Translate a tensor's GGUF name, or return None for a name outside the Llama family.

    >>> canonical_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match = _GGUF_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _FROM_GGUF:
        return None
    layer, stem, kind = match.groups()
    prefix = "" if layer is None else f"model.layers.{int(layer)}."
    return f"{prefix}{_FROM_GGUF[stem]}.{kind}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return each tensor that a model of this shape has: canonical name to dimensions."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        attention = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden)}
        attention["o"] = (hidden, q_rows)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        for letter, shape in attention.items():
            shapes[f"{at}self_attn.{letter}_proj.weight"] = shape
            if config.attention_bias:
                shapes[f"{at}self_attn.{letter}_proj.bias"] = shape[:1]
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{at}mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_shapes(found: Mapping[str, tuple[int, ...]], config: ModelConfig, where: str) -> None:
    """Compare a file's tensors with what its config implies.

    found  canonical name to dimensions, of every tensor in the file
    Errors: ModelFileError that names the first tensors that are missing, surplus or misshapen.
    """
    if config.num_layers > len(found):  # before a list is made that a lying header could blow up
        raise ModelFileError(
            f"{where} claims {config.num_layers} layers but holds only {len(found)} tensors: "
            "it is damaged or incomplete; fetch it again"
        )
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelFileError(
            f"{where} lacks {_some(missing)}: it is incomplete, or not a Llama-like model; "
            "fetch it again or choose another model"
        )
    surplus = [name for name in found if name not in expected]
    if surplus:
        raise ModelFileError(
            f"{where} holds {_some(surplus)}, which a Llama-like model does not have; "
            "this kind of model is not supported"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{where}: tensor {name} measures {list(found[name])}, but the model's "
                f"configuration implies {list(shape)}; the file and its configuration do not "
                "belong together, fetch both again"
            )


def _some(names: list[str]) -> str:
    """Name up to three tensors and count the rest."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
