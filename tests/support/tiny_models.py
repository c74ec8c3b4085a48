"""Llama-like models of a few thousand random weights, and a dense float64 forward pass of them.

Owns: configs, weights, and what a model must compute.  Does not know: paging, batches, files.
Idea: the reference shares no code with the runtime; it sees one sequence, whole, and is written the
slow way, a head at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from runtime.models.config import ModelConfig

Weights = dict[str, torch.Tensor]


def tiny_config(**changes: Any) -> ModelConfig:
    """A config of two layers, three query heads a key head; `changes` are fields of it."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_len": 320,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    return ModelConfig(**fields | changes)


def random_weights(config: ModelConfig, *, seed: int = 0) -> Weights:
    """Random float32 tensors under their canonical names, about as large as trained ones."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    weights = {"model.embed_tokens.weight": 2 * normal(config.vocab_size, hidden)}
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        for letter, count in heads.items():
            weights[f"{at}self_attn.{letter}_proj.weight"] = 3 * normal(count * dim, hidden)
            if config.attention_bias:
                weights[f"{at}self_attn.{letter}_proj.bias"] = normal(count * dim)
        weights[f"{at}self_attn.o_proj.weight"] = normal(hidden, config.num_heads * dim)
        if config.attention_bias:
            weights[f"{at}self_attn.o_proj.bias"] = normal(hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = 1 + normal(hidden)
        for name in ("gate", "up"):
            weights[f"{at}mlp.{name}_proj.weight"] = normal(ffn, hidden)
        weights[f"{at}mlp.down_proj.weight"] = normal(hidden, ffn)
    weights["model.norm.weight"] = 1 + normal(hidden)
    if not config.tie_embeddings:
        weights["lm_head.weight"] = normal(config.vocab_size, hidden)
    return weights


def dense_logits(config: ModelConfig, weights: Weights, token_ids: list[int]) -> torch.Tensor:
    """Logits behind every token of one sequence, [T, vocab] float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][token_ids]
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        normed = _norm(x, w[f"{at}input_layernorm.weight"], config.rms_norm_eps)
        x = x + _dense_attention(config, w, f"{at}self_attn.", normed)
        normed = _norm(x, w[f"{at}post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = normed @ w[f"{at}mlp.gate_proj.weight"].T
        up = normed @ w[f"{at}mlp.up_proj.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return _norm(x, w["model.norm.weight"], config.rms_norm_eps) @ head.T


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _dense_attention(config: ModelConfig, w: Weights, at: str, x: torch.Tensor) -> torch.Tensor:
    def project(letter: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ w[f"{at}{letter}_proj.weight"].T + w.get(f"{at}{letter}_proj.bias", 0)

    dim, group = config.head_dim, config.num_heads // config.num_kv_heads
    q, k, v = project("q", x), project("k", x), project("v", x)
    ahead = torch.ones(len(x), len(x)).triu(1).bool()
    mixed = []
    for head in range(config.num_heads):
        at_q = slice(head * dim, (head + 1) * dim)
        at_kv = slice(head // group * dim, (head // group + 1) * dim)
        scores = _turn(q[:, at_q], config) @ _turn(k[:, at_kv], config).T / math.sqrt(dim)
        mixed.append(scores.masked_fill(ahead, -math.inf).softmax(-1) @ v[:, at_kv])
    return project("o", torch.cat(mixed, -1))


def _turn(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rotary positions as complex numbers: pair (i, i + D/2) turns by position · theta^(-2i/D)."""
    half = config.head_dim // 2
    freq = torch.tensor([config.rope_theta ** (-i / half) for i in range(half)]).double()
    angles = torch.arange(len(x)).double()[:, None] * freq
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)
