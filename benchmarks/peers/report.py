"""Tables of what serve_peers.py saw, and their place on a page.

    .venv/bin/python -m benchmarks.peers.report FILE [--docs docs/performance.md]

Owns: how runs become rows.  Does not know: how they were made.
Idea: every server that was asked for has a row in every table, those that failed and those that
were faster than ours too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

BEGIN = "<!-- servers: written by benchmarks/serve_peers.py -->"
END = "<!-- end of servers -->"
_NONE = "–"
_COMPARED = {"q4_1": "bfloat16"}  # precisions that ours has not, and what they are held against

Run = dict[str, Any]


def report(result: dict[str, Any]) -> str:
    """Return the tables as Markdown, one a workload and one of the servers."""
    runs: list[Run] = result["runs"]
    tried = " Tiny sizes, to try the servers: no measurement." if result["quick"] else ""
    parts = [f"{result['date']}, {result['machine']}.{tried}", *_failures(runs)]
    for name, least in result["ideal"].items():
        parts.append(
            f"**{name}**: {least['prompt_tokens']:,} prompt tokens, of which "
            f"{least['computed_tokens']:,} must be computed.\n\n{_workload(runs, name)}"
        )
    parts.append(f"**Servers**\n\n{_servers(runs)}")
    return "\n\n".join(parts) + "\n"


def replace_section(page: Path, text: str) -> None:
    """Put the tables between the page's marks; they are appended where it has none."""
    content = page.read_text()
    section = f"{BEGIN}\n\n{text}\n{END}\n"
    if BEGIN in content:
        before, _, rest = content.partition(BEGIN)
        section = before + section + rest.partition(f"{END}\n")[2]
    else:
        section = f"{content.rstrip()}\n\n## Beside other servers\n\n{section}"
    page.write_text(section)


def _failures(runs: list[Run]) -> list[str]:
    return [
        f"**{run['server']} failed**: `{' '.join(run['error'].split())[-300:]}`"
        for run in runs
        if "error" in run
    ]


def _names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(run["server"] for run in runs))


def _seen(runs: list[Run], server: str, workload: str) -> list[dict[str, Any]]:
    mine = (run["workloads"].get(workload) for run in runs if run["server"] == server)
    return [row for row in mine if row is not None]


def _workload(runs: list[Run], workload: str) -> str:
    head = (
        *("server", "requests", "wall s", "CPU s", "first token, median ms", "p95"),
        *("computed", "cached", "output tokens/s", "wall: ours ÷ this", "CPU: ours ÷ this"),
    )
    rows = [head]
    for server in _names(runs):
        seen = _seen(runs, server, workload)
        if not seen:
            rows.append((server, *[_NONE] * (len(head) - 1)))
            continue
        sent, of = seen[0]["requests"], seen[0]["of"]
        rows.append(
            (
                server,
                str(sent) if sent == of else f"{sent} of {of}",
                _spread(seen, "wall_s"),
                _spread(seen, "cpu_s"),
                _middle(seen, "ttft_median_ms", "{:,.0f}"),
                _middle(seen, "ttft_p95_ms", "{:,.0f}"),
                _middle(seen, "computed", "{:,.0f}"),
                _middle(seen, "cached", "{:,.0f}"),
                _middle(seen, "output_tokens_s", "{:.1f}"),
                _ratio(runs, server, workload, "wall_s"),
                _ratio(runs, server, workload, "cpu_s"),
            )
        )
    return _table(rows)


def _servers(runs: list[Run]) -> str:
    rows: list[tuple[str, ...]] = [
        (
            *("server", "versions", "start to first token, s", "peak memory, MB"),
            *("same answers as ours", "cores that other programs took"),
        )
    ]
    for server in _names(runs):
        mine = [run for run in runs if run["server"] == server]
        seen = [row for run in mine for row in run["workloads"].values()]
        versions = ", ".join(f"{k} {v}" for k, v in mine[0]["versions"].items()) or _NONE
        peak = f"{max(row['peak_rss_mb'] for row in seen):,.0f}" if seen else _NONE
        prompts, answers = (
            sum(row.get(name, 0) for row in seen) for name in ("same_prompts", "same_answers")
        )
        agreed = f"{answers} of {prompts}" if prompts else _NONE
        start = _middle([run for run in mine if "start_s" in run], "start_s", "{:.1f}")
        foreign, wall = (sum(row[name] for row in seen) for name in ("foreign_s", "wall_s"))
        taken = f"{foreign / wall:.2f}" if wall else _NONE
        rows.append((server, versions, start, peak, agreed, taken))
    return _table(rows)


def _ratio(runs: list[Run], server: str, workload: str, key: str) -> str:
    """Return ours over theirs: below 1 where ours took less.  Both must have sent as much."""
    dtype = next(run["dtype"] for run in runs if run["server"] == server)
    ours = _seen(runs, f"ours-{_COMPARED.get(dtype, dtype)}", workload)
    theirs = _seen(runs, server, workload)
    if server.startswith("ours") or not ours or ours[0]["requests"] != theirs[0]["requests"]:
        return _NONE
    mine, other = (statistics.median(row[key] for row in rows) for rows in (ours, theirs))
    return f"{mine / other:.2f}" if other else _NONE


def _values(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _middle(rows: list[dict[str, Any]], key: str, form: str) -> str:
    values = _values(rows, key)
    return form.format(statistics.median(values)) if values else _NONE


def _spread(rows: list[dict[str, Any]], key: str) -> str:
    """Return the median, and where there are several runs the least and the most."""
    values = _values(rows, key)
    middle = f"{statistics.median(values):.1f}"
    return middle if len(values) < 2 else f"{middle} ({min(values):.1f} to {max(values):.1f})"


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    """Show a run that was written before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON of serve_peers.py")
    parser.add_argument("--docs", type=Path, help="page whose tables are replaced")
    args = parser.parse_args()
    text = report(json.loads(args.file.read_text()))
    print(text)
    if args.docs:
        replace_section(args.docs, text)


if __name__ == "__main__":
    main()
