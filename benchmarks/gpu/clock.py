"""How long a call takes on the device, and what the machine reaches at best.

Owns: the stopwatch, real and pretended.  Does not know: cases.
Idea: a call is captured in a CUDA graph and replayed, as a decode step is served, so that the time
is the device's and not Python's; L2 is flushed before each replay, and replays go round copies of
the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from benchmarks.gpu.steps import Call

WARM_UP_MS: Final = 10
REPEAT_MS: Final = 60
Row = dict[str, Any]


class Clock(Protocol):
    """Times calls of one op, each on tensors of its own.

    eager    also time the calls launched one kernel at a time, by the host
    returns  us, low_us and high_us (median, 20th and 80th percentile), eager_us, and `graph`:
             False where the call couldn't be captured and `us` is of launches by the host
    """

    def measure(self, calls: list[Call], *, eager: bool = False) -> Row: ...


class DeviceClock:
    """The real one; it repeats calls for so many milliseconds."""

    def __init__(self, repeat_ms: int = REPEAT_MS) -> None:
        self.repeat_ms = repeat_ms

    def measure(self, calls: list[Call], *, eager: bool = False) -> Row:
        for call in calls:
            call()
        torch.cuda.synchronize()
        row: Row = {"graph": True}
        try:
            runs: list[Call] = [captured(call) for call in calls]
        except RuntimeError as error:
            torch.cuda.synchronize()
            row |= {"graph": False, "not_captured": str(error).splitlines()[0]}
            runs = calls
        median, low, high = _percentiles(runs, self.repeat_ms)
        row |= {"us": median, "low_us": low, "high_us": high}
        if eager:
            row["eager_us"] = _percentiles(calls, self.repeat_ms)[0] if row["graph"] else median
        return row


class OneCall:
    """Makes each call once and pretends that it took a microsecond: compiles, and dry runs."""

    def measure(self, calls: list[Call], *, eager: bool = False) -> Row:
        for call in calls:
            call()
        row: Row = {"graph": False, "us": 1.0, "low_us": 1.0, "high_us": 1.0}
        return row | ({"eager_us": 1.0} if eager else {})


def captured(call: Call) -> Callable[[], None]:
    """Return the replay of a CUDA graph of a call that was made before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _percentiles(runs: list[Call], repeat_ms: int) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile in microseconds."""
    import triton.testing  # only where there is a GPU

    turn = itertools.cycle(runs)
    found = triton.testing.do_bench(
        lambda: next(turn)(), warmup=WARM_UP_MS, rep=repeat_ms, quantiles=[0.5, 0.2, 0.8]
    )
    median, low, high = (1e3 * milliseconds for milliseconds in found)
    return median, low, high


CEILINGS: Final = ("copy", "read", "bf16 product", "smallest launch")


def ceiling_calls(name: str, device: torch.device, *, tiny: bool) -> tuple[list[Call], float]:
    """Return calls that reach a ceiling, and the bytes or operations of one."""
    if name in ("copy", "read"):
        big = torch.randint(255, (1 << (10 if tiny else 30),), dtype=torch.uint8, device=device)
        if name == "read":
            numbers = big.view(torch.int32)
            return [lambda: numbers.amax()], big.nbytes
        other = torch.empty_like(big)
        return [lambda: other.copy_(big)], 2 * big.nbytes
    if name == "bf16 product":
        size = 16 if tiny else 8192
        a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
        return [lambda: a @ b], 2 * size**3
    one = torch.zeros(1, device=device)
    return [lambda: one.add_(1)], 1
