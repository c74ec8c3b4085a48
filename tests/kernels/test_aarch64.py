"""The kernels in C on ARM, emulated; and the same program on each target of this machine.

Torch does not run there, so the check is a program in C: values against double, and each row alone
against itself among others.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels import native
from kernels.native.compiler import (
    ARM_TARGETS,
    FLAGS,
    TARGET_VARIABLE,
    available_targets,
    choose_target,
    find_library,
)
from tests.kernels.conftest import HERE

CHECK = HERE / "aarch64_check.c"
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"


def lacking(*programs: str) -> str:
    """Why a test that needs these programs is skipped; "" where all are there."""
    missing = [name for name in programs if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


def built(program: Path, compiler: str, flags: Sequence[str], *files: Path) -> Path:
    """The check, compiled and linked with `files`."""
    command = [compiler, *FLAGS, *flags, f"-I{native.SOURCES}", CHECK, *files, "-lm", "-o", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return program


def check(*command: str | Path) -> str:
    """Run the check; returns the name of what it was compiled for."""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    told, _, target = run.stdout.strip().partition(" checks failed: ")
    failed, _, total = told.partition(" of ")
    assert failed == "0"
    assert int(total) > 1000
    return target


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The kernels, compiled for the plainest ARM of 64 bits."""
    if lacking(CROSS, EMULATOR):
        pytest.skip(lacking(CROSS, EMULATOR))
    folder = tmp_path_factory.mktemp("aarch64")
    sources = sorted(native.SOURCES.glob("*.c"))
    command = [CROSS, *FLAGS, *ARM_TARGETS["armv8-a"].flags, "-c", *sources]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return sorted(folder.glob("*.o"))


def test_results_on_arm_are_right_and_batch_invariant(
    tmp_path: Path, objects: Sequence[Path]
) -> None:
    program = built(tmp_path / "check", CROSS, ["-static"], *objects)
    assert check(EMULATOR, program).startswith("NEON")


def test_results_on_arm_with_products_of_bytes_are_too(
    tmp_path: Path, objects: Sequence[Path]
) -> None:
    """One file has a loop of its own for them; the others are those of the plainest ARM."""
    files = [native.SOURCES / "integers.c", *(o for o in objects if o.stem != "integers")]
    flags = ["-static", "-march=armv8.2-a+dotprod"]
    program = built(tmp_path / "check", CROSS, flags, *files)
    assert check(EMULATOR, "-cpu", "max", program).startswith("NEON")


@pytest.mark.skipif(not native.available(), reason="no C compiler")
@pytest.mark.parametrize("name", available_targets())
def test_the_same_program_finds_no_fault_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(TARGET_VARIABLE, name)
    library = find_library(native.SOURCES, lambda *_: None).path
    flags = [*choose_target().flags, f"-Wl,-rpath,{library.parent}"]
    program = built(tmp_path / "check", "cc", flags, library)
    assert check(program)


@pytest.mark.skipif(not native.available(), reason="no C compiler")
def test_a_wrong_norm_is_found(tmp_path: Path) -> None:
    """The check can fail: a norm that adds its weight, beside the library's other operations."""
    path = native.build().path
    assert path is not None
    rows = (native.SOURCES / "rows.c").read_text()
    wrong = rows.replace("rounded(dtype, value) * factor", "rounded(dtype, value) + factor")
    assert wrong != rows
    source = tmp_path / "rows.c"
    source.write_text(wrong)
    flags = [*available_targets()["native"].flags, f"-Wl,-rpath,{path.parent}"]
    program = built(tmp_path / "check", "cc", flags, source, path)
    run = subprocess.run([program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "a norm in float32 is wrong" in run.stdout
