"""Kernels in C for CPUs: the opened library, and the signatures of what is in it.

Owns: which library this process computes with.  Does not know: how it is compiled, when an
operation goes here.
Idea: a library's product chooses its loops by the number of rows; loops of our own need not, and
read KV where it lies.  Compiling on the machine itself, as Triton does, takes seconds once and uses
every instruction it has.  Where no compiler is, the torch backend serves.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kernels.native.compiler import (
    CHECKED_VARIABLE,
    Library,
    NotCompiled,
    Progress,
    find_library,
)

__all__ = ["Build", "Progress", "available", "build", "library", "target"]

SOURCES: Final = Path(__file__).parent

_log = logging.getLogger("radixcache.kernels")

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels compute in, and their names in vector.h."""

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_SIGNATURES: Final = {
    "radixcache_target": (),
    "radixcache_linear": (_POINTER, _LONG),
    "radixcache_panel_bytes": (_LONG, _LONG),
    "radixcache_pack": (_POINTER, _LONG),
    "radixcache_take_rows": (_POINTER,),
    "radixcache_choose_tiling": (_LONG,),
    "radixcache_carry_load": (_POINTER, _LONG, _LONG),
    "radixcache_rounded_bytes": (_LONG,),
    "radixcache_rms_norm": (_POINTER, _LONG),
    "radixcache_silu_and_mul": (_POINTER, _LONG),
    "radixcache_rotary_store": (_POINTER, _LONG),
    "radixcache_decoder": (_POINTER, _POINTER, _LONG),
    "radixcache_attention": (_POINTER, _LONG),
    "radixcache_attention_list": (_POINTER,),
    "radixcache_attention_scratch": (_POINTER,),
}
"""Most take a record of native/records.py, and the number of threads."""


class Build(NamedTuple):
    """What came of compiling.

    library  opened, or None
    reason   why there is none, for an error or a log; empty where there is one
    path     of the library
    """

    library: ctypes.CDLL | None
    reason: str
    path: Path | None = None


_opened: Final[list[Build]] = []
"""What this process computes with, once it was asked for."""


def available() -> bool:
    """Whether the kernels run here; compiles them at the first call on a machine, for seconds."""
    return build().library is not None


def target() -> str:
    """Return the instruction set that the kernels use; "" where there are none."""
    found = build().library
    return "" if found is None else str(found.radixcache_target().decode())


def library() -> ctypes.CDLL:
    """Return the opened kernels; RuntimeError with the reason where there are none."""
    made = build()
    if made.library is None:
        raise RuntimeError(f"the native kernels are not there: {made.reason}")
    return made.library


def build(progress: Progress | None = None) -> Build:
    """Compile the kernels, or open what an earlier process compiled on this machine.

    progress  shows the compiling, which is logged as a warning where nobody shows it

    The first call decides for this process.  A warning is logged where the kernels can't be had.
    Raises ValueError where $RADIXCACHE_CPU names no instruction set that this processor has.
    """
    if not _opened:
        made = _build(progress)
        if made.library is None:
            _log.warning("torch computes, slower than kernels in C would: %s", made.reason)
        _opened.append(made)
    return _opened[0]


def _build(progress: Progress | None) -> Build:
    said: list[str] = []

    def report(what: str, done: int, total: int | None) -> None:
        """Show it, or say once that it takes time."""
        if progress:
            progress(what, done, total)
        elif what not in said:
            said.append(what)
            _log.warning("%s for this processor: some seconds, once a machine", what)

    checked = os.environ.get(CHECKED_VARIABLE)
    try:
        kept = Library(Path(checked), False) if checked else find_library(SOURCES, report)
        return Build(_open(kept.path), "", kept.path)
    except NotCompiled as error:
        return Build(None, str(error))
    except (OSError, AttributeError) as error:  # AttributeError: not what was to be compiled
        return Build(None, f"kernels cannot be made or opened: {error}")


def _open(path: Path) -> ctypes.CDLL:
    """Open the kernels; they find the OpenMP that torch has loaded, and share its threads."""
    opened = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, _LONG
    opened.radixcache_target.restype = ctypes.c_char_p
    return opened
