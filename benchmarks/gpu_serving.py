"""Serving on a GPU: prefill and decode of Llama shapes beside the machine's measured limits.

    python -m benchmarks.gpu_serving [--json FILE] [--seconds 450] [--only TEXT …]
                                     [--predict | --dry-run]

Random weights of 135M, 1B and 8B shapes are made on the spot.  First the layers out of the kernels
alone, captured in CUDA graphs: torch and Triton are enough.  Then, where the runtime's libraries
are installed, its executor's steps by the wall clock, launched by the host, and the real SmolLM2
through `LLM`, if it was pulled before.  The floor of a step is its bytes (weights once, K/V) over
the copy bandwidth, or its operations over the matrix rate, measured in the same run.

With --predict, or without a GPU, it prints the floors at the ceilings of an H200; with --dry-run
everything runs on tiny shapes in Triton's interpreter, and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.children import Collection, names_from_parent, run_items
from benchmarks.gpu.clock import CEILINGS, Clock, DeviceClock, OneCall
from benchmarks.gpu.items import timed
from benchmarks.gpu.report import H200, ceilings_of, fates, goal_line, goals_of, rows_of, table
from benchmarks.gpu.serving import FEW, SHAPES, serving_cases

ITEM_LIMIT_S: Final = 120.0
COMPILE_SHARE: Final = 0.35  # of the time, at most
REPEAT_MS: Final = 300
ENGINE: Final = "engine: "
REAL: Final = f"{ENGINE}SmolLM2, eight questions"
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--seconds", type=float, default=450.0, help="all together")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted, untimed")
    parser.add_argument("--child", choices=("compile", "time"), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def engine_row(name: str, device: torch.device, *, tiny: bool) -> Row:
    """Run a step of the engine by its name."""
    try:
        from benchmarks.gpu import engine_steps
    except ModuleNotFoundError as error:
        return {"absent": f"the runtime needs {error.name}, which is not installed"}
    if name == REAL:
        return engine_steps.real_model()
    found = {f"{ENGINE}{case.subject}": case for case in serving_cases(tiny=tiny)}
    return engine_steps.step_seconds(device, **step_of(found[name].build))


def step_of(build: Any) -> Row:
    """Return the shape and lengths that a case's tensors are built for."""
    return {key: build.keywords[key] for key in ("shape", "new", "lens")}


def child(asked: argparse.Namespace) -> int:
    """Run the items that the parent names."""
    if asked.dry_run:
        torch.set_num_threads(1)
        import tests.support.triton_interpreter  # noqa: F401  (importing is the repair)
    device = torch.device("cpu" if asked.dry_run else "cuda")
    cases = {case.name: case for case in serving_cases(tiny=asked.dry_run)}
    pretended = asked.dry_run or asked.child == "compile"
    clock: Clock = OneCall() if pretended else DeviceClock(REPEAT_MS)

    def run(name: str) -> Row:
        if name.startswith(ENGINE):
            return engine_row(name, device, tiny=asked.dry_run)
        return timed(cases, clock, device, asked.dry_run, name)

    settle = (lambda: None) if asked.dry_run else torch.cuda.synchronize
    return run_items(names_from_parent(), run, settle=settle, deadline=asked.deadline)


def measured(asked: argparse.Namespace, names: list[str]) -> dict[str, Row]:
    """Compile everything, a child a shape, then time everything in one."""
    began = time.time()
    env = {"TRITON_INTERPRET": "1", "RADIXCACHE_KERNELS": "triton"} if asked.dry_run else {}

    def collect(kind: str, part: list[str], deadline: float) -> dict[str, Row]:
        command = [sys.executable, "-m", "benchmarks.gpu_serving", "--child", kind]
        command += ["--deadline", str(deadline - 5), *(["--dry-run"] if asked.dry_run else [])]
        return Collection(command, env, deadline, ITEM_LIMIT_S, shown).collect(part)

    def shown(row: Row) -> None:
        outcome = next((row[k] for k in ("error", "skipped", "absent") if k in row), None)
        print(f"{time.time() - began:5.0f} s  {row['item']}: {outcome or row.get('us')}")
        sys.stdout.flush()

    models = [f"{name} " for name in (FEW if asked.dry_run else SHAPES)]
    with ThreadPoolExecutor(len(models)) as pool:
        parts = [[name for name in names if name.startswith(model)] for model in models]
        until = began + COMPILE_SHARE * asked.seconds
        list(pool.map(lambda part: collect("compile", part, until), parts))
    return collect("time", [*CEILINGS, *names], began + asked.seconds)


def main() -> int:
    asked = arguments()
    if asked.child:
        return child(asked)
    on_gpu = torch.cuda.is_available() and not asked.predict and not asked.dry_run
    cases = list(serving_cases(tiny=asked.dry_run))
    engine = [f"{ENGINE}{subject}" for subject in dict.fromkeys(case.subject for case in cases)]
    engine += [] if asked.dry_run else [REAL]
    names = [*(case.name for case in cases), *engine]
    names = [n for n in names if not asked.only or any(text in n for text in asked.only)]
    cases = [case for case in cases if case.name in names]
    found = measured(asked, names) if on_gpu or asked.dry_run else {}
    limits = ceilings_of(found)
    ceilings = limits or H200
    rows = rows_of(cases, found, ceilings)
    report = {
        "measured": on_gpu,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "torch": torch.__version__,
        "ceilings": ceilings._asdict() | {"measured": limits is not None},
        "cases": rows,
        "engine": [found[name] for name in engine if name in found],
        "goals": goals_of(cases, rows, ceilings),
    }
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    return print_report(report, dry=asked.dry_run)


def print_report(report: Row, *, dry: bool) -> int:
    """Print what was found, the table last; return the exit status."""
    rows = report["cases"]
    print(*fates(rows), sep="\n")
    if dry:
        print("A dry run: every time below is pretended.")
    else:
        print(*map(goal_line, report["goals"]), sep="\n")
    least = {f"{ENGINE}{row['case']}": row["least_us"] for row in rows}
    for row in report["engine"]:
        if "us" in row:
            times = row["us"] / least.get(row["item"], row["us"])
            more = f", {row['tokens_s']:.0f} tokens/s" if "tokens_s" in row else ""
            print(f"{row['item']}: {row['us']:.0f} us, {times:.2f} times the floor{more}")
        else:
            print(f"{row['item']}: {row.get('error') or row.get('absent') or row.get('skipped')}")
    ceilings = report["ceilings"]
    note = "" if ceilings["measured"] else " (of an H200 once; not measured in this run)"
    copy, product = ceilings["bytes_s"] / 1e12, ceilings["flop_s"] / 1e12
    print(f"copy {copy:.2f} TB/s, bf16 {product:.0f} TFLOP/s{note}")
    print(table(rows))
    return 1 if any(row["kind"] == "ours" and "error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
