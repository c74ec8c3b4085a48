"""Hit rate of each eviction policy on each trace and size, beside LRU and the optimum.

    .venv/bin/python benchmarks/bench_policies.py --data FOLDER [--traces …] [--policies …]

Every cell is a replay through the real cache, one request after another.  Prints a Markdown table a
trace, in per cent of the blocks asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from sim_traces import traces

from radixcache.sim import lru_curve, simulate

POLICIES = ("lru", "fifo", "lfu", "slru", "slru-hits", "cost", "told-closed", "told-dead", "opt")


def main() -> None:
    """Run, print tables, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the traces")
    parser.add_argument("--traces", default="", help="some of them, by name")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--out", type=Path, default=Path("results/policies.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for trace, sizes in traces(args.data, [n for n in args.traces.split(",") if n]):
        best = lru_curve(trace).best
        print(
            f"\n{trace.title}: {trace.num_references:,} references, {trace.num_distinct:,} "
            f"different blocks of {trace.block_size}, without bounds {best:.2%}\n\n"
            f"| | {' | '.join(f'{size:,}' for size in sizes)} |\n|---{'|---:' * len(sizes)}|"
        )
        for policy in args.policies.split(","):
            began = time.perf_counter()
            rates = [simulate(trace, policy, size).outcome.hit_rate for size in sizes]
            seconds = time.perf_counter() - began
            print(f"| {policy} | {' | '.join(f'{100 * r:.2f}' for r in rates)} |", flush=True)
            rows += [
                {"trace": trace.title, "policy": policy, "num_blocks": size, "hit_rate": rate}
                for size, rate in zip(sizes, rates, strict=True)
            ]
            rows[-1]["seconds"] = round(seconds, 2)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
