"""What a start promises of exactness, and what the check found.

Owns: the record, and its wording.  Does not know: tensors, how anything is checked.
Idea: a promise is held, refused or unchecked; whoever shows it shows which.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Exact = Literal["require", "warn", "off"]
EXACT: tuple[Exact, ...] = ("require", "warn", "off")
"""What to do where the check fails: refuse to start, warn and go on, or don't check."""


class Exactness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a row's bits are its own with this model, dtype, device and thread count.

    holds    True: checked and held; False: refused, cached and uncached answers may differ in their
             last bits; None: not checked
    faults   what differed, a sentence each; of the default row layout where another one holds
    layout   rows of a product, where the default would not hold: slower, and exact
    seconds  that the check took
    """

    holds: bool | None = None
    faults: tuple[str, ...] = ()
    layout: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.holds is None:
            return "not checked"
        found = "; ".join(self.faults)
        if not self.holds:
            return f"refused ({found})"
        return f"held, by slower products of {self.layout} ({found})" if self.layout else "held"


UNCHECKED = Exactness()
"""What holds of a runtime that nobody checked."""
