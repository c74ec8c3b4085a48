"""Compile every shipped kernel for GPUs that are not here, and read what came out of the binary.

    python -m tests.kernels.compile_ahead [--targets sm_90 …] [--kernels linear …] [--first]
                                          [--json FILE] [--docs docs/kernels.md]

Owns: the targets, the readings and the claims about them; the exit status is 1 where a claim fails.
Does not know: any kernel; whatever module of `kernels` offers `shipped()` is compiled.
Idea: registers, spills, shared memory and the instructions that make a kernel fast are facts of the
compiler's output, and that needs no GPU.  It does need a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
from kernels.variant import Variant
from tests.kernels.ahead_table import Reading, condensed, full_table, replace_table

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Target(NamedTuple):
    """A chip.  Shared memory is what one program may have at most, in bytes."""

    gpu: GPUTarget
    shared_limit: int
    matrix: str  # a pattern of the instructions that multiply tiles
    wide: str  # and of those that read 16 bytes a thread, or whole tiles


NVIDIA_WIDE = r"LDG(STS)?\S*\.128|UTMALDG|UBLKCP"
TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10, r"HMMA", NVIDIA_WIDE),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10, r"[HQ]GMMA", NVIDIA_WIDE),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 << 10, r"UTC\w*MMA", NVIDIA_WIDE),
    "gfx942": Target(
        GPUTarget("hip", "gfx942", 64), 64 << 10, r"v_mfma", r"(global|buffer)_load_dwordx4"
    ),
}


class Task(NamedTuple):
    """One variant for one target, named so that another process finds it."""

    module: str
    place: int
    target: str


def all_shipped() -> Iterator[tuple[str, int, Variant]]:
    """Iterate over every variant, with its module and its place there."""
    for found in pkgutil.iter_modules(kernels.__path__):
        if found.name.endswith("_triton"):
            module = importlib.import_module(f"kernels.{found.name}")
            for place, variant in enumerate(module.shipped()):
                yield module.__name__, place, variant


def tasks(targets: list[str], names: list[str], *, first: bool) -> Iterator[Task]:
    """Iterate over what to compile; `first` keeps one variant of each kernel for each target."""
    seen = set()
    for module, place, variant in all_shipped():
        kernel = variant.kernel.__name__
        if names and not any(name in kernel for name in names):
            continue
        for target in targets:
            if variant.targets is not None and target not in variant.targets:
                continue
            if first and (kernel, target) in seen:
                continue
            seen.add((kernel, target))
            yield Task(module, place, target)


def source_of(variant: Variant) -> ASTSource:
    """Describe a variant as a launch with the usual strides would."""
    names = list(variant.kernel.arg_names)
    unknown = {*variant.types, *variant.constants, *variant.loose} - set(names)
    assert not unknown, f"{variant.kernel.__name__} has no arguments {unknown}"
    signature = {
        name: "constexpr" if name in variant.constants else variant.types.get(name, "i32")
        for name in names
    }
    divisible = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if name not in variant.loose and signature[name] not in ("constexpr", "fp32")
    }
    return ASTSource(
        variant.kernel, signature=signature, constexprs=dict(variant.constants), attrs=divisible
    )


def options_of(variant: Variant) -> dict[str, Any]:
    """Return the compiler's options as a launch gives them."""
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,
    }
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers
    return options


def compile_and_read(task: Task) -> Reading:
    """Compile one variant for one target and hold it to its claims."""
    shipped = list(importlib.import_module(task.module).shipped())
    variant, target = shipped[task.place], TARGETS[task.target]
    built = triton.compile(source_of(variant), target=target.gpu, options=options_of(variant))
    read = read_nvidia if target.gpu.backend == "cuda" else read_amd
    registers, spills, text = read(built)
    reading = Reading(
        kernel=variant.kernel.__name__,
        label=variant.label,
        target=task.target,
        warps=variant.num_warps,
        registers=registers,
        spills=spills,
        shared_bytes=built.metadata.shared,
        matrix_instructions=len(re.findall(target.matrix, text)),
        wide_loads=len(re.findall(target.wide, text)),
        broken=(),
    )
    return reading._replace(broken=tuple(broken_claims(variant, target, reading)))


def broken_claims(variant: Variant, target: Target, reading: Reading) -> Iterator[str]:
    """Iterate over what a shipped kernel must be and this one is not."""
    if reading.spills:
        yield f"{reading.spills} spills"
    if reading.shared_bytes > target.shared_limit:
        yield f"{reading.shared_bytes} bytes of shared memory, the chip has {target.shared_limit}"
    if variant.matrix and not reading.matrix_instructions:
        yield "no matrix instructions"
    if variant.wide_loads and not reading.wide_loads:
        yield "no 16-byte loads"


def read_nvidia(built: Any) -> tuple[int, int, str]:
    """Return registers, spill instructions and the disassembly."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        text = tool("nvdisasm", "-c", file.name)
        usage = tool("cuobjdump", "-res-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    local = re.search(r"LOCAL:(\d+)", usage)
    assert registers, usage
    assert local, usage
    spills = len(re.findall(r"\b(?:LDL|STL)\b", text))
    return int(registers[1]), max(spills, int(local[1])), text


def tool(name: str, *arguments: str) -> str:
    """Run one of the disassemblers that come with Triton."""
    run = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return run.stdout


def read_amd(built: Any) -> tuple[int, int, str]:
    """Return registers of both kinds, spills and the assembly.

    A spill is a vector register that does not fit, or a byte of memory for what does not.  Scalar
    registers that wait in a lane of a vector register are none: they reach no memory.
    """
    text = built.asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    spills = max(field("vgpr_spill_count"), field("private_segment_fixed_size"))
    return field("vgpr_count"), spills, text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--kernels", nargs="*", default=[], help="parts of kernels' names")
    parser.add_argument("--first", action="store_true", help="one variant of each kernel")
    parser.add_argument("--json", type=Path, help="write every reading here")
    parser.add_argument("--docs", type=Path, help="replace the table of this page")
    asked = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("nothing compiles with TRITON_INTERPRET=1: unset it")
    work = list(tasks(asked.targets, asked.kernels, first=asked.first))
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        readings = list(pool.map(compile_and_read, work))
    if asked.json:
        asked.json.write_text(json.dumps([r._asdict() for r in readings], indent=1) + "\n")
    if asked.docs:
        replace_table(asked.docs, condensed(readings, triton.__version__))
    print(full_table(readings))
    broken = [r for r in readings if r.broken]
    print(f"{len(readings)} kernels compiled, {len(broken)} break a claim")
    return 1 if broken or not readings else 0


if __name__ == "__main__":
    sys.exit(main())
