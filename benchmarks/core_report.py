"""The tables that bench_core.py prints.

Owns: medians, columns and ratios.  Does not know: how anything was measured.
"""

from __future__ import annotations

import statistics
from typing import Any

UNSAID = ("samples", "folder", "chunk", "most", "tokens_per_hash")  # not in a row's name
FIELDS = {
    "us": "",
    "match_len_us": "match_len",
    "with_ids_us": "with ids",
    "thousand_us": "a block of 1,000",
    "publish_us": "publish",
    "bytes": "bytes (RSS)",
    "beside_tokens_bytes": "bytes (RSS) beside ids",
    "traced_bytes": "bytes (tracemalloc)",
}
"""Fields of the first table by what they are called there."""
TRACE_FIELDS = {
    "us": "µs a request",
    "collector_us": "of these, collector",
    "operations_per_s": "operations/s",
    "hit_percent": "hit %",
    "whole_block_hit_percent": "hit %, whole blocks",
    "peak_bytes": "peak MB (RSS)",
    "traced_peak_bytes": "peak MB (tracemalloc)",
}

Result = dict[str, Any]


def summarise(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, least and greatest of every number that was sampled, or the error."""
    good = [sample for sample in samples if "error" not in sample]
    if not good:
        return samples[-1]
    summary: dict[str, Any] = {"runs": len(good)}
    for field, value in good[0].items():
        if isinstance(value, (int, float)):
            values = [sample[field] for sample in good]
            summary[field] = {
                "median": statistics.median(values),
                "least": min(values),
                "greatest": max(values),
            }
        else:
            summary[field] = value
    return summary


def value_of(result: Result, name: str, field: str) -> float | None:
    summary = result["implementations"].get(name, {})
    return summary[field]["median"] if field in summary else None


def is_peer(name: str) -> bool:
    return name != "floor" and not name.startswith("radixcache")


def tables(results: list[Result], names: list[str]) -> str:
    """Return all tables that the results have rows for."""
    traces = [result for result in results if result["row"] == "trace"]
    others = [result for result in results if result["row"] != "trace"]
    parts = [operations(others, names)] if others else []
    parts += [flatness(others)] if any(r["row"] == "evict" for r in others) else []
    parts += [replays(traces, [name for name in names if name != "floor"])] if traces else []
    parts += ["\n".join(failures(results))]
    return "\n\n".join(filter(None, parts))


def failures(results: list[Result]) -> list[str]:
    """Return a line for each error that kept an implementation out of a row."""
    return sorted(
        {
            f"{name} failed in {result['row']}: {summary['error']}"
            for result in results
            for name, summary in result["implementations"].items()
            if "error" in summary
        }
    )


def head(first: str, columns: list[str]) -> list[str]:
    return [f"| {first} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]


def operations(results: list[Result], names: list[str]) -> str:
    """Return medians, and the best peer's as a multiple of ours: above 1, ours is better."""
    lines = head("row", [*names, "best peer ÷ ours"])
    for result in results:
        for field, called in FIELDS.items():
            cells = {name: value_of(result, name, field) for name in names}
            if all(value is None for value in cells.values()):
                continue
            words = [f"{k}={v}" for k, v in result["params"].items() if k not in UNSAID]
            label = " ".join(filter(None, [result["row"], *words, called]))
            texts = shown(cells)
            if field == "traced_bytes":  # Rust's and torch's are not in: no comparison
                texts[-1] = "–"
            lines.append(f"| {label} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def shown(cells: dict[str, float | None]) -> list[str]:
    """Return the cells of a row as text, and the ratio at its end."""
    peers = [value for name, value in cells.items() if is_peer(name) and value is not None]
    own = cells.get("radixcache")
    ratio = f"{min(peers) / own:.2f}" if peers and own else "–"
    return [*("–" if value is None else f"{value:,.1f}" for value in cells.values()), ratio]


def flatness(results: list[Result]) -> str:
    """Return what evicting one block costs at most and at least as leaves grow, by policy."""
    costs: dict[tuple[int, str, str, str], dict[int, float]] = {}
    for result in results:
        if result["row"] == "evict":
            params = result["params"]
            for name in result["implementations"]:
                for field in ("us", "thousand_us"):
                    value = value_of(result, name, field)
                    key = (params["block_size"], params["policy"], name, field)
                    if value is not None:
                        costs.setdefault(key, {})[params["leaves"]] = value
    lines = head("evict: µs a block", ["by leaves", "greatest ÷ least", "most leaves ÷ fewest"])
    for (block_size, policy, name, field), by_leaves in costs.items():
        said = ", ".join(f"{leaves:,}: {us:,.2f}" for leaves, us in sorted(by_leaves.items()))
        spread = max(by_leaves.values()) / min(by_leaves.values())
        growth = by_leaves[max(by_leaves)] / by_leaves[min(by_leaves)]
        label = f"{name} {policy}, block size {block_size}, {FIELDS[field] or 'one at a time'}"
        lines.append(f"| {label} | {said} | {spread:.2f} | {growth:.2f} |")
    return "\n".join(lines)


def replays(results: list[Result], names: list[str]) -> str:
    """Return a line for each number of each trace."""
    lines = head("trace, pool as a share of distinct tokens", [*names, "best peer ÷ ours"])
    for result in results:
        params = result["params"]
        label = f"{params['trace']} {params['share']:.0%}, block size {params['block_size']}"
        for field, called in TRACE_FIELDS.items():
            scale = 1e-6 if field.endswith("_bytes") else 1.0
            cells: dict[str, float | None] = {}
            for name in names:
                value = value_of(result, name, field)
                cells[name] = None if value is None else value * scale
            texts = shown(cells)
            if field not in ("us", "peak_bytes"):
                texts[-1] = "–"
            lines.append(f"| {label}: {called} | " + " | ".join(texts) + " |")
    return "\n".join(lines)
