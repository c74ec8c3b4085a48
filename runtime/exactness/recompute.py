"""A sequence computed again without a cache, and where what was kept of it differs.

Owns: the reference, the comparison, and the words for a difference.  Does not know: engines, trees,
why one looks.
Idea: K and V of a token depend on the tokens up to it alone.  So a whole prefill of the sequence in
memory of its own is what every cached, chunked or shared computation must equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from kernels.row_check import same_bits
from radixcache.tokens import num_tokens
from runtime.executor.batch import build_batch
from runtime.kv.store import KVStore
from runtime.models.llama import LlamaModel
from runtime.plan import Slice

BLOCK_SIZE = 16

Part = Literal["K", "V", "logits", "token"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first place at which a sequence is not what it is alone.

    part      what differs: K or V of a layer, or, where those agree, logits or the token drawn
    layer     the first that differs, None for logits and tokens: what went wrong lies in its
              projections, or in the attention or feed-forward of the layer before
    position  the first token of the sequence for which it does
    """

    part: Part
    layer: int | None
    position: int

    def __str__(self) -> str:
        where = "" if self.layer is None else f" of layer {self.layer}"
        return f"{self.part}{where} at position {self.position}"


def recompute(model: LlamaModel, tokens: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a sequence whole, alone, in memory of its own.

    tokens   packed ids, at least one
    returns  K/V [layers, 2, T, kv heads, head dim], and the last hidden states [T, hidden]

    Cost: a prefill of T tokens, and memory for their K/V.
    """
    count = num_tokens(tokens)
    num_blocks = -(-count // BLOCK_SIZE)
    device = model.head_weight.device
    store = KVStore(
        model.config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=device
    )
    table = np.arange(num_blocks, dtype=np.int32)
    piece = Slice(request_id="", start=0, tokens=tokens, block_table=table.tobytes())
    with torch.inference_mode():
        batch = build_batch([piece], block_size=BLOCK_SIZE, device=device)
        hidden = model.forward(batch, store)
        return kept(store, table.tolist(), count), hidden


def kept(store: KVStore, block_table: Sequence[int], count: int) -> torch.Tensor:
    """Copy the K/V of a sequence's first tokens out of its blocks.

    returns  [layers, 2, count, kv heads, head dim]
    """
    needed = -(-count // store.block_size)
    blocks = torch.tensor(list(block_table[:needed]), device=store.pool.device)
    return store.pool.index_select(2, blocks).flatten(2, 3)[:, :, :count]


def first_difference(found: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """Return where K/V [layers, 2, T, kv heads, head dim] is not what it must be, bit for bit.

    The lowest layer counts, in it the first position, at that K before V.
    """
    if bool(same_bits(found, right).all()):
        return None
    for layer, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        wrong = same_bits(ours, theirs).flatten(2).all(-1).logical_not()  # [2, T]
        if bool(wrong.any()):
            position = int(wrong.any(0).nonzero()[0])
            part: Part = "K" if bool(wrong[0, position]) else "V"
            return Difference(part=part, layer=layer, position=position)
    raise AssertionError("two tensors differ as wholes and in no layer")
