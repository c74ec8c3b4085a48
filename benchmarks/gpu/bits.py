"""What decides the bits of a row on this GPU: tiles, warps, and the library's choice by rows.

Owns: the questions whose answer is a fact, whichever it is.  Does not know: clocks.
Idea: settings that give equal bits form a class; the answer names the classes.  A kernel family may
mix settings of one class only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from benchmarks.gpu.steps import HALF

NUM_ROWS, NUM_COLS, INNER = 128, 64, 128
TILES: Final = ((16, 1), (16, 4), (32, 4), (64, 4), (64, 8), (128, 4), (128, 8))
"""Rows of a tile and warps.  On sm_90 four warps take 64 rows at a time, each 16 of them; with 16
rows warps can only split columns."""

PRODUCT_SHAPES: Final = ((4096, 4096), (4096, 14336), (14336, 4096), (576, 960))
PRODUCT_ROWS: Final = (1, 2, 3, 4, 7, 8, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 2048)


def classes(results: dict[str, torch.Tensor]) -> str:
    """Name the settings whose bits are equal: "a = b | c"; a NaN equals nothing."""
    found: list[tuple[list[str], torch.Tensor]] = []
    for name, result in results.items():
        for names, other in found:
            if torch.equal(result, other):
                names.append(name)
                break
        else:
            found.append(([name], result))
    return " | ".join(" = ".join(names) for names, _ in found)


def products_by_tile(device: torch.device, dtype: torch.dtype) -> str:
    """Classes of tiles, by the bits of a product."""
    from benchmarks.gpu.bit_kernels import product  # optional: not on every platform

    x, weight = _pair(device, dtype)
    return classes(
        {f"{rows}x{warps}": product(x, weight, rows=rows, num_warps=warps) for rows, warps in TILES}
    )


def sums_by_tile(device: torch.device, *, of_product: bool) -> str:
    """Classes of tiles, by the bits of sums along rows."""
    from benchmarks.gpu.bit_kernels import row_sums  # optional: not on every platform

    x, weight = _pair(device, HALF)
    if not of_product:
        weight = torch.randn(NUM_COLS, NUM_ROWS, device=device)
    return classes(
        {
            f"{rows}x{warps}": row_sums(x, weight, rows=rows, num_warps=warps, product=of_product)
            for rows, warps in TILES
        }
    )


def _pair(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (torch.randn(n, INNER, device=device, dtype=dtype) for n in (NUM_ROWS, NUM_COLS))
    return x, weight


def library_classes(
    device: torch.device, dtype: torch.dtype, inner: int, num_cols: int, *, tiny: bool = False
) -> str:
    """Classes of row counts, by the bits of the first and last row of the library's product."""
    counts = PRODUCT_ROWS[:9] if tiny else PRODUCT_ROWS
    if tiny:
        inner, num_cols = inner // 32, num_cols // 32
    x = torch.randn(counts[-1], inner, device=device, dtype=dtype)
    weight = torch.randn(num_cols, inner, device=device, dtype=dtype)
    firsts: dict[str, torch.Tensor] = {}
    for count in counts:
        firsts[str(count)] = functional.linear(x[:count], weight)[0]
    whole = functional.linear(x, weight)
    moved = [
        count
        for count in counts
        if not torch.equal(functional.linear(x[:count], weight)[-1], whole[count - 1])
    ]
    text = classes(firsts)
    return text + (f"; last rows differ from the whole at {moved}" if moved else "")


def library_questions() -> dict[str, Callable[[torch.device], str]]:
    """Return what is asked of the library, under whatever settings this process runs."""
    return {
        f"linear {str(dtype).removeprefix('torch.')} K {inner} N {num_cols}": (
            lambda device, dtype=dtype, inner=inner, num_cols=num_cols: library_classes(
                device, dtype, inner, num_cols, tiny=device.type != "cuda"
            )
        )
        for dtype in (torch.bfloat16, torch.float32)
        for inner, num_cols in PRODUCT_SHAPES
    }


def tile_questions() -> dict[str, Callable[[torch.device], str]]:
    """Return what is asked of the compiler and the matrix instructions."""
    return {
        "tiles (rows x warps) by a bfloat16 product": lambda d: products_by_tile(d, HALF),
        "tiles by a float16 product": lambda d: products_by_tile(d, torch.float16),
        "tiles by a float32 product": lambda d: products_by_tile(d, torch.float32),
        "tiles by row sums of a product": lambda d: sums_by_tile(d, of_product=True),
        "tiles by row sums of what was loaded": lambda d: sums_by_tile(d, of_product=False),
    }
