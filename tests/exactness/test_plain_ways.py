"""What the cost of exactness is measured against computes the same, but for rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.exactness_plain import Attend, by_products, by_sdpa, plain_model
from runtime.executor.batch import build_batch
from runtime.kv.store import KVStore
from runtime.models.llama import LlamaModel
from runtime.plan import Slice
from tests.support.tiny_models import random_weights, tiny_config

CPU = torch.device("cpu")


def step(model: LlamaModel, *, batch: int, new: int, prefix: int) -> torch.Tensor:
    """Logits of the new tokens of sequences whose prefixes hold noise."""
    config, num_blocks = model.config, -(-(prefix + new) // 16)
    store = KVStore(
        config, num_blocks=batch * num_blocks, block_size=16, dtype=model.dtype, device=CPU
    )
    store.pool.normal_(generator=torch.Generator().manual_seed(0))
    draw = np.random.default_rng(0)
    slices = [
        Slice(
            request_id=str(i),
            start=prefix,
            tokens=draw.integers(0, config.vocab_size, new, np.int32).tobytes(),
            block_table=np.arange(i, batch * num_blocks, batch, np.int32).tobytes(),
        )
        for i in range(batch)
    ]
    with torch.inference_mode():
        return model.logits(model.forward(build_batch(slices, block_size=16, device=CPU), store))


@pytest.mark.parametrize("attend", [by_sdpa, by_products])
@pytest.mark.parametrize(("batch", "new", "prefix"), [(1, 40, 0), (1, 9, 33), (3, 1, 50)])
def test_the_plain_ways_agree_with_the_exact_ones(
    attend: Attend, batch: int, new: int, prefix: int
) -> None:
    config = tiny_config()
    model = LlamaModel(config, random_weights(config).items(), dtype=torch.float32, device=CPU)
    exact = step(model, batch=batch, new=new, prefix=prefix)
    with plain_model(attend):
        plain = step(model, batch=batch, new=new, prefix=prefix)
    assert (exact - plain).abs().max() < 1e-4 * exact.abs().max()
    assert torch.equal(exact, step(model, batch=batch, new=new, prefix=prefix))
