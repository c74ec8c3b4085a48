"""Which product is fastest on this machine, measured once and kept.

Owns: the candidates, what they are timed on, what this machine could reach, where that is kept.
Does not know: models beyond the sizes of their weights.
Idea: which loop is fastest follows from the processor, and nobody has seen all of them.  The choice
may decide last bits (torch's product adds in another order than ours), so it is kept beside the
compiled kernels until it is measured anew, and stands in every certificate.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from kernels import native
from kernels.backend import Backend
from kernels.linear import linear, pack_weight
from kernels.native.records import Load

ROW_COUNTS: Final = (1, 8, 128)
"""Rows of the timed products: a lone decode, a batch, a prefill."""

TORCH_MUST_GAIN: Final = 1.25
"""By how much torch's product must be faster: with ours, a step's layers are one call."""

BFLOAT16_MUST_GAIN: Final = 1.1
LEAST_NUMBERS: Final = 1 << 18
"""Numbers of a weight below which a product is all call and no work: nobody is warned."""

MAX_NUMBERS: Final = 2 << 20
"""Numbers of a weight that is timed; of a larger one fewer outputs are."""

_BANDWIDTH_BYTES = 128 << 20
_log = logging.getLogger("radixcache.kernels")


@dataclass(frozen=True)
class Product:
    """The product that is used for one dtype.

    backend      "native" or "torch"
    tiles_alike  how rows become tiles, of the native one
    flop_s       reached with each of ROW_COUNTS rows
    """

    backend: Backend
    tiles_alike: bool
    flop_s: tuple[float, ...]

    @property
    def rate(self) -> float:
        """The geometric mean of what was reached."""
        return math.prod(self.flop_s) ** (1 / len(self.flop_s))


@dataclass(frozen=True)
class Calibration:
    """What was measured on this machine, with this many threads.

    target        the instruction set of the native kernels
    peak_flop_s   float32 multiply-adds in registers, two operations each
    read_bytes_s  from memory
    products      by dtype: "float32", "bfloat16"
    torch         rates of torch's product, where it was measured, by dtype
    """

    target: str
    num_threads: int
    peak_flop_s: float
    read_bytes_s: float
    products: dict[str, Product]
    torch: dict[str, tuple[float, ...]]

    def peak(self, dtype: str) -> float:
        """The peak in a dtype: twice as high where pairs of bfloat16 are multiplied."""
        pairs = dtype == "bfloat16" and self.target.endswith("BF16")
        return self.peak_flop_s * (2 if pairs else 1)

    def share(self, dtype: str) -> float:
        """How much of the peak the product reaches with the most rows."""
        return self.products[dtype].flop_s[-1] / self.peak(dtype)

    @property
    def prefers_bfloat16(self) -> bool:
        """Whether products in bfloat16 were measured faster."""
        rates = {name: product.rate for name, product in self.products.items()}
        return rates["bfloat16"] > BFLOAT16_MUST_GAIN * rates["float32"]

    def text(self, dtype: str) -> str:
        """Say what is used for a dtype, and how far it is from the peak."""
        product = self.products[dtype]
        name = "C" if product.backend == "native" else "torch"
        rates = ", ".join(f"{rate / 1e9:.0f}" for rate in product.flop_s)
        return (
            f"{name}, {rates} GFLOP/s with {', '.join(map(str, ROW_COUNTS))} rows; "
            f"{self.share(dtype):.0%} of the peak of {self.peak(dtype) / 1e9:.0f}"
        )


def lines(calibration: Calibration, dtype: str) -> list[str]:
    """Say what computes products in a dtype, and what this machine reaches at best."""
    threads = calibration.num_threads
    found = [f"{calibration.target}, {threads} thread{'s' if threads > 1 else ''}"]
    if dtype in calibration.products:
        found.append(f"products in {dtype}: {calibration.text(dtype)}")
    return [*found, f"memory: {calibration.read_bytes_s / 1e9:.1f} GB/s read"]


def calibrate(shapes: Sequence[tuple[int, int]], *, again: bool = False) -> Calibration | None:
    """Return what is fastest for weights [N, K] of these shapes; None without native kernels.

    again  measure even where an earlier result is kept

    Cost: 0.1 ms where a result is kept; else half a second.  A warning is logged where a product
    reaches less than half of the peak.
    """
    build = native.build()
    if build.library is None or build.path is None:
        return None
    place = _place(build.path, shapes)
    kept = None if again else _read(place)
    if kept is None:
        kept = _measure(sorted(set(shapes)))
        _keep(place, kept)
        is_large = max(n * k for n, k in shapes) >= LEAST_NUMBERS
        for dtype in kept.products:
            if is_large and kept.share(dtype) < 0.5:
                _log.warning(
                    "products in %s are slow on this processor: %s", dtype, kept.text(dtype)
                )
    return kept


def with_limits_now(calibration: Calibration) -> Calibration:
    """Return a result with the machine's limits measured now: a busy moment may have been kept.

    The choice of products stays.  Cost: 0.1 s.
    """
    threads = calibration.num_threads
    return replace(calibration, peak_flop_s=_peak(threads), read_bytes_s=_bandwidth(threads))


def use(calibration: Calibration, dtype: torch.dtype) -> Backend:
    """Have native products of a dtype take the measured tiles; return the backend of products."""
    product = calibration.products.get(str(dtype).removeprefix("torch."))
    if product is None:
        return "native"
    native.library().radixcache_choose_tiling(product.tiles_alike)
    return product.backend


def _place(library: Path, shapes: Sequence[tuple[int, int]]) -> Path:
    """Where a result is kept: by the kernels, torch, threads and shapes."""
    what = (library.name, torch.__version__, torch.get_num_threads(), sorted(set(shapes)))
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:20]
    return library.with_name(f"calibration-{digest}.json")


def _read(place: Path) -> Calibration | None:
    """Return a kept result; None where there is none, or it can't be read."""
    try:
        found: dict[str, Any] = json.loads(place.read_text("utf-8"))
        products = {
            name: Product(**fields | {"flop_s": tuple(fields["flop_s"])})
            for name, fields in found["products"].items()
        }
        rates = {name: tuple(rates) for name, rates in found["torch"].items()}
        kept = Calibration(**found | {"products": products, "torch": rates})
        _ = kept.prefers_bfloat16, [kept.share(dtype) for dtype in products]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return kept


def _keep(place: Path, found: Calibration) -> None:
    """Write a result whole or not at all; a folder that can't be written to costs time only."""
    unfinished = place.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(asdict(found)), "utf-8")
        unfinished.replace(place)
    except OSError as error:
        _log.warning("what was measured can't be kept, and is measured at each start: %s", error)


def _measure(shapes: Sequence[tuple[int, int]]) -> Calibration:
    threads = torch.get_num_threads()
    products, rates = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        ours = [
            Product("native", alike, _rates(shapes, dtype, "native", alike))
            for alike in (False, True)
        ]
        best = max(ours, key=lambda product: product.rate)
        theirs = Product("torch", False, _rates(shapes, dtype, "torch", False))
        rates[name] = theirs.flop_s
        products[name] = theirs if theirs.rate > TORCH_MUST_GAIN * best.rate else best
    return Calibration(
        target=native.target(),
        num_threads=threads,
        peak_flop_s=_peak(threads),
        read_bytes_s=_bandwidth(threads),
        products=products,
        torch=rates,
    )


def _rates(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, backend: Backend, alike: bool
) -> tuple[float, ...]:
    """FLOP/s of all shapes together, with each number of rows."""
    native.library().radixcache_choose_tiling(alike)
    draw = torch.Generator().manual_seed(0)
    flop, seconds = [0.0] * len(ROW_COUNTS), [0.0] * len(ROW_COUNTS)
    for outputs, inputs in shapes:
        outputs = min(outputs, max(64, MAX_NUMBERS // inputs))
        weight = pack_weight(
            torch.randn(outputs, inputs, generator=draw).to(dtype), backend=backend
        )
        x = torch.randn(ROW_COUNTS[-1], inputs, generator=draw).to(dtype)
        for place, rows in enumerate(ROW_COUNTS):
            flop[place] += 2.0 * rows * outputs * inputs
            seconds[place] += _fastest(lambda: linear(x[:rows], weight, backend=backend))  # noqa: B023
    return tuple(work / time for work, time in zip(flop, seconds, strict=True))


def _fastest(function: Callable[[], object], *, most: int = 8, least: float = 4e-3) -> float:
    """Seconds of the fastest of a few calls, which others on the machine disturbed least.

    most   calls, unless so many seconds have passed: `least`
    """
    function()
    best, ends = math.inf, time.perf_counter() + least
    for _ in range(most):
        began = time.perf_counter()
        function()
        now = time.perf_counter()
        best = min(best, now - began)
        if now > ends:
            break
    return best


def _peak(threads: int) -> float:
    items, steps = 4 * threads, 20_000
    results = torch.empty(items)
    load = Load(data=None, bytes=steps, results=results.data_ptr())
    carry = native.library().radixcache_carry_load
    flop = items * steps * int(carry(byref(load), items, threads))
    return flop / _fastest(lambda: carry(byref(load), items, threads), most=40, least=0.05)


def _bandwidth(threads: int) -> float:
    items = 8 * threads
    data, results = torch.zeros(_BANDWIDTH_BYTES // 4), torch.empty(items)
    load = Load(data=data.data_ptr(), bytes=_BANDWIDTH_BYTES // items, results=results.data_ptr())
    carry = native.library().radixcache_carry_load
    return _BANDWIDTH_BYTES / _fastest(lambda: carry(byref(load), items, threads))
