"""Carries out steps: copies, model, choice of tokens.

Owns: the order of work within a step.  Does not know: requests, the queue, the tree.
"""

from __future__ import annotations

import torch

from runtime.decoding.sampler import choose_tokens
from runtime.executor.batch import build_batch
from runtime.kv.store import KVStore
from runtime.models.llama import LlamaModel
from runtime.plan import StepPlan, StepResult


class ModelExecutor:
    """Computes steps with a model over its K/V store."""

    def __init__(self, model: LlamaModel, store: KVStore) -> None:
        self.model = model
        self.store = store

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the copies, then compute every slice in one batch and choose tokens.

        Raises whatever a kernel raises; blocks of the step then hold nothing of use.
        """
        with torch.inference_mode():
            self.store.copy(plan.copies)
            batch = build_batch(
                plan.slices, block_size=self.store.block_size, device=self.store.pool.device
            )
            hidden = self.model.forward(batch, self.store)
            tokens: list[int] = []
            if batch.draws:
                tokens = choose_tokens(self.model.logits(hidden[batch.choose_rows]), batch.draws)
        return StepResult(step=plan.step, token_ids=tuple(tokens))
