"""The traces that policies and curves are measured on, as the simulator has them.

Owns: which ones, and their cache sizes.  Does not know: policies, measures.
Idea: public traces of block hashes in blocks of 512 tokens, public texts and made traffic in blocks
of 16; sizes are the published ones, or shares of the different blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core_traces import TEXTS, read_trace

from radixcache.sim import Trace, TraceRequest, generate, traffic_of
from radixcache.sim import read_trace as read_hashes
from radixcache.sim.trace import BlockNames

SIZES = {
    "mooncake_conversation": (1000, 3000, 10_000, 30_000, 50_000, 100_000),
    "mooncake_synthetic": (1000, 3000, 10_000, 30_000),
}
MADE = ("chat:sessions=300", "agents:tasks=60", "few-shot:questions=1000")
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
TEXT_BLOCK_SIZE = 16


def traces(folder: str, names: list[str] | None = None) -> Iterator[tuple[Trace, list[int]]]:
    """Yield each trace with its sizes; `names` takes some of them only."""
    for name in (*SIZES, *TEXTS, *MADE):
        if names and name.partition(":")[0] not in names:
            continue
        if name in SIZES:
            yield read_hashes(Path(folder) / f"{name}.jsonl.gz"), list(SIZES[name])
            continue
        if name in TEXTS:
            trace = cut(name, read_trace(name, folder, tokens_per_hash=512, most=10**9))
        else:
            trace = generate(traffic_of(name), block_size=TEXT_BLOCK_SIZE, title=name)
        yield trace, sizes_of(trace)


def sizes_of(trace: Trace) -> list[int]:
    """Shares of the different blocks, none smaller than the longest request."""
    return sorted({max(trace.longest, round(share * trace.num_distinct)) for share in SHARES})


def cut(title: str, requests: Any) -> Trace:
    """Cut requests of token ids into whole blocks; one arrives each second."""
    names, made = BlockNames(), []
    for place, (prompt, answer) in enumerate(requests):
        ids = [*prompt.tolist(), *answer.tolist()]
        ends = range(TEXT_BLOCK_SIZE, len(ids) + 1, TEXT_BLOCK_SIZE)
        path = names.path(tuple(ids[end - TEXT_BLOCK_SIZE : end]) for end in ends)
        first = len(prompt) // TEXT_BLOCK_SIZE
        made.append(
            TraceRequest(
                arrival_s=float(place),
                prompt=path[:first],
                answer=path[first:],
                prompt_tokens=len(prompt),
                output_tokens=len(answer),
            )
        )
    return Trace(
        title=title,
        block_size=TEXT_BLOCK_SIZE,
        requests=made,
        num_distinct=len(names),
        has_times=False,
    )
