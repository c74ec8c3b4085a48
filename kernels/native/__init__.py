"""Kernels in C for CPUs: how they are compiled, once a machine, and called.

Owns: the compiler's command, where its result is kept, and the signatures of what is in it.  Does
not know: when an operation goes here.
Idea: a library's product chooses its loops by the number of rows; loops of our own need not, and
read K and V where they lie.  Compiling on the machine itself, as Triton does, takes seconds once
and uses every instruction it has.  Where no compiler is, the torch backend serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import torch

SOURCES: Final = Path(__file__).parent
FLAGS: Final = (
    "-std=gnu11",
    "-O2",
    "-Wno-psabi",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
)
COMPILE_SECONDS: Final = 120

_log = logging.getLogger("radixcache.kernels")

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels compute in, and their names in vector.h."""

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_SIGNATURES: Final = {
    "radixcache_linear": (_POINTER, _LONG),
    "radixcache_multiplies_pairs": (),
    "radixcache_panel_bytes": (_LONG, _LONG),
    "radixcache_pack": (_POINTER, _LONG),
    "radixcache_take_rows": (_POINTER,),
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
    """

    library: ctypes.CDLL | None
    reason: str


def available() -> bool:
    """Whether the kernels run here; compiles them at the first call on a machine, for seconds."""
    return build().library is not None


def prefers_bfloat16() -> bool:
    """Whether this CPU computes bfloat16 at twice the rate of float32, and kernels that do."""
    found = build().library
    return found is not None and bool(found.radixcache_multiplies_pairs())


def library() -> ctypes.CDLL:
    """Return the opened kernels; RuntimeError with the reason where there are none."""
    found, reason = build()
    if found is None:
        raise RuntimeError(f"the native kernels are not there: {reason}")
    return found


@functools.cache
def build() -> Build:
    """Compile the kernels, or open what an earlier process compiled on this machine.

    A warning is logged before compiling, which takes seconds, and where the kernels can't be had.
    """
    made = _build()
    if made.library is None:
        _log.warning("torch computes, slower than kernels in C would: %s", made.reason)
    return made


def _build() -> Build:
    """Open a kept file, or else compile one.

    A file is named by everything that decides what is in it (sources, flags, the compiler and the
    processor's features), and by the hash of what the compiler wrote: the loader trusts what it is
    given, and a file that lost its tail would end the process.  Processes that compile at once each
    write their own and the last rename stays, so none opens half a file.
    """
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
        folder = _folder()
    except (ValueError, RuntimeError) as error:  # a quote without its end; nobody's home
        return Build(None, f"CC or the cache folder can't be read: {error}; set RADIXCACHE_HOME")
    compiler = shutil.which(words[0])
    if compiler is None:
        return Build(None, f"no C compiler {words[0]!r} is installed; install gcc, or set CC")
    command = [compiler, *words[1:], *FLAGS, _tuning(), "-fopenmp"]
    sources = sorted(SOURCES.glob("*.c"))
    try:
        stem = f"kernels-{_digest(command, sources)}"
        for kept in sorted(folder.glob(f"{stem}-*.so")):
            with contextlib.suppress(OSError):  # gone by now, or for other libraries
                if kept == _place(folder, stem, kept.read_bytes()):
                    return Build(_open(kept), "")
        _log.warning("compiling kernels for this processor: some seconds, once a machine")
        return Build(_open(_compile([*command, *map(str, sources)], folder, stem)), "")
    except subprocess.TimeoutExpired:
        return Build(None, f"{compiler} took longer than {COMPILE_SECONDS} s")
    except subprocess.CalledProcessError as error:
        return Build(None, f"{shlex.join(error.cmd)} failed: {error.stderr.strip()[-2000:]}")
    except (OSError, AttributeError) as error:  # AttributeError: not what was to be compiled
        return Build(None, f"kernels cannot be made or opened in {folder}: {error}")


def _tuning() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _folder() -> Path:
    """$RADIXCACHE_HOME/native, else below $XDG_CACHE_HOME, else below ~/.cache."""
    home = os.environ.get("RADIXCACHE_HOME")
    if home:
        return Path(home) / "native"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "radixcache" / "native"


def _digest(command: list[str], sources: list[Path]) -> str:
    digest = hashlib.sha256(repr(command).encode())
    stat = Path(command[0]).stat()
    digest.update(f"{stat.st_size} {stat.st_mtime_ns} {_features()}".encode())
    for source in (*sources, *sorted(SOURCES.glob("*.h"))):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _features() -> str:
    """What tells one processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _place(folder: Path, stem: str, content: bytes) -> Path:
    """Where a library with this content is kept; 0.1 ms for one of ours."""
    return folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:20]}.so"


def _compile(command: list[str], folder: Path, stem: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        made = Path(unfinished) / "kernels.so"
        subprocess.run(
            [*command, "-o", str(made), "-lm"],
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=COMPILE_SECONDS,
        )
        return made.replace(_place(folder, stem, made.read_bytes()))


def _open(path: Path) -> ctypes.CDLL:
    """Open the kernels; they find the OpenMP that torch has loaded, and share its threads."""
    opened = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, _LONG
    return opened
