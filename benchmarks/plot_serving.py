"""Pictures of docs/performance.md, from the files that bench_serving.py and serve_peers.py wrote.

    .venv/bin/python -m benchmarks.plot_serving floors FILE… --out docs/pictures/floors.svg
    .venv/bin/python -m benchmarks.plot_serving servers FILE --out docs/pictures/servers.svg

`floors` draws how many times its floor each step takes, a file a group of bars; `servers` draws
wall and CPU seconds of each workload, a bar a server.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

OURS, THEIRS = "#0a7d6c", "#9aa3ad"
mpl.rcParams |= {"svg.hashsalt": "radixcache", "font.size": 9, "axes.spines.top": False}
mpl.rcParams |= {"axes.spines.right": False}


def draw_floors(files: list[Path], out: Path) -> None:
    """Draw times the floor of first tokens and of decode."""
    results = [json.loads(path.read_text()) for path in files]
    figure, axes = plt.subplots(figsize=(7.2, 3.0))
    width = 0.8 / len(results)
    for group, result in enumerate(results):
        bars = {f"first token,\n{k}": result["first_token"][k] for k in ("cold", "warm")}
        bars |= {f"decode,\nbatch {row['batch']}": row for row in result["decode"]}
        at = [i + (group - (len(results) - 1) / 2) * width for i in range(len(bars))]
        heights = [row["times_floor"] for row in bars.values()]
        shade = 1 - 0.5 * group / max(1, len(results) - 1)
        drawn = axes.bar(at, heights, width * 0.92, color=OURS, alpha=shade, label=result["dtype"])
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
        axes.set_xticks(range(len(bars)), bars)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("times the machine's floor")
    axes.legend(frameon=False)
    _save(figure, out)


def draw_servers(file: Path, out: Path) -> None:
    """Draw wall and CPU seconds of each workload, for servers that played all of it."""
    runs: list[dict[str, Any]] = json.loads(file.read_text())["runs"]
    names = list(dict.fromkeys(run["server"] for run in runs))[::-1]
    workloads = list(dict.fromkeys(name for run in runs for name in run["workloads"]))
    figure, grid = plt.subplots(2, 2, figsize=(7.6, 5.2), sharey=True)
    for axes, workload in zip(grid.flat, workloads, strict=False):
        for place, name in enumerate(names):
            rows = [
                run["workloads"][workload]
                for run in runs
                if run["server"] == name and workload in run["workloads"]
            ]
            if not rows or rows[0]["requests"] != rows[0]["of"]:
                axes.text(0, place, " not played whole", va="center", fontsize=7, color="grey")
                continue
            wall, cpu = (statistics.median(r[key] for r in rows) for key in ("wall_s", "cpu_s"))
            axes.barh(place, wall, 0.7, color=OURS if name.startswith("ours") else THEIRS)
            axes.plot([cpu], [place], "|", color="black", markersize=9)
            axes.text(wall, place, f" {wall:.1f}", va="center", fontsize=7)
        axes.set_title(workload, fontsize=9)
        axes.set_yticks(range(len(names)), names)
    for axes in grid[1]:
        axes.set_xlabel("seconds (bar: wall, mark: CPU)")
    _save(figure, out)


def _save(figure: Any, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Draw one of the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", choices=["floors", "servers"])
    parser.add_argument("files", type=Path, nargs="+", help="JSON of a benchmark")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.picture == "floors":
        draw_floors(args.files, args.out)
    else:
        draw_servers(args.files[0], args.out)


if __name__ == "__main__":
    main()
