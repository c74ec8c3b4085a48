"""From times to shares of the ceilings, what exactness costs, and goals met or missed.

Owns: the arithmetic of the report and its table.  Does not know: devices, processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from benchmarks.gpu.case import OURS, Case, Goal
from kernels.roofline import Ceilings, least_seconds

H200: Final = Ceilings(bytes_s=4.3e12, flop_s=790e12)
"""Once measured on one: copying, read and written bytes together, and a bfloat16 product."""

Row = dict[str, Any]


def ceilings_of(timed: Mapping[str, Row]) -> Ceilings | None:
    """Return what this machine reached, or None where it was not measured."""
    rates = [timed.get(name, {}).get("rate") for name in ("copy", "bf16 product")]
    if None in rates:
        return None
    bytes_s, flop_s = rates
    return Ceilings(bytes_s=bytes_s, flop_s=flop_s)


def rows_of(cases: list[Case], timed: Mapping[str, Row], ceilings: Ceilings) -> list[Row]:
    """Return one line a case: work, least time, what was measured, share of the roofline."""
    rows = []
    for case in cases:
        least = least_seconds(case.work, ceilings) * 1e6
        row: Row = {
            "case": case.subject,
            "variant": case.variant,
            "kind": case.kind,
            "bytes": case.work.bytes,
            "flop": case.work.flop,
            "least_us": least,
            "measured_us": None,
            "share": None,
        }
        found = {k: v for k, v in timed.get(case.name, {}).items() if k != "item"}
        if "us" in found:
            row |= {"measured_us": found["us"], "share": least / found["us"]}
        rows.append(row | found)
    return rows


def value_of(goal: Goal, case: Case, times: Mapping[str, float], bytes_s: float) -> float | None:
    """Return what a goal is about, as measured; None where a time is missing.

    times  microseconds by the name of a case; of the free choices the best counts
    """
    ours = times.get(case.name)
    if ours is None:
        return None
    if goal.measure == "share of bandwidth":
        return case.work.bytes / (ours * 1e-6) / bytes_s
    if goal.measure == "TFLOP/s":
        return case.work.flop / (ours * 1e-6) / 1e12
    if goal.measure == "TB/s":
        return case.work.bytes / (ours * 1e-6) / 1e12
    if goal.measure == "exactness costs":
        free = times.get(free_name(case.subject))
        return None if free is None else ours / min(free, ours) - 1
    other = times.get(goal.against or "")
    return None if other is None else other / ours


def free_name(subject: str) -> str:
    """Name the best of a subject's free choices."""
    return f"{subject} | free"


def goals_of(cases: list[Case], rows: list[Row], ceilings: Ceilings) -> list[Row]:
    """Return each goal, its value and whether it is met; None where it was not measured."""
    times = {case.name: row["us"] for case, row in zip(cases, rows, strict=True) if "us" in row}
    for case, row in zip(cases, rows, strict=True):
        if case.kind == "free" and "us" in row:
            best = free_name(case.subject)
            times[best] = min(row["us"], times.get(best, row["us"]))
    found = []
    for case in cases:
        for goal in case.goals:
            value = value_of(goal, case, times, ceilings.bytes_s)
            below = goal.measure == "exactness costs"
            met = None if value is None else value <= goal.bound if below else value >= goal.bound
            what = goal.measure if goal.against is None else f"{goal.measure} {goal.against}"
            found.append(
                {
                    "case": case.subject,
                    "goal": what,
                    "bound": goal.bound,
                    "value": value,
                    "met": met,
                }
            )
    return found


def fates(rows: list[Row]) -> list[str]:
    """Write what was not measured and why, a line for each reason of each variant."""
    lost: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for fate in ("error", "skipped", "absent"):
            if fate in row:
                lost.setdefault((fate, row["variant"], row[fate]), []).append(row["case"])
    return [
        f"  {fate}: {variant}, {why}: {', '.join(cases)}"
        for (fate, variant, why), cases in lost.items()
    ]


def goal_line(goal: Row) -> str:
    """Write a goal in one line."""
    sign = "<=" if goal["goal"] == "exactness costs" else ">="
    wanted = f"{goal['case']}: {goal['goal']} {sign} {goal['bound']:g}"
    if goal["value"] is None:
        return f"  ?     {wanted}: not measured"
    verdict = "met   " if goal["met"] else "MISSED"
    by = "" if goal["met"] else f", by {abs(goal['value'] - goal['bound']):.3g}"
    return f"  {verdict} {wanted}: {goal['value']:.3g}{by}"


def table(rows: list[Row]) -> str:
    """Return the short table that is printed last, one line a subject."""
    head = f"{'case':26}{'least us':>9}{'us':>13}{'share':>7}{'launched':>10}"
    lines = [f"{head}{'best free':>11}{'cost':>7}  best peer"]
    for row in rows:
        if row["kind"] == "ours" and row["variant"] != OURS:
            lines.append(
                f"  {row['variant']:24}{'':9}{_measured(row)}{_number(row['share'], '.2f'):>7}"
            )
        if row["variant"] != OURS:
            continue
        beside = [other for other in rows if other["case"] == row["case"]]
        us = row["measured_us"]
        free = _best(beside, "free")
        cost = None if us is None or free is None else us / min(us, free["us"]) - 1
        peer = _best(beside, "torch", "public")
        faster = "" if peer is None or us is None else f" = {peer['us'] / us:.2f} x ours"
        lines.append(
            f"{row['case']:26}{row['least_us']:>9.1f}"
            f"{_measured(row)}"
            f"{_number(row['share'], '.2f'):>7}{_number(row.get('eager_us'), '.1f'):>10}"
            f"{_number(free and free['us'], '.1f'):>11}{_number(cost, '.1%'):>7}"
            f"  {'' if peer is None else format(peer['us'], '.1f') + ' ' + peer['variant']}{faster}"
        )
    return "\n".join(lines)


def _measured(row: Row) -> str:
    unmeasured = "failed" if "error" in row else "not measured"
    return f"{_number(row['measured_us'], '.1f') or unmeasured:>13}"


def _best(rows: list[Row], *kinds: str) -> Row | None:
    found = [row for row in rows if row["kind"] in kinds and row.get("us") is not None]
    return min(found, key=lambda row: float(row["us"]), default=None)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
