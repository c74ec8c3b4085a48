"""Compiling the kernels in C on the machine that runs them.

Owns: the compiler's command for each instruction set, where the library is kept, who compiles.
Does not know: what is in the library, when an operation uses it.
Idea: a library is named by everything that decides what is in it, and gets its name last: after it
is whole, and after a child process has checked its values.  So what has a name can be trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

try:
    import fcntl
except ImportError:  # not on Windows, where two starts at once may both compile
    fcntl = None  # type: ignore[assignment]

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much."""

TARGET_VARIABLE: Final = "RADIXCACHE_CPU"
CHECKED_VARIABLE: Final = "RADIXCACHE_CHECKED_LIBRARY"
"""Names the library that the check's child process opens, whatever else is kept."""

FLAGS: Final = (
    *("-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fopenmp"),
    "-Wno-psabi",  # no vector is passed to another file
)
COMPILERS: Final = "gcc 9 or newer"

_UNFINISHED: Final = "unfinished-"  # prefix of folders that hold what has no name yet


class Target(NamedTuple):
    """An instruction set to compile for.

    flags     of the compiler; spelled out, since old compilers know no names of levels
    features  that the processor must have, as Linux names them
    """

    flags: tuple[str, ...]
    features: tuple[str, ...]


_FEATURES: Final = {
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
}
"""Instructions whose names differ between compilers and Linux."""


def _x86(*flags: str) -> Target:
    """Return the target with these instructions; it needs each of them."""
    named = (flag.removeprefix("-m") for flag in flags)
    return Target(("-march=x86-64", *flags), tuple(_FEATURES.get(name, name) for name in named))


_V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt")
_V4 = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_BF16 = ("-mavx512bf16", "-mavx512vnni")

X86_TARGETS: Final = {
    "x86-64": _x86(),
    "x86-64-v3": _x86(*_V3),
    "x86-64-v4": _x86(*_V3, *_V4),
    "x86-64-v4+bf16": _x86(*_V3, *_V4, *_BF16),
}
ARM_TARGETS: Final = {
    "armv8-a": Target(("-march=armv8-a",), ()),
    "armv8.2-a+dotprod": Target(("-march=armv8.2-a+dotprod",), ("asimddp",)),
}


class NotCompiled(Exception):
    """The kernels cannot be had here; the message says why and what to do."""


def available_targets() -> dict[str, Target]:
    """Return the instruction sets that this processor has, by name; "native" is the widest."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    native = Target(("-march=native" if is_x86 else "-mcpu=native",), ())
    features = set(cpu_features().split())
    levels = X86_TARGETS if is_x86 else ARM_TARGETS
    return {"native": native} | {
        name: target for name, target in levels.items() if features.issuperset(target.features)
    }


def choose_target() -> Target:
    """Return the target that $RADIXCACHE_CPU names, or the widest.

    Raises ValueError for a name that is none, or whose instructions this processor lacks.
    """
    name = os.environ.get(TARGET_VARIABLE) or "native"
    found = available_targets()
    if name not in found:
        raise ValueError(
            f"{TARGET_VARIABLE} is {name!r}: this processor can run {', '.join(found)}"
        )
    return found[name]


def cpu_features() -> str:
    """Return what tells one processor's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


class Library(NamedTuple):
    """A library of kernels on disk.

    path     where it is
    is_new   whether this call compiled it
    """

    path: Path
    is_new: bool


def find_library(sources: Path, progress: Progress) -> Library:
    """Return the kept library of these sources for this machine, or compile and check one.

    sources   the folder of *.c and *.h
    progress  told of each file that is compiled

    One process at a time compiles; others wait for it and take what it made.  A compiler that is
    slow is waited for.  Raises NotCompiled, ValueError as `choose_target` does.  Cost: 0.3 ms for
    one that is kept; else some seconds of CPU.
    """
    target = choose_target()
    try:
        words = shlex.split(os.environ.get("CC", "")) or ["cc"]
        folder = _folder()
    except (ValueError, RuntimeError) as error:  # a quote without its end; nobody's home
        raise NotCompiled(
            f"CC or the cache folder can't be read: {error}; set RADIXCACHE_HOME"
        ) from None
    compiler = shutil.which(words[0])
    if compiler is None:
        raise NotCompiled(
            f"no C compiler {words[0]!r} is installed; install {COMPILERS}, or set CC"
        )
    command = [compiler, *words[1:], *FLAGS, *target.flags]
    try:
        stem = f"kernels-{_digest(command, sources)}"
        kept = _kept(folder, stem)
        if kept:
            return Library(kept, is_new=False)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, progress):
            _remove_unfinished(folder)
            kept = _kept(folder, stem)  # by the process that held the lock
            if kept:
                return Library(kept, is_new=False)
            return Library(_compile(command, sources, folder, stem, progress), is_new=True)
    except subprocess.CalledProcessError as error:
        raise NotCompiled(
            f"install {COMPILERS}, or set CC: {shlex.join(error.cmd)} failed: "
            f"{error.stderr.strip()[:2000] or f'it ended with status {error.returncode}'}"
        ) from None
    except OSError as error:
        raise NotCompiled(f"kernels cannot be made or opened in {folder}: {error}") from None


def _folder() -> Path:
    """$RADIXCACHE_HOME/native, else below $XDG_CACHE_HOME, else below ~/.cache."""
    home = os.environ.get("RADIXCACHE_HOME")
    if home:
        return Path(home) / "native"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "radixcache" / "native"


def _digest(command: Sequence[str], sources: Path) -> str:
    digest = hashlib.sha256(repr(command).encode())
    stat = Path(command[0]).stat()
    digest.update(f"{stat.st_size} {stat.st_mtime_ns} {cpu_features()}".encode())
    for source in sorted((*sources.glob("*.c"), *sources.glob("*.h"))):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _kept(folder: Path, stem: str) -> Path | None:
    """Return the library of this name whose content is what it was when it was named."""
    for kept in sorted(folder.glob(f"{stem}-*.so")):
        with contextlib.suppress(OSError):  # gone by now
            if kept == _place(folder, stem, kept.read_bytes()):
                return kept
    return None


def _place(folder: Path, stem: str, content: bytes) -> Path:
    """Where a library with this content is kept; 0.1 ms for one of ours."""
    return folder / f"{stem}-{hashlib.sha256(content).hexdigest()[:20]}.so"


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock, which the system frees even if this process is killed."""
    with (folder / ".lock").open("wb") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another start, which compiles kernels", 0, None)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left; nobody compiles, for this one holds the lock."""
    for left in folder.glob(f"{_UNFINISHED}*") if fcntl is not None else ():
        shutil.rmtree(left, ignore_errors=True)


def _compile(
    command: Sequence[str], sources: Path, folder: Path, stem: str, progress: Progress
) -> Path:
    """Compile each file on a core of its own, link, check, and name what came of it."""
    units = sorted(sources.glob("*.c"))
    with (
        tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as unfinished,
        ThreadPoolExecutor(os.cpu_count() or 1) as threads,
    ):
        objects = [Path(unfinished) / f"{unit.stem}.o" for unit in units]
        progress("compiling kernels", 0, len(units))
        running = [
            threads.submit(_run, [*command, "-c", str(unit), "-o", str(made)])
            for unit, made in zip(units, objects, strict=True)
        ]
        try:
            for done, unit in enumerate(as_completed(running), 1):
                unit.result()
                progress("compiling kernels", done, len(units))
        finally:  # of a failure or an interruption: files that nobody compiles yet stay uncompiled
            threads.shutdown(cancel_futures=True)
        library = Path(unfinished) / "kernels.so"
        _run([*command, "-shared", *map(str, objects), "-o", str(library), "-lm"])
        check_library(library, command[0])
        return library.replace(_place(folder, stem, library.read_bytes()))


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")


def check_library(library: Path, compiler: str) -> None:
    """Compute small known values with a library, in a process that may crash.

    Raises NotCompiled where it crashes or a value is wrong.  Cost: a start of Python with torch.
    """
    environment = os.environ | {
        CHECKED_VARIABLE: str(library),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    run = subprocess.run(
        [sys.executable, "-m", "kernels.native.check"],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if run.returncode:
        found = (run.stderr.strip() or f"it ended with status {run.returncode}").splitlines()[-1]
        raise NotCompiled(
            f"the kernels that {compiler} compiled compute wrong values ({found}): install another "
            f"compiler ({COMPILERS}), or set CC"
        )
