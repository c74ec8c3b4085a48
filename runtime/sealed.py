"""Debugging: every block is checked against its seal before a step reads it.

Owns: which blocks of a step are checked, and when.  Does not know: how seals are kept, or tensors.
Idea: it stands before the executor, where every use of a block passes by, so neither cache nor
engine pays for it when it is not there.
"""

from __future__ import annotations

from radixcache.cache import RadixCache
from radixcache.errors import BrokenSeal
from radixcache.seal import Seals
from runtime.errors import CopiesFailed
from runtime.plan import Difference, Executor, Ids, StepPlan, StepResult
from runtime.scheduler.public import PUBLIC


class SealedExecutor:
    """An executor that refuses steps which would read a block under another's seal.

    seals  observe `cache` from its begin on

    Cost: O(tokens) a sequence and step.  `execute` raises BrokenSeal; the engine computes a step
    that failed again in parts, and ends those requests that fail alone, or all of a step that owes
    copies.
    """

    def __init__(self, executor: Executor, cache: RadixCache, seals: Seals) -> None:
        self._executor = executor
        self._cache = cache
        self._seals = seals

    def execute(self, plan: StepPlan) -> StepResult:
        """Check what each lease reads that the step computes, then compute it."""
        try:
            self._check(plan)
        except BrokenSeal as broken:
            if plan.copies:  # nothing was copied yet, so no part of the step may be computed
                raise CopiesFailed(f"BrokenSeal: {broken}") from broken
            raise
        return self._executor.execute(plan)

    def first_difference(self, ours: Ids, theirs: Ids, num_tokens: int) -> Difference | None:
        """Compare blocks, as the executor does."""
        return self._executor.first_difference(ours, theirs, num_tokens)

    def _check(self, plan: StepPlan) -> None:
        """Check the committed blocks of each lease, and where the blocks it copies come from."""
        tables = [piece.block_table for piece in plan.slices]
        for lease in self._cache.leases.values():
            own = lease.block_table.tobytes()
            if any(own.startswith(table) for table in tables):
                self._seals.check_lease(lease)
                for copy in plan.copies:
                    if copy.dst in lease.block_table:
                        self._seals.check_copy(copy, lease, also=PUBLIC)
