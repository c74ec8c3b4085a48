"""Carries out steps: copies, model, choice of tokens.

Owns: the order of work within a step.  Does not know: requests, the queue, the tree.
"""

from __future__ import annotations

import math

import torch

from kernels.backend import choose_backend
from radixcache.lease import BlockCopy
from runtime.decoding.logprobs import drawn_logprobs, token_logprobs
from runtime.decoding.sampler import choose_tokens
from runtime.errors import BrokenLogits, CopiesFailed
from runtime.executor.batch import build_batch
from runtime.kv.store import KVStore
from runtime.models.batch import Batch
from runtime.models.llama import LlamaModel
from runtime.plan import Difference, Ids, StepPlan, StepResult, TokenLogprobs

LOGIT_ROWS = 256
"""Rows of a prompt whose logits are in memory at once: 50 MB where there are 49,152 tokens."""


class ModelExecutor:
    """Computes steps with a model over its K/V store."""

    def __init__(self, model: LlamaModel, store: KVStore) -> None:
        self.model = model
        self.store = store

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out the copies, then compute every slice in one batch and choose tokens.

        Raises CopiesFailed, BrokenLogits, or whatever a kernel raises; slices may then be computed
        again, alone and without the copies.
        """
        with torch.inference_mode():
            self._copy(plan.copies)
            batch = build_batch(
                plan.pieces,
                plan.rows,
                block_size=self.store.block_size,
                device=self.store.pool.device,
            )
            hidden = self.model.forward(batch, self.store)
            tokens: list[int] = []
            logprobs: list[TokenLogprobs | None] = []
            if batch.draws:
                logits = self._drawn_from(hidden, batch)
                tokens = choose_tokens(logits, batch.draws)
                if _is_broken(logits, tokens):
                    self._refuse()
                logprobs = drawn_logprobs(logits, tokens, batch.draws)
            targets = self._target_logprobs(hidden, batch)
        if any(math.isnan(told.token) for told in (*filter(None, logprobs), *targets)):
            self._refuse()  # as in every row that has what is no number
        return StepResult(
            step=plan.step,
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            target_logprobs=tuple(targets),
        )

    def first_difference(self, ours: Ids, theirs: Ids, num_tokens: int) -> Difference | None:
        """Return where the first `num_tokens` slots of two runs of blocks hold other bits."""
        return self.store.first_difference(ours, theirs, num_tokens)

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        try:
            self.store.copy(copies)
        except Exception as error:
            raise CopiesFailed(f"blocks could not be copied: {error}") from error

    def _drawn_from(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the logits that the step's tokens are drawn from, [R, vocab] float32."""
        return self.model.logits(hidden[batch.choose_rows])

    def _target_logprobs(self, hidden: torch.Tensor, batch: Batch) -> list[TokenLogprobs]:
        """Return what was asked of the tokens that stand there already, some rows at a time."""
        found: list[TokenLogprobs] = []
        for first in range(0, len(batch.target_tops), LOGIT_ROWS):
            part = slice(first, first + LOGIT_ROWS)
            logits = self.model.logits(hidden[batch.target_rows[part]])
            found += token_logprobs(logits, batch.target_ids[part], batch.target_tops[part])
        return found

    def _refuse(self) -> None:
        """Give up a step that computed what is no number."""
        raise BrokenLogits(
            "the model computed logits that are no numbers: check its weights, or choose another "
            "dtype"
        )


def _is_broken(logits: torch.Tensor, tokens: list[int]) -> bool:
    """True where a token was chosen in a row that has what is no number.

    It was chosen by that, so one logit a row says it all; but Triton's draw passes over it.
    """
    if choose_backend(logits.device) == "triton":
        telling = logits.amax(-1)
    else:
        telling = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    return not bool(telling.isfinite().all())
