"""The tables of the ahead-of-time report.

Owns: one reading, and how readings are shown.  Does not know: Triton or any GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

BEGIN = "<!-- ahead of time: written by make kernels -->"
END = "<!-- end of ahead of time -->"


class Reading(NamedTuple):
    """What the binary of one variant says.

    spills               instructions that move registers to memory and back; spilled registers on
                         gfx942
    matrix_instructions  that multiply tiles
    wide_loads           instructions that read 16 bytes a thread, or whole tiles
    broken               claims that do not hold, in words
    """

    kernel: str
    label: str
    target: str
    warps: int
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int
    wide_loads: int
    broken: tuple[str, ...]


def full_table(readings: list[Reading]) -> str:
    """Return one line a reading."""
    head = ("kernel", "variant", "target", "warps", "regs", "spills", "shared", "matrix", "wide")
    rows = [head]
    for r in readings:
        numbers = (r.warps, r.registers, r.spills, r.shared_bytes, r.matrix_instructions)
        rows.append((r.kernel, r.label, r.target, *map(str, numbers), str(r.wide_loads)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    for at, r in enumerate(readings, 1):
        if r.broken:
            lines[at] += f"  BROKEN: {'; '.join(r.broken)}"
    return "\n".join(line.rstrip() for line in lines)


def condensed(readings: list[Reading], version: str) -> str:
    """Return a table in Markdown: a line a kernel, the worst of its variants for each target."""
    targets = list(dict.fromkeys(r.target for r in readings))
    lines = [
        f"Triton {version}. For each target: most registers a thread · most shared memory, KiB · "
        "spills, over all variants.",
        "",
        "| kernel | variants | " + " | ".join(targets) + " |",
        "|---" * (len(targets) + 2) + "|",
    ]
    for kernel in dict.fromkeys(r.kernel for r in readings):
        mine = [r for r in readings if r.kernel == kernel]
        cells = [worst([r for r in mine if r.target == target]) for target in targets]
        count = len({r.label for r in mine})
        lines.append(f"| `{kernel}` | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def worst(readings: list[Reading]) -> str:
    """Return the extremes of some readings of one kernel for one target."""
    if not readings:
        return "–"
    registers = max(r.registers for r in readings)
    shared = max(r.shared_bytes for r in readings) / 1024
    return f"{registers} · {shared:.3g} · {sum(r.spills for r in readings)}"


def replace_table(page: Path, table: str) -> None:
    """Write the table between the two marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r} to write between")
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")
