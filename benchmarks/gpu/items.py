"""What each kind of child runs, by name.

Owns: the kinds and their lists.  Does not know: processes, tables.

    questions are the kernels right, which must be answered yes; and which tiles give equal bits
    library   which row counts give equal bits in the library's product, under one environment
    compile   each case once, untimed: fills the compiler's cache, many children at a time
    time      ceilings, then each case, by the clock
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.attention import cascade_cases, decode_cases, extend_cases
from benchmarks.gpu.bits import library_questions, tile_questions
from benchmarks.gpu.case import Case
from benchmarks.gpu.checks import right_questions
from benchmarks.gpu.clock import CEILINGS, Clock, DeviceClock, OneCall, ceiling_calls
from benchmarks.gpu.graphs import graph_questions
from benchmarks.gpu.latents import latent_cases, latent_questions
from benchmarks.gpu.public_peers import Absent
from benchmarks.gpu.rows import move_cases, row_cases
from benchmarks.gpu.steps import FULL, TINY, Shapes

Row = dict[str, Any]
KINDS: Final = ("questions", "library", "compile", "time")
ORDER: Final = ("ours", "torch", "free", "public")
"""What is timed first: should time run out, the least is lost."""


def all_cases(shapes: Shapes = FULL) -> list[Case]:
    """Return every case, in the order of the report."""
    return [
        *decode_cases(shapes),
        *extend_cases(shapes),
        *cascade_cases(shapes),
        *latent_cases(shapes),
        *move_cases(shapes),
        *row_cases(shapes),
    ]


def names_of(kind: str, cases: list[Case]) -> list[str]:
    """Return the names of a kind's items, in the order in which they run."""
    if kind in ("questions", "library"):
        return list(questions_of(kind))
    ordered = sorted(cases, key=lambda case: ORDER.index(case.kind))
    ceilings = CEILINGS if kind == "time" else ()
    return [*ceilings, *(case.name for case in ordered)]


def questions_of(kind: str) -> dict[str, Callable[[torch.device], object]]:
    """Return the questions of a kind; those answered by True or False must hold."""
    if kind == "library":
        return dict(library_questions())
    return {**right_questions(), **latent_questions(), **graph_questions(), **tile_questions()}


def runner(kind: str, device: torch.device, *, tiny: bool) -> Callable[[str], Row]:
    """Return what runs an item of a kind by its name."""
    if kind in ("questions", "library"):
        questions = questions_of(kind)
        return lambda name: {"answer": questions[name](device)}
    clock: Clock = DeviceClock() if kind == "time" and device.type == "cuda" else OneCall()
    cases = {case.name: case for case in all_cases(TINY if tiny else FULL)}
    return partial(timed, cases, clock, device, tiny)


def timed(cases: dict[str, Case], clock: Clock, device: torch.device, tiny: bool, name: str) -> Row:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with torch.no_grad():
        if name in CEILINGS:
            calls, amount = ceiling_calls(name, device, tiny=tiny)
            row = clock.measure(calls)
            return row | {"amount": amount, "rate": amount / row["us"] * 1e6}
        case = cases[name]
        try:
            calls = case.build(device)
        except Absent as absent:
            return {"absent": str(absent)}
        return clock.measure(calls, eager=case.eager)
