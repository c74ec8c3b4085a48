"""The least work of each operation, from its shapes alone.

Owns: bytes that must move and operations that must be done.  Does not know: kernels, clocks, GPUs.
Idea: a time means something beside the time that nothing could beat: the larger of (bytes over
bandwidth) and (operations over rate).  Every number is moved once, whatever a kernel does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Work(NamedTuple):
    """Bytes moved between the chip and its memory, and floating-point operations."""

    bytes: float
    flop: float


class Ceilings(NamedTuple):
    """What a machine reaches at best: bytes copied (read and written) and matrix FLOP a second."""

    bytes_s: float
    flop_s: float


class Heads(NamedTuple):
    """Query heads, key heads and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def least_seconds(work: Work, ceilings: Ceilings) -> float:
    """Return the time that no implementation on this machine beats.

    >>> least_seconds(Work(bytes=4e9, flop=1e9), Ceilings(bytes_s=4e12, flop_s=1e15))
    0.001
    """
    return max(work.bytes / ceilings.bytes_s, work.flop / ceilings.flop_s)


def attention_work(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: Heads,
    *,
    element_bytes: int = 2,
    kv_bytes: int = 2,
    shared: int = 0,
) -> Work:
    """Return the work of causal attention of the last queries of some sequences.

    q_lens, seq_lens  queries and keys of each sequence
    element_bytes     of a query and a result
    kv_bytes          of a stored number
    shared            leading keys that all the sequences have in common, read once
    """
    num_queries = sum(q_lens)
    keys, pairs = _tokens_and_pairs(q_lens, seq_lens, shared)
    moved = 2 * num_queries * heads.num_heads * heads.head_dim * element_bytes
    read = 2 * keys * heads.num_kv_heads * heads.head_dim * kv_bytes
    return Work(bytes=moved + read, flop=4 * pairs * heads.num_heads * heads.head_dim)


def mla_work(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_heads: int,
    *,
    latent_dim: int = 512,
    rope_dim: int = 64,
    element_bytes: int = 2,
    latent_bytes: int = 2,
    shared: int = 0,
) -> Work:
    """Return the work of causal attention over latents, in absorbed form.

    q_lens, seq_lens  queries and stored tokens of each sequence
    element_bytes     of a query and a result
    latent_bytes      of a stored number
    shared            leading tokens that all the sequences have in common, read once
    """
    width = latent_dim + rope_dim
    tokens, pairs = _tokens_and_pairs(q_lens, seq_lens, shared)
    moved = sum(q_lens) * num_heads * (width + latent_dim) * element_bytes
    read = tokens * width * latent_bytes
    return Work(bytes=moved + read, flop=2 * pairs * num_heads * (width + latent_dim))


def _tokens_and_pairs(
    q_lens: Sequence[int], seq_lens: Sequence[int], shared: int
) -> tuple[float, float]:
    """Count the tokens that are read, and the queries that each is multiplied with."""
    tokens = sum(seq_lens) - shared * max(len(seq_lens) - 1, 0)
    pairs = sum(n * s - n * (n - 1) / 2 for n, s in zip(q_lens, seq_lens, strict=True))
    return tokens, pairs


def store_work(num_tokens: int, heads: Heads, *, element_bytes: int = 2, kv_bytes: int = 2) -> Work:
    """Return the work of storing keys and values; scales are left out."""
    numbers = 2 * num_tokens * heads.num_kv_heads * heads.head_dim
    return Work(bytes=numbers * (element_bytes + kv_bytes), flop=0)


def copy_work(num_slots: int, num_layers: int, heads: Heads, *, kv_bytes: int = 2) -> Work:
    """Return the work of moving slots of all layers."""
    numbers = 2 * num_slots * num_layers * heads.num_kv_heads * heads.head_dim
    return Work(bytes=2 * numbers * kv_bytes, flop=0)


def linear_work(num_rows: int, inner: int, num_cols: int, *, element_bytes: int = 2) -> Work:
    """Return the work of a matrix product."""
    numbers = num_rows * inner + inner * num_cols + num_rows * num_cols
    return Work(bytes=numbers * element_bytes, flop=2 * num_rows * inner * num_cols)


def norm_work(num_rows: int, dim: int, *, residual: bool, element_bytes: int = 2) -> Work:
    """Return the work of an RMS norm; with a residual that too is read and written."""
    passes = 4 if residual else 2
    return Work(bytes=passes * num_rows * dim * element_bytes, flop=3 * num_rows * dim)


def rotary_store_work(
    num_tokens: int, heads: Heads, *, element_bytes: int = 2, kv_bytes: int = 2
) -> Work:
    """Return the work of turning queries and keys and storing keys and values."""
    q = 2 * num_tokens * heads.num_heads * heads.head_dim * element_bytes
    kv = store_work(num_tokens, heads, element_bytes=element_bytes, kv_bytes=kv_bytes)
    angles = num_tokens * heads.head_dim * 4
    turned = num_tokens * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    return Work(bytes=q + kv.bytes + angles, flop=3 * turned)


def silu_work(num_rows: int, dim: int, *, element_bytes: int = 2) -> Work:
    """Return the work of the gated SiLU, `dim` numbers a row coming out."""
    return Work(bytes=3 * num_rows * dim * element_bytes, flop=5 * num_rows * dim)


def sample_work(num_rows: int, vocab_size: int) -> Work:
    """Return the work of a draw: the logits are read once."""
    return Work(bytes=4 * num_rows * vocab_size, flop=0)
