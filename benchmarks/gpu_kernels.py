"""The kernels on a GPU: right first, then how near the machine's ceilings.

    python -m benchmarks.gpu_kernels [--json FILE] [--seconds 450] [--only TEXT …] [--jobs N]
                                     [--predict | --dry-run]

Needs torch and Triton alone, and under 8 minutes on an H200.  Where there is no GPU, or with
--predict, it prints what the least work of each case would take at the ceilings below; with
--dry-run it runs every item on tiny shapes in Triton's interpreter, and its times mean nothing.

First the questions: are the kernels right, which tiles and row counts give equal bits, does a CUDA
graph change any.  They run side by side with children that compile.  Then one child times every
case alone on the device.  A case that fails, hangs or kills its process loses nothing else, and no
case begins when the time is nearly up; what was not measured is named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.case import Case
from benchmarks.gpu.children import Collection, names_from_parent, run_items
from benchmarks.gpu.items import KINDS, all_cases, names_of, runner
from benchmarks.gpu.report import H200, ceilings_of, fates, goal_line, goals_of, rows_of, table
from benchmarks.gpu.steps import FULL, TINY

ITEM_LIMIT_S: Final = 90.0
QUESTIONS_SHARE: Final = 0.4  # of the time, at most, for what is not timed
DRY_COMPILES: Final = (
    25  # a dry run makes so much fewer calls before those that pretend to be timed
)
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "library": {},
    "library, CUBLAS_WORKSPACE_CONFIG=:16:8": {"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
    "library, both workspaces small": {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "1",
    },
}
"""Environments that cuBLAS reads once, when a process begins."""

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--seconds", type=float, default=450.0, help="all together")
    parser.add_argument("--only", nargs="*", default=[], help="parts of questions' or cases' names")
    parser.add_argument("--jobs", type=int, default=6, help="children that compile at a time")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted, untimed")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def child(asked: argparse.Namespace) -> int:
    """Run the items that the parent names."""
    if asked.dry_run:
        torch.set_num_threads(1)
        import tests.support.triton_interpreter  # noqa: F401  (importing is the repair)
    device = torch.device("cpu" if asked.dry_run else "cuda")
    run = runner(asked.child, device, tiny=asked.dry_run)
    settle = (lambda: None) if asked.dry_run else torch.cuda.synchronize
    return run_items(names_from_parent(), run, settle=settle, deadline=asked.deadline)


def wanted(asked: argparse.Namespace, name: str) -> bool:
    """True for an item that the command line doesn't leave out."""
    return not asked.only or any(text in name for text in asked.only)


class Run:
    """One run of everything, in children."""

    def __init__(self, asked: argparse.Namespace, cases: list[Case]) -> None:
        self.asked = asked
        self.cases = cases
        self.began = time.time()
        self.found: dict[str, dict[str, Row]] = {}

    def collect(self, label: str, kind: str, names: list[str], deadline: float) -> None:
        """Run a list of items, and keep what came of it under a label."""
        command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--child", kind]
        command += ["--deadline", str(deadline - 5)]
        env = dict(SETTINGS.get(label, {}))
        if self.asked.dry_run:
            command.append("--dry-run")
            env |= {"TRITON_INTERPRET": "1", "RADIXCACHE_KERNELS": "triton"}
        collection = Collection(command, env, deadline, ITEM_LIMIT_S, self.shown(label))
        self.found[label] = collection.collect(names)

    def shown(self, label: str) -> Any:
        """Return what prints a row as it comes; of compiling only what fails."""

        def show(row: Row) -> None:
            outcome = next((row[k] for k in ("error", "skipped", "absent") if k in row), None)
            if outcome is None and "us" in row:
                outcome = f"{row['us']:.1f} us"
            if not label.startswith("compile") or "error" in row:
                at = time.time() - self.began
                print(f"{at:5.0f} s  {label}: {row['item']}: {outcome or row.get('answer')}")
                sys.stdout.flush()

        return show

    def questions_and_compiles(self, until: float) -> None:
        """Ask everything, and compile everything, side by side."""
        compiled = names_of("compile", self.cases)
        jobs = max(1, min(self.asked.jobs, (os.cpu_count() or 2) // 2))
        if self.asked.dry_run:
            compiled, jobs = compiled[::DRY_COMPILES], 1
        with ThreadPoolExecutor(jobs + 1 + len(SETTINGS)) as pool:
            tasks: list[Future[None]] = []
            settings = list(SETTINGS)[: 1 if self.asked.dry_run else None]
            for label in ("questions", *settings):
                kind = "library" if label in SETTINGS else label
                names = [name for name in names_of(kind, self.cases) if wanted(self.asked, name)]
                tasks.append(pool.submit(self.collect, label, kind, names, until))
            for job in range(jobs):
                part = compiled[job::jobs]
                label = f"compile {job}"
                tasks.append(pool.submit(self.collect, label, "compile", part, until))
            for task in tasks:
                task.result()

    def everything(self) -> None:
        until = self.began + self.asked.seconds
        self.questions_and_compiles(self.began + QUESTIONS_SHARE * self.asked.seconds)
        self.collect("time", "time", names_of("time", self.cases), until)


def report_of(asked: argparse.Namespace, run: Run | None, cases: list[Case]) -> Row:
    """Put everything that was found into one record."""
    found = {} if run is None else run.found
    timed = found.get("time", {})
    measured = ceilings_of(timed)
    ceilings = measured or H200
    rows = rows_of(cases, timed, ceilings)
    on_gpu = run is not None and not asked.dry_run
    return {
        "measured": on_gpu,
        "dry_run": bool(asked.dry_run),
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "torch": torch.__version__,
        "ceilings": ceilings._asdict() | {"measured": measured is not None},
        "questions": {label: list(part.values()) for label, part in found.items()},
        "cases": rows,
        "goals": goals_of(cases, rows, ceilings),
        "seconds": 0.0 if run is None else time.time() - run.began,
    }


def print_report(report: Row) -> bool:
    """Print what was found, the table last; return whether all that must hold does."""
    rows, questions = report["cases"], report["questions"]
    right = []
    for label in ("questions", *SETTINGS):
        for row in questions.get(label, []):
            if isinstance(row.get("answer"), str):
                print(f"{label}: {row['item']}: {row['answer']}")
            else:
                right.append(row)
    wrong = [row for row in right if row.get("answer") is not True]
    print(f"{len(right) - len(wrong)} of {len(right)} questions answered yes")
    for row in wrong:
        print(f"  NO  {row['item']}: {row.get('error', row.get('skipped', ''))}")
    for line in fates(rows):
        print(line)
    if report["dry_run"]:
        print("A dry run: every time below is pretended.")
    else:
        print(*map(goal_line, report["goals"]), sep="\n")
    ceilings = report["ceilings"]
    note = "" if ceilings["measured"] else " (of an H200 once; not measured in this run)"
    copy, product = ceilings["bytes_s"] / 1e12, ceilings["flop_s"] / 1e12
    print(f"copy {copy:.2f} TB/s, bf16 {product:.0f} TFLOP/s{note}; {report['seconds']:.0f} s")
    print(table(rows))
    failed = [row for row in rows if row["kind"] == "ours" and "error" in row]
    return not wrong and not failed


def main() -> int:
    asked = arguments()
    if asked.child:
        return child(asked)
    shapes = TINY if asked.dry_run else FULL
    cases = [case for case in all_cases(shapes) if wanted(asked, case.name)]
    run = None
    if asked.dry_run or (torch.cuda.is_available() and not asked.predict):
        run = Run(asked, cases)
        try:
            run.everything()
        finally:
            write(asked, report_of(asked, run, cases))
    else:
        print("Nothing is run here: the least time of each case on an H200.")
    report = report_of(asked, run, cases)
    write(asked, report)
    return 0 if print_report(report) else 1


def write(asked: argparse.Namespace, report: Row) -> None:
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
