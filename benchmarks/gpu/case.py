"""One measurement on a GPU, and what is expected of it.

Owns: the records.  Does not know: tensors, clocks, any op.
Idea: a subject is measured in variants: ours, the same kernel with sizes chosen freely, and peers.
A variant is a case of its own, so that one that fails loses nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch

from benchmarks.gpu.steps import Call
from kernels.roofline import Work

Kind = Literal["ours", "free", "torch", "public"]
Measure = Literal["share of bandwidth", "TFLOP/s", "TB/s", "times faster than", "exactness costs"]

OURS: Final = "ours"


@dataclass(frozen=True)
class Goal:
    """What a subject must reach.

    measure  of what; the last of them is a share to stay below, the others are to be reached
    bound    of it
    against  "subject | variant" of the other time, for "times faster than"
    """

    measure: Measure
    bound: float
    against: str | None = None


@dataclass(frozen=True)
class Case:
    """One variant of a subject.

    build  makes tensors on a device and returns calls of the op, each on tensors of its own
    work   the least that any variant must do
    eager  also time it launched by the host
    """

    subject: str
    variant: str
    kind: Kind
    work: Work
    build: Callable[[torch.device], list[Call]]
    goals: tuple[Goal, ...] = ()
    eager: bool = False

    @property
    def name(self) -> str:
        return f"{self.subject} | {self.variant}"


EXACTNESS: Final = Goal("exactness costs", 0.10)
