"""Is the cache invisible on this GPU?  Each op and a small model, bit by bit, in minutes.

    python -m benchmarks.gpu_invariance [--json FILE] [--seconds 300] [--only TEXT …] [--jobs N]
                                        [--dry-run]

Needs torch and Triton alone; where the runtime's libraries are too, its own model code is asked as
well.  The reference is each sequence whole and alone; chunks, batches, companions, block sizes,
splits, shared prefixes, rows of NaN beside and CUDA graphs must give its bits.  With --dry-run
everything runs on tiny shapes in Triton's interpreter.  Exit status 1 where a question is answered
no or could not be asked.
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

from benchmarks.gpu import invariance, model_invariance
from benchmarks.gpu.children import Collection, names_from_parent, run_items

ITEM_LIMIT_S: Final = 120.0
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--seconds", type=float, default=300.0, help="all together")
    parser.add_argument("--only", nargs="*", default=[], help="parts of questions' names")
    parser.add_argument("--jobs", type=int, default=4, help="children at a time")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, interpreted")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def questions(device: torch.device) -> dict[str, Any]:
    return {**invariance.questions(device), **model_invariance.questions(device)}


def child(asked: argparse.Namespace) -> int:
    """Answer the questions that the parent names."""
    if asked.dry_run:
        torch.set_num_threads(1)
        import tests.support.triton_interpreter  # noqa: F401  (importing is the repair)
    device = torch.device("cpu" if asked.dry_run else "cuda")
    found = questions(device)

    def run(name: str) -> Row:
        with torch.no_grad():
            answer: Row = found[name]()
        return answer

    settle = (lambda: None) if asked.dry_run else torch.cuda.synchronize
    return run_items(names_from_parent(), run, settle=settle, deadline=asked.deadline)


def line(row: Row) -> str:
    """Write one answer in a line of the table."""
    if "compared" not in row:
        why = next(row[k] for k in ("error", "skipped", "absent") if k in row)
        return f"{'--' if 'absent' in row else 'LOST':6}{row['item']}: {why}"
    if row["answer"]:
        return f"{'equal':6}{row['item']}: {row['compared']} ways"
    differ = row["differ"]
    shown = "; ".join(differ[:4]) + ("; …" if len(differ) > 4 else "")
    return f"{'OTHER':6}{row['item']}: {len(differ)} of {row['compared']} ways differ: {shown}"


def shown(row: Row) -> None:
    """Print an answer as it comes."""
    print(line(row), flush=True)


def main() -> int:
    asked = arguments()
    if asked.child:
        return child(asked)
    if not asked.dry_run and not torch.cuda.is_available():
        print("There is no GPU here; --dry-run asks the same in Triton's interpreter.")
        return 1
    device = torch.device("cpu" if asked.dry_run else "cuda")
    names = [
        name
        for name in questions(device)
        if not asked.only or any(text in name for text in asked.only)
    ]
    began = time.time()
    deadline = began + asked.seconds
    command = [sys.executable, "-m", "benchmarks.gpu_invariance", "--child"]
    command += ["--deadline", str(deadline - 5), *(["--dry-run"] if asked.dry_run else [])]
    env = {"TRITON_INTERPRET": "1", "RADIXCACHE_KERNELS": "triton"} if asked.dry_run else {}

    def answered(part: list[str]) -> dict[str, Row]:
        return Collection(command, env, deadline, ITEM_LIMIT_S, shown).collect(part)

    jobs = 1 if asked.dry_run else max(1, asked.jobs)
    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(answered, [names[job::jobs] for job in range(jobs)]))
    found = {name: row for part in parts for name, row in part.items()}
    rows = [found[name] for name in names]
    if asked.json:
        report = {
            "gpu": None if asked.dry_run else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "seconds": time.time() - began,
            "answers": rows,
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{'interpreted, tiny' if asked.dry_run else torch.cuda.get_device_name()}")
    print(*map(line, rows), sep="\n")
    absent = [row for row in rows if "absent" in row]
    equal = [row for row in rows if row.get("answer")]
    compared = sum(row["compared"] for row in equal)
    print(f"{len(equal)} of {len(rows) - len(absent)} answered equal, in {compared} ways")
    return 0 if rows and len(equal) + len(absent) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
