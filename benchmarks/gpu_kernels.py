"""The kernels on a GPU: right first, then how near the machine's ceilings.

    python -m benchmarks.gpu_kernels [--json FILE] [--predict]

Needs torch and Triton alone, and under 8 minutes on an H200.  Where there is no GPU, or with
--predict, it prints what the least work of each case would take at the ceilings below.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import Call, Case, all_cases
from benchmarks.gpu_checks import answers
from kernels.roofline import Ceilings, least_seconds

H200 = Ceilings(bytes_s=4.3e12, flop_s=790e12)
"""Once measured on one: copying, read and written bytes together, and a bfloat16 product."""


def median_seconds(calls: list[Call]) -> float:
    """Return the median time of a call; each has tensors of its own, and L2 is flushed between."""
    import triton.testing  # only where there is a GPU

    for call in calls:
        call()
    times = [
        triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median") for call in calls
    ]
    return sorted(times)[len(times) // 2] / 1e3


def measured_ceilings(device: torch.device) -> Ceilings:
    """Measure what a plain copy and a large product reach here."""
    big = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    copy = median_seconds([lambda: other.copy_(big)])
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    product = median_seconds([lambda: a @ b])
    return Ceilings(bytes_s=2 * big.nbytes / copy, flop_s=2 * 8192**3 / product)


def row_of(case: Case, ceilings: Ceilings, device: torch.device | None) -> dict[str, Any]:
    """Return one line of the report; times are None without a device."""
    least = least_seconds(case.work, ceilings)
    row: dict[str, Any] = {
        "case": case.name,
        "bytes": case.work.bytes,
        "flop": case.work.flop,
        "least_us": least * 1e6,
        "measured_us": None,
        "share": None,
        "goal": case.goal,
        "peer_us": None,
    }
    if device is not None:
        seconds = median_seconds(case.build(device))
        row |= {"measured_us": seconds * 1e6, "share": least / seconds}
        if case.peer is not None:
            row["peer_us"] = median_seconds(case.peer(device)) * 1e6
        torch.cuda.empty_cache()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the short table that is printed last."""

    def shown(value: float | None, form: str) -> str:
        return "not measured" if value is None else format(value, form)

    lines = [f"{'case':24}{'least us':>10}{'us':>14}{'share':>14}{'goal':>7}{'peer us':>14}"]
    for row in rows:
        goal = "" if row["goal"] is None else format(row["goal"], ".2f")
        lines.append(
            f"{row['case']:24}{row['least_us']:>10.1f}{shown(row['measured_us'], '.1f'):>14}"
            f"{shown(row['share'], '.2f'):>14}{goal:>7}{shown(row['peer_us'], '.1f'):>14}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    device = torch.device("cuda") if torch.cuda.is_available() and not asked.predict else None
    checks: dict[str, bool] = {}
    ceilings = H200
    if device is None:
        print("Nothing is run here: the least time of each case on an H200.")
    else:
        checks = dict(answers(device))
        for question, holds in checks.items():
            print(f"{'yes' if holds else 'NO '}  {question}", flush=True)
        ceilings = measured_ceilings(device)
    rows = [row_of(case, ceilings, device) for case in all_cases()]
    if asked.json:
        report = {
            "measured": device is not None,
            "gpu": torch.cuda.get_device_name(device) if device else None,
            "torch": torch.__version__,
            "ceilings": ceilings._asdict(),
            "checks": checks,
            "cases": rows,
        }
        asked.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"copy {ceilings.bytes_s / 1e12:.2f} TB/s, bf16 {ceilings.flop_s / 1e12:.0f} TFLOP/s")
    print(table(rows))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
