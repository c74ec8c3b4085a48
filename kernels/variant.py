"""What a kernel is compiled for: the unit of the ahead-of-time report.

Owns: the record.  Does not know: any kernel, Triton's compiler or a GPU.
Idea: each module of kernels enumerates the configurations it launches as `shipped()`, next to the
table that a launch chooses from, so that what is proven before a release is what runs after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One kernel with all its compile-time choices.

    kernel      a function under `triton.jit`
    label       what tells it from the kernel's other variants, for a table: "bf16 D 128"
    types       Triton's types of the arguments that are neither constants nor 32-bit integers:
                {"q": "*bf16", "scale": "fp32"}
    constants   the `tl.constexpr` arguments, and those that a launch passes as None or 1
    max_registers  that a thread may take; None leaves it to the compiler
    loose       integer arguments that need not be multiples of 16; the others are compiled as
                multiples of 16, which is how a launch finds the usual strides
    matrix      True where the product must run on tensor cores
    wide_loads  True where memory must be read 16 bytes at a time
    targets     names of the targets that it is shipped for; None for all
    """

    kernel: Any
    label: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    loose: frozenset[str] = frozenset()
    matrix: bool = False
    wide_loads: bool = False
    targets: frozenset[str] | None = None
