"""Products on a CPU: the kernels in C beside torch's, by rows and by how the weight is stored.

    .venv/bin/python -m benchmarks.bench_products [--out FILE]
    RADIXCACHE_CPU=x86-64 .venv/bin/python -m benchmarks.bench_products      # a lower target

GFLOP/s of CPU time, one thread, [M, 576] × [576, 3072]: the best of the calls within half a second,
which other programs on the machine disturbed least.  The peak is multiply-adds in registers.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from kernels import QuantisedWeight, linear, native, pack_weight
from kernels.calibration import calibrate
from kernels.formats import BLOCKS

INPUTS, OUTPUTS = 576, 3072
ROWS = (1, 2, 3, 4, 8, 64, 512)
QUANTISED = ("Q4_1", "Q8_0")


def gflop_s(function: Callable[[], object], flop: float, *, seconds: float = 0.5) -> float:
    """Return the best rate of a call, in CPU time of this thread."""
    function()
    calls, best = max(1, int(3e7 / flop)), math.inf
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.thread_time()
        for _ in range(calls):
            function()
        best = min(best, (time.thread_time() - began) / calls)
    return flop / best / 1e9


def quantised(kind: str) -> QuantisedWeight:
    """Return a weight of random blocks with small scales."""
    block, draw = BLOCKS[kind], torch.Generator().manual_seed(0)
    count = OUTPUTS * INPUTS // block.inputs
    raw = torch.randint(0, 256, (count, block.num_bytes), generator=draw).to(torch.uint8)
    for at in block.half_bytes:
        raw[:, at + 1] = 0x20  # of float16: about 0.01
    return QuantisedWeight(raw.view(OUTPUTS, -1), kind, (OUTPUTS, INPUTS))


def cases() -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]]:
    """Return what is timed, by name: a product, and the dtype of its rows."""
    weight = torch.randn(OUTPUTS, INPUTS)
    found: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name, plain = str(dtype).removeprefix("torch."), weight.to(dtype)
        packed = pack_weight(plain, backend="native")
        theirs = pack_weight(plain, backend="torch")
        found[f"C, {name}"] = (lambda x, w=packed: linear(x, w, backend="native"), dtype)
        found[f"torch, {name}"] = (lambda x, w=plain: functional.linear(x, w), dtype)
        if not isinstance(theirs, torch.Tensor):
            packed_by_torch = lambda x, w=theirs: linear(x, w, backend="torch")  # noqa: E731
            found[f"torch packed, {name}"] = (packed_by_torch, dtype)
    for kind in QUANTISED:
        for int8 in (False, True):
            kept = pack_weight(quantised(kind), int8=int8, backend="native")
            name = f"C, {kind}" + ", 8-bit rows" * int8
            found[name] = (lambda x, w=kept: linear(x, w, backend="native"), torch.float32)
    return found


def main() -> None:
    """Time everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    native.library()
    limits = calibrate([(OUTPUTS, INPUTS)], again=True)
    assert limits is not None
    rows: dict[str, list[float]] = {}
    print(f"{native.target()}; peak of one thread {limits.peak_flop_s / 1e9:.0f} GFLOP/s\n")
    print(f"| GFLOP/s, M = | {' | '.join(map(str, ROWS))} |\n|---|{'---|' * len(ROWS)}")
    for name, (product, dtype) in cases().items():
        rows[name] = []
        for count in ROWS:
            x = torch.randn(count, INPUTS).to(dtype)
            flop = 2.0 * count * INPUTS * OUTPUTS
            rows[name].append(gflop_s(lambda: product(x), flop))  # noqa: B023
        print(f"| {name} | {' | '.join(f'{rate:.1f}' for rate in rows[name])} |", flush=True)
    if args.out:
        found = {"target": native.target(), "peak": limits.peak_flop_s, "rows": ROWS, "rate": rows}
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
