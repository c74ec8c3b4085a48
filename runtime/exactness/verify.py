"""Whether the cache is invisible, for a user's own model on a user's own machine.

Owns: the order of a verification, and when its result is good.  Does not know: files, the command
line, what a scenario does.
Idea: a check that saw no hit, no preemption and no fork proves nothing, so their counts belong to
the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from runtime.exactness.certificate import (
    Certificate,
    machine_of,
    sha256_of,
    weights_sha256,
)
from runtime.exactness.promise import Exactness
from runtime.exactness.scenarios import Scenario
from runtime.exactness.trial import Laboratory, Outcome
from runtime.models.llama import LlamaModel

Told = Callable[[int, Outcome], None]
"""Called after each scenario with its number, from 1, and what came of it."""


def verify(
    model: LlamaModel,
    *,
    name: str,
    check: Exactness,
    scenarios: Sequence[Scenario],
    seed: int = 0,
    told: Told = lambda number, outcome: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Certificate:
    """Run scenarios until one shows a difference, and certify what was found.

    check  what the check of the operations found as the model was loaded
    seed   of the prompts and draws

    Cost: about a prefill of 1,000 tokens and some 20 decodes for each scenario.
    """
    begun = time.perf_counter()
    laboratory = Laboratory(model, seed=seed)
    outcomes: list[Outcome] = []
    for number, scenario in enumerate(scenarios, 1):
        outcomes.append(laboratory.run(scenario))
        told(number, outcomes[-1])
        if outcomes[-1].difference:
            break
    found = _found(outcomes, check)
    return Certificate(
        exact=not found,
        model=name,
        shape=model.config,
        dtype=str(model.dtype).removeprefix("torch."),
        products=model.products,
        weights_sha256=weights_sha256(model),
        bits_sha256=sha256_of(laboratory.digested(scenarios[0])),
        machine=machine_of(model.head_weight.device),
        seed=seed,
        date=now().isoformat(timespec="seconds"),
        seconds=time.perf_counter() - begun,
        check=check,
        outcomes=outcomes,
        found=found,
    )


def _found(outcomes: Sequence[Outcome], check: Exactness) -> str:
    """Say why a verification failed; "" where it did not."""
    last = outcomes[-1]
    if last.difference:
        return f"{last.difference} of {last.request} differs ({last.scenario})"
    if check.holds is False:
        return "the operations of this model depend on their batch"
    idle = [
        what
        for what, count, wanted in (
            ("hit of the cache", "cached_tokens", any(o.scenario.cached for o in outcomes)),
            ("preemption", "preemptions", any(o.scenario.preempted for o in outcomes)),
            ("fork", "forks", any(o.scenario.branches > 1 for o in outcomes)),
            ("eviction", "evicted_blocks", any(o.scenario.tight for o in outcomes)),
        )
        if wanted and not sum(getattr(o, count) for o in outcomes)
    ]
    return f"nothing is proven: no {', no '.join(idle)} occurred" if idle else ""
