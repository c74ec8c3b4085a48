"""How many random histories a state machine plays, in the quick run and in the long one.

Owns: the settings, and the variable that chooses.  Does not know: the machines.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

STRESS = os.environ.get("RADIXCACHE_STRESS") in ("1", "whole")
"""Whether this is the long run; see docs/testing.md."""

WHOLE = os.environ.get("RADIXCACHE_STRESS") == "whole"
"""Whether tables too large even for that are played to the end; hours."""

BOUNDED = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
"""A few seconds of histories, the same ones each time."""

BOUNDED_KEEPING = settings(BOUNDED, max_examples=400)
"""As many again where more can happen."""

LONG = settings(
    max_examples=6000,
    stateful_step_count=100,
    derandomize=False,
    print_blob=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
"""Minutes of histories, new ones each time; a failure is kept and replayed first."""
